"""Rotary position embedding: which frequencies a model turns its queries and keys by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .errors import CheckpointError, unsupported

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RopeKind = Literal["default", "linear", "llama3"]

# The fields each kind reads beside theta; what a config carries beyond them has no meaning for the kind.
_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Base frequencies from `theta`, stretched as `kind` says.

    linear: every frequency divided by `factor` (position interpolation, arXiv 2306.15595).
    llama3: low frequencies divided by `factor`, high ones kept, a linear blend between. Low and high are told
    apart by the turns a frequency makes within `original_max_position_embeddings` positions.

    Raises UnsupportedModelError for another kind, or for a number that makes no sense.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _FIELDS:
            raise unsupported("rope_type", self.kind, ", ".join(_FIELDS))
        for field in ("theta", *_FIELDS["llama3"]):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise unsupported(f"rope {field}", value, "a number above 0")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            limit = f"above low_freq_factor = {self.low_freq_factor}"
            raise unsupported("rope high_freq_factor", self.high_freq_factor, limit)

    def inv_freq(self, head_dim: int) -> Tensor:
        """Angle per position, in radians, of each pair of dimensions: [head_dim / 2] float32, on the CPU."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        freqs = 1.0 / self.theta**exponents
        if self.kind == "linear":
            return freqs / self.factor
        if self.kind == "llama3":
            wavelengths = 2 * torch.pi / freqs
            turns = self.original_max_position_embeddings / wavelengths
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = blend.clamp(0.0, 1.0)
            return (1 - blend) * freqs / self.factor + blend * freqs
        return freqs


def read_rope(config: PretrainedConfig) -> RopeConfig:
    """The rotary embedding of a transformers config (>= 5: it gathers all older spellings in
    `rope_parameters`).

    Raises UnsupportedModelError for what the decoder does not implement, CheckpointError where a field is
    missing.
    """
    parameters: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    per_layer = sorted(key for key, value in parameters.items() if isinstance(value, dict))
    if per_layer:
        raise unsupported(
            "rope_parameters", f"set apart for {', '.join(per_layer)}", "one setting for all layers"
        )
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial not in (None, 1):
        raise unsupported("partial_rotary_factor", partial, "1.0")
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    fields = _FIELDS.get(kind, ()) if isinstance(kind, str) else ()
    # transformers lets one at the top replace one here, or the default of it.
    if "original_max_position_embeddings" in fields and (
        original := getattr(config, "original_max_position_embeddings", None)
    ):
        parameters["original_max_position_embeddings"] = original
    missing = [field for field in fields if parameters.get(field) is None]
    if missing:
        raise CheckpointError(
            f"rope_type {kind!r} needs {', '.join(missing)}, which rope_parameters leaves out"
        )
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
    theta = RopeConfig.theta if theta is None else theta
    return RopeConfig(theta=theta, kind=kind, **{field: parameters[field] for field in fields})
