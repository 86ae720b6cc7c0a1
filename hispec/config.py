"""Frozen, validated settings: how the engine runs, and how it speculates."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .errors import ConfigError


class Settings(BaseModel):
    """Base of every settings class: frozen, no unknown keys, no silent conversions between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Plan:
    """What one round does (design: D, C, K, R). `PLAIN` is plain decoding: the same round with two tiers left out.

    draft_layer        D: the draft tier runs layers [0, D) and reads its exit there; 0 = no layers
    check_layer        C: the check tier runs layers [D, C); None = no check tier
    num_draft_tokens   K: tokens drafted per draft cycle
    num_checks         R: draft cycles, each ended by a check, before one verify (1 without a check tier)
    """

    draft_layer: int = 0
    check_layer: int | None = None
    num_draft_tokens: int = 0
    num_checks: int = 1

    def __post_init__(self) -> None:
        if self.check_layer is not None and self.num_draft_tokens < 1:
            raise ConfigError("a check tier needs num_draft_tokens >= 1; leave `check` out for plain decoding")
        if self.num_draft_tokens == 0 and self.draft_layer != 0:
            raise ConfigError(f"draft_layer={self.draft_layer} needs num_draft_tokens >= 1; plain decoding has draft_layer=0")
        if self.check_layer is not None and self.check_layer < self.draft_layer:
            raise ConfigError(f"check_layer={self.check_layer} lies below draft_layer={self.draft_layer}")
        if self.check_layer is None and self.num_checks != 1:
            raise ConfigError(f"num_checks={self.num_checks} needs a check tier; without one it must be 1")

    @property
    def window(self) -> int:
        """Positions that one round can process: R * (K + 1)."""
        return self.num_checks * (self.num_draft_tokens + 1)

    @property
    def top_layer(self) -> int:
        """The layer at which verify resumes."""
        return self.draft_layer if self.check_layer is None else self.check_layer

    @property
    def is_plain(self) -> bool:
        return self.num_draft_tokens == 0


PLAIN = Plan()


class ExitConfig(Settings):
    """Where a tier reads tokens, and through what.

    kind    "exit": the model's own norm and head; "adapter": a trained exit
    path    folder of trained exits; None: the ones that come with HiSpec for this model
    """

    kind: Literal["exit", "adapter"] = "exit"
    path: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _path_of_adapter(self) -> ExitConfig:
        if self.path is not None and self.kind == "exit":
            raise ValueError(f"path={self.path!r} names trained exits, but kind='exit' reads the model's own head; set kind: adapter, or leave path out")
        return self


class DraftConfig(ExitConfig):
    """The draft tier: an early exit of the model itself, after `layer` layers."""

    layer: Annotated[int, Field(ge=1)]


class CheckConfig(ExitConfig):
    """The check tier: a later exit that filters drafts before the full model sees them."""

    layer: Annotated[int, Field(ge=2)]


class SpeculativeConfig(Settings):
    """How to speculate. The default of R = 2 checks of K = 2 drafts is the paper's N_d = 2, N_i = 4 [HiSpec §4].

    draft              where tokens are drafted: {"kind": "exit" or "adapter", "layer": D, "path": None}
    check              where drafts are checked: the same of C, or None for two tiers (LayerSkip, Kangaroo)
    num_draft_tokens   K, tokens per draft cycle
    num_checks         R, checks per verify; ignored (1) without a check tier
    draft_confidence   stop drafting once every row's draft probability is below this [Kangaroo]; None = never
    acceptance         "coupled": the output is plain decoding's, token for token, at every temperature;
                       "rejection": standard speculative sampling, equal in law
    control            "fixed": always this plan
    """

    draft: DraftConfig
    check: CheckConfig | None = None
    num_draft_tokens: Annotated[int, Field(ge=1, le=32)] = 2
    num_checks: Annotated[int, Field(ge=1, le=16)] = 2
    draft_confidence: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    acceptance: Literal["coupled", "rejection"] = "coupled"
    control: Literal["fixed"] = "fixed"

    @model_validator(mode="after")
    def _ordered(self) -> SpeculativeConfig:
        if self.check is not None and self.check.layer <= self.draft.layer:
            raise ValueError(
                f"check.layer={self.check.layer} must lie above draft.layer={self.draft.layer}: the check tier resumes where the draft tier stops"
            )
        return self

    def trained_layers(self) -> dict[str, int]:
        """The layers whose exits are adapters, by the name of the tier."""
        tiers = {"draft": self.draft, "check": self.check}
        return {name: tier.layer for name, tier in tiers.items() if tier is not None and tier.kind == "adapter"}

    def plan(self, num_layers: int) -> Plan:
        """The plan for a model of `num_layers` layers. Raises ConfigError if an exit lies outside of it."""
        for name, layer in (("draft.layer", self.draft.layer), ("check.layer", self.check.layer if self.check else None)):
            if layer is not None and layer >= num_layers:
                raise ConfigError(f"speculative.{name}={layer} is not an early exit of a model of {num_layers} layers; choose 1 to {num_layers - 1}")
        return Plan(
            draft_layer=self.draft.layer,
            check_layer=self.check.layer if self.check else None,
            num_draft_tokens=self.num_draft_tokens,
            num_checks=self.num_checks if self.check else 1,
        )


class EngineConfig(Settings):
    """How the engine runs. Sizes are in tokens unless named otherwise.

    dtype                   "auto" = float32 on a CPU, the checkpoint's own on a GPU
    device                  "auto" = a GPU if there is one
    max_num_seqs            rows of a round at most: requests that run together
    max_model_len           prompt + output of one request at most; None = the model's own limit
    block_size              positions per KV block
    num_kv_blocks           None = enough for max_num_seqs requests of max_model_len, within half of the free memory
    max_prefill_tokens      prompt positions computed per step at most (chunked prefill)
    enable_prefix_caching   reuse KV blocks of equal prefixes
    attention               "auto", or a backend by name
    seed                    base of the seeds of requests that bring none
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 32
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    num_kv_blocks: Annotated[int, Field(ge=1)] | None = None
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 512
    enable_prefix_caching: bool = True
    attention: Literal["auto", "sdpa", "numba"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
