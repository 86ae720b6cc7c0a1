"""Frozen, validated settings: how the engine runs, and how it speculates."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .errors import ConfigError
from .tree import DraftTree

_MOST_DRAFTS = 64  # of a tree, per cycle


class Settings(BaseModel):
    """Base of every settings class: frozen, no unknown keys, no silent conversions between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Plan:
    """What one round does (design: D, C, K, R). `PLAIN` is plain decoding: the same round with two tiers left out.

    draft_layer        D: the draft tier runs layers [0, D); 0 = the drafter is outside of the trunk, and the next tier begins at the embedding
    check_layer        C: the check tier runs layers [D, C); None = no check tier
    num_draft_tokens   K: tokens drafted per draft cycle, one after the other
    num_checks         R: draft cycles, each ended by a check, before one verify (1 without a check tier)
    num_branches       B: chains of K drafts per cycle, that begin with the drafter's B likeliest tokens; 1 = one chain
    """

    draft_layer: int = 0
    check_layer: int | None = None
    num_draft_tokens: int = 0
    num_checks: int = 1
    num_branches: int = 1

    def __post_init__(self) -> None:
        if self.check_layer is not None and self.num_draft_tokens < 1:
            raise ConfigError("a check tier needs num_draft_tokens >= 1; leave `check` out for plain decoding")
        if self.num_draft_tokens == 0 and self.draft_layer != 0:
            raise ConfigError(f"draft_layer={self.draft_layer} needs num_draft_tokens >= 1; plain decoding has draft_layer=0")
        if self.check_layer is not None and self.check_layer < self.draft_layer:
            raise ConfigError(f"check_layer={self.check_layer} lies below draft_layer={self.draft_layer}")
        if self.check_layer is None and self.num_checks != 1:
            raise ConfigError(f"num_checks={self.num_checks} needs a check tier; without one it must be 1")
        if self.num_branches != 1 and self.num_draft_tokens < 1:
            raise ConfigError(f"num_branches={self.num_branches} needs num_draft_tokens >= 1; plain decoding has one branch")

    @cached_property
    def tree(self) -> DraftTree:
        """What a draft cycle looks like: B chains of K drafts after its first token."""
        return DraftTree.branches(self.num_draft_tokens, self.num_branches)

    @property
    def window(self) -> int:
        """Places that one round can process: R * (B * K + 1)."""
        return self.num_checks * self.tree.num_nodes

    @property
    def top_layer(self) -> int:
        """The layer at which verify resumes."""
        return self.draft_layer if self.check_layer is None else self.check_layer

    @property
    def is_plain(self) -> bool:
        return self.num_draft_tokens == 0


PLAIN = Plan()


class NgramConfig(Settings):
    """Prompt lookup: what followed the last tokens when they last stood in this request's prompt or output is proposed again.

    max_size, min_size   tokens that must be the same, the longest match first
    tokens_per_match     propose at most so many tokens for each token that matched (counted to 16 back), since a longer match is a
                         surer one; None = always num_draft_tokens
    datastore_tokens     tokens of earlier requests' outputs that are searched too, at most; 0 = none
    """

    max_size: Annotated[int, Field(ge=1, le=16)] = 4
    min_size: Annotated[int, Field(ge=1, le=16)] = 1
    tokens_per_match: Annotated[int, Field(ge=1, le=32)] | None = 2
    datastore_tokens: Annotated[int, Field(ge=0, le=1 << 22)] = 0

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.min_size > self.max_size:
            raise ValueError(f"min_size={self.min_size} is above max_size={self.max_size}; choose min_size <= max_size")
        if 0 < self.datastore_tokens < 1024:
            raise ValueError(f"datastore_tokens={self.datastore_tokens} holds hardly one output; choose 0 (none) or at least 1024")
        return self


DraftKind = Literal["exit", "adapter", "ngram", "hybrid", "model"]
# What each kind of drafter takes, and what it needs.
_TAKES: dict[str, frozenset[str]] = {
    "exit": frozenset({"layer"}),
    "adapter": frozenset({"layer", "path"}),
    "ngram": frozenset({"ngram"}),
    "hybrid": frozenset({"layer", "path", "ngram", "exit", "num_exit_tokens"}),
    "model": frozenset({"path"}),
}
_NEEDS: dict[str, frozenset[str]] = {
    "exit": frozenset({"layer"}),
    "adapter": frozenset({"layer"}),
    "ngram": frozenset(),
    "hybrid": frozenset({"layer"}),
    "model": frozenset({"path"}),
}


