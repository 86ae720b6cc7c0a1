"""ModelConfig: the shape and settings of a model, as the decoder needs them.

`ModelConfig.from_transformers` reads every checkpoint's config, and refuses settings that the decoder does
not implement by field and value, so that none is ignored silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, UnsupportedModelError, reason, shown, unsupported
from .families import SUPPORTED_SETTINGS, Family, check_settings, find_family
from .rope import RopeConfig, read_rope

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

__all__ = [
    "ModelConfig",
    "RopeConfig",
    "UnsupportedModelError",
    "make_transformers_config",
]

# transformers' names of layers that attend to all positions, and to the last few.
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MOST_LAYERS = 4096


@dataclass(frozen=True)
class ModelConfig:
    """Shape and settings of a Llama-family decoder. Sizes count elements, not bytes."""

    architecture: str  # as config.json has it, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of q_proj, k_proj and v_proj
    output_bias: bool = False  # of o_proj
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norms over head_dim of queries and keys, ahead of the rotation
    # Positions a token sees, its own included; None where it sees all. The runtime keeps sequences within it,
    # so that attention needs no window.
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for field in (*sizes, "head_dim", "max_position_embeddings"):
            if not _is_count(getattr(self, field)):
                raise unsupported(field, getattr(self, field), "an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise unsupported("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}")
        if self.head_dim % 2:
            raise unsupported("head_dim", self.head_dim, "an even number, since rotary embeddings turn pairs")
        eps: Any = self.rms_norm_eps
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0.0 <= eps < math.inf:
            raise unsupported("rms_norm_eps", eps, "a number of at least 0")
        if self.sliding_window is not None and not _is_count(self.sliding_window):
            raise unsupported("sliding_window", self.sliding_window, "null, or an integer of at least 1")

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values, of all KV heads."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_transformers(
        cls, config: PretrainedConfig, generation_config: GenerationConfig | Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Reads a transformers config. Token ids come from `generation_config` where it sets them, else from
        `config`.

        Raises UnsupportedModelError for an architecture or a setting that the decoder does not implement, and
        CheckpointError for a field that is missing or of a wrong type.
        """
        family = find_family(config.architectures, config.model_type)
        check_settings(lambda field: getattr(config, field, None), SUPPORTED_SETTINGS)
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            architecture=family.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=_read_head_dim(config),
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope=read_rope(config),
            tie_word_embeddings=bool(config.tie_word_embeddings),
            attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=bool(config.mlp_bias) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_window=_read_sliding_window(config, family),
            **_read_token_ids(config, generation_config),
        )


def make_transformers_config(fields: Mapping[str, Any]) -> PretrainedConfig:
    """The transformers config that the fields of a config.json make.

    The class is found here, by architecture, and not by transformers' Auto classes: so no checkpoint brings
    its own. Raises UnsupportedModelError for an unknown architecture, CheckpointError where transformers
    refuses a field.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    family = find_family(fields.get("architectures"), fields.get("model_type"))
    layers = fields.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:  # transformers makes a list of as many
        raise unsupported("num_hidden_layers", layers, f"at most {_MOST_LAYERS}")
    config_class: type[PretrainedConfig] = getattr(transformers, family.config_class)
    try:
        return config_class.from_dict(dict(fields))
    except (
        StrictDataclassError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise CheckpointError(f"{config_class.__name__} refuses the config: {reason(error)}") from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _read_head_dim(config: PretrainedConfig) -> int:
    """The config's head_dim; where it sets none, hidden_size shared out among the heads."""
    if getattr(config, "head_dim", None) is not None:
        return config.head_dim
    heads = config.num_attention_heads
    if not _is_count(heads) or config.hidden_size % heads:
        limit = f"a multiple of num_attention_heads = {heads}, or head_dim set"
        raise unsupported("hidden_size", config.hidden_size, limit)
    return config.hidden_size // heads


def _read_sliding_window(config: PretrainedConfig, family: Family) -> int | None:
    """The window of the layers that have one, in positions; None where no layer has.

    Qwen's configs carry a window even where `use_sliding_window` or `max_window_layers` leaves no layer to
    it, and `layer_types` says what is left. Llama has none, whatever its config carries.
    """
    layer_types = getattr(config, "layer_types", None) or ()
    unknown = sorted(set(layer_types) - {_FULL, _SLIDING})
    if unknown:
        raise unsupported("layer_types", unknown, f"{_FULL!r}, {_SLIDING!r}")
    if family.all_layers_slide or _SLIDING in layer_types:
        return getattr(config, "sliding_window", None)
    return None


def _read_token_ids(
    config: PretrainedConfig, generation_config: GenerationConfig | Mapping[str, Any] | None
) -> dict[str, Any]:
    """eos_token_ids, bos_token_id and pad_token_id. Negative ids, which some checkpoints write for "none",
    are dropped."""
    if generation_config is not None and not isinstance(generation_config, Mapping):
        generation_config = generation_config.to_dict()

    def read(field: str) -> tuple[int, ...]:
        value = (generation_config or {}).get(field)
        if value is None:
            value = getattr(config, field, None)
        ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise CheckpointError(
                f"{field} is {shown(value)}; it must be a token id, a list of token ids, or null"
            )
        return tuple(dict.fromkeys(item for item in ids if item >= 0))

    return {
        "eos_token_ids": read("eos_token_id"),
        "bos_token_id": next(iter(read("bos_token_id")), None),
        "pad_token_id": next(iter(read("pad_token_id")), None),
    }