class DraftConfig(Settings):
    """Tier one: what proposes tokens.

    kind              "exit": an early exit of the model, through its own norm and head; "adapter": a trained early exit;
                      "ngram": prompt lookup; "hybrid": prompt lookup where it matches, an early exit where it does not;
                      "model": a separate small model with the same tokenizer
    layer             D, of exit, adapter and hybrid: the draft tier runs layers [0, D)
    path              of adapter and hybrid: folder of trained exits, None = the ones that come with HiSpec for this model;
                      of model: the small model, as LLM takes one
    ngram             of ngram and hybrid: what counts as a match
    exit              of hybrid: "adapter" or "exit", as above
    num_exit_tokens   of hybrid: tokens that the exit drafts where nothing matches, None = as many as prompt lookup would
    """

    kind: DraftKind = "exit"
    layer: Annotated[int, Field(ge=1)] | None = None
    path: Annotated[str, Field(min_length=1)] | None = None
    ngram: NgramConfig | None = None
    exit: Literal["adapter", "exit"] | None = None
    num_exit_tokens: Annotated[int, Field(ge=1, le=32)] | None = None

    @model_validator(mode="after")
    def _fields_of_kind(self) -> DraftConfig:
        for name in sorted(set(type(self).model_fields) - {"kind"}):
            given = getattr(self, name) is not None
            if given and name not in _TAKES[self.kind]:
                takers = ", ".join(kind for kind, names in _TAKES.items() if name in names)
                raise ValueError(f"{name}={getattr(self, name)!r} means nothing for kind={self.kind!r}; leave it out, or choose a kind that takes it: {takers}")
            if not given and name in _NEEDS[self.kind]:
                what = "the layer after which it drafts" if name == "layer" else "the model that drafts"
                raise ValueError(f"kind={self.kind!r} needs {name}: {what}")
        if self.kind == "hybrid" and self.exit == "exit" and self.path is not None:
            raise ValueError(f"path={self.path!r} names trained exits, but exit='exit' reads the model's own head; set exit: adapter, or leave path out")
        return self

    @property
    def is_trained(self) -> bool:
        """Whether it drafts through a trained exit."""
        return self.kind == "adapter" or (self.kind == "hybrid" and self.exit != "exit")


class CheckConfig(Settings):
    """The check tier: a later exit that filters drafts before the full model sees them.

    kind         "exit": the model's own norm and head; "adapter": a trained exit
    layer        C: the check tier runs layers [D, C)
    path         folder of trained exits; None: the ones that come with HiSpec for this model
    confidence   overrule a draft only where the exit gives its own token at least this probability; None = always [HiSpec]. Verify
                 has the last word in any case
    """

    kind: Literal["exit", "adapter"] = "exit"
    layer: Annotated[int, Field(ge=2)]
    path: Annotated[str, Field(min_length=1)] | None = None
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None

    @model_validator(mode="after")
    def _path_of_adapter(self) -> CheckConfig:
        if self.path is not None and self.kind == "exit":
            raise ValueError(f"path={self.path!r} names trained exits, but kind='exit' reads the model's own head; set kind: adapter, or leave path out")
        return self

    @property
    def is_trained(self) -> bool:
        return self.kind == "adapter"


class SpeculativeConfig(Settings):
    """How to speculate. The default of R = 2 checks of K = 2 drafts is the paper's N_d = 2, N_i = 4 [HiSpec §4].

    draft              who drafts tokens: {"kind": "exit", "adapter", "ngram", "hybrid" or "model", "layer": D, "path": None, ...}
    check              where drafts are checked: {"kind": "exit" or "adapter", "layer": C, "path": None}, or None for two tiers
    num_draft_tokens   K, tokens per draft cycle
    num_checks         R, checks per verify; ignored (1) without a check tier
    num_branches       B, chains of K tokens per draft cycle, which begin with the drafter's B likeliest; 1 = one chain
    draft_confidence   a row drafts no further where the drafter gives no token at least this probability [Kangaroo]; None = always K
    acceptance         "coupled": the output is plain decoding's, token for token, at every temperature;
                       "rejection": standard speculative sampling, equal in law
    control            "fixed": always this plan
    graphs             on a GPU, whether rounds are captured as CUDA graphs; False runs the same operations one by one
    """

    draft: DraftConfig
    check: CheckConfig | None = None
    num_draft_tokens: Annotated[int, Field(ge=1, le=32)] = 2
    num_checks: Annotated[int, Field(ge=1, le=16)] = 2
    num_branches: Annotated[int, Field(ge=1, le=16)] = 1
    draft_confidence: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    acceptance: Literal["coupled", "rejection"] = "coupled"
    control: Literal["fixed"] = "fixed"
    graphs: bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> SpeculativeConfig:
        draft, check = self.draft, self.check
        if check is not None and draft.layer is not None and check.layer <= draft.layer:
            raise ValueError(f"check.layer={check.layer} must lie above draft.layer={draft.layer}: the check tier resumes where the draft tier stops")
        if draft.num_exit_tokens is not None and draft.num_exit_tokens > self.num_draft_tokens:
            raise ValueError(
                f"draft.num_exit_tokens={draft.num_exit_tokens} is more than num_draft_tokens={self.num_draft_tokens}, the drafts of a cycle; lower it"
            )
        if self.draft_confidence is not None and draft.kind == "ngram":
            raise ValueError(f"draft_confidence={self.draft_confidence} means nothing for draft.kind='ngram', which has no probabilities; leave it out")
        if self.num_branches > 1:
            self._check_branches()
        if self.acceptance == "rejection" and check is not None and check.confidence is not None:
            raise ValueError(
                f"check.confidence={check.confidence} keeps drafts that the check tier would overrule, which acceptance='rejection' does not allow;"
                " use 'coupled', or leave it out"
            )
        return self

    def _check_branches(self) -> None:
        what = f"num_branches={self.num_branches}"
        if self.draft.kind in ("ngram", "hybrid"):
            raise ValueError(f"{what} needs a drafter with probabilities, not draft.kind={self.draft.kind!r}; use exit, adapter or model, or num_branches=1")
        if self.acceptance == "rejection":
            raise ValueError(f"{what} takes tokens by rank, which acceptance='rejection' does not allow; use 'coupled', or num_branches=1")
        if self.draft_confidence is not None:
            raise ValueError(f"{what} and draft_confidence={self.draft_confidence} cannot be combined: a tree's shape is fixed; leave one of them out")
        if self.num_branches * self.num_draft_tokens > _MOST_DRAFTS:
            raise ValueError(f"{what} times num_draft_tokens={self.num_draft_tokens} is more than {_MOST_DRAFTS} drafts per cycle; lower one of them")

    def trained_layers(self) -> dict[str, int]:
        """The layers whose exits are trained, by the name of the tier."""
        layers = {}
        if self.draft.is_trained and self.draft.layer is not None:
            layers["draft"] = self.draft.layer
        if self.check is not None and self.check.is_trained:
            layers["check"] = self.check.layer
        return layers

    def plan(self, num_layers: int) -> Plan:
        """The plan for a model of `num_layers` layers. Raises ConfigError if an exit lies outside of it."""
        for name, layer in (("draft.layer", self.draft.layer), ("check.layer", self.check.layer if self.check else None)):
            if layer is not None and layer >= num_layers:
                raise ConfigError(f"speculative.{name}={layer} is not an early exit of a model of {num_layers} layers; choose 1 to {num_layers - 1}")
        return Plan(
            draft_layer=self.draft.layer or 0,
            check_layer=self.check.layer if self.check else None,
            num_draft_tokens=self.num_draft_tokens,
            num_checks=self.num_checks if self.check else 1,
            num_branches=self.num_branches,
        )


class EngineConfig(Settings):
    """How the engine runs. Sizes are in tokens unless named otherwise.

    dtype                   "auto" = float32 on a CPU, the checkpoint's own on a GPU
    device                  "auto" = a GPU if there is one
    quantization            "int8" or "int4" weights, exits and draft models included: another, smaller model [torchao]; None = as stored
    max_num_seqs            rows of a round at most: requests that run together
    max_model_len           prompt + output of one request at most; None = the model's own limit
    block_size              positions per KV block
    num_kv_blocks           None = enough for max_num_seqs requests of max_model_len, within half of the free memory; on a GPU within what a
                            trial run of the largest passes leaves free
    gpu_memory_utilization  share of a GPU's free memory that may be used, weights not counted
    max_prefill_tokens      prompt positions computed per step at most (chunked prefill)
    enable_prefix_caching   reuse KV blocks of equal prefixes
    attention               "auto", or a backend by name
    seed                    base of the seeds of requests that bring none
    graphs                  on a GPU, whether rounds are captured as CUDA graphs at all, those of plain decoding included
    exact_verify            on a GPU, kernels that compute a token alike whatever else is in the pass, so that speculative and plain output agree
                            bit for bit; slower. On a CPU in float32 it is so anyway
    max_graphs              graphs kept, one per plan, number of rows, length of context and way of sampling; the least recently used makes room
    max_graph_bytes         GPU memory kept free for them
    warm_up                 capture all graphs when the engine starts, the largest first, instead of each when it is first needed
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    quantization: Literal["int8", "int4"] | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 32
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    num_kv_blocks: Annotated[int, Field(ge=1)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 512
    enable_prefix_caching: bool = True
    attention: Literal["auto", "sdpa", "numba", "triton"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    graphs: bool = True
    max_graphs: Annotated[int, Field(ge=1)] = 64
    max_graph_bytes: Annotated[int, Field(ge=0)] = 2 << 30
    warm_up: bool = False
    exact_verify: bool = False
