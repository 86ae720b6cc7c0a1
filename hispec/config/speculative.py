"""Settings of speculation: the drafter, the check tier, their sizes, and the controller."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..errors import ConfigError, shown
from .base import Settings, Tuple, one_of
from .draft_kinds import TRAITS, DraftKind, DraftKindTraits
from .plan import Plan

# Ways to accept; those that come with HiSpec, then registered ones
# (hispec.decoding.acceptance.register_judge).
ACCEPTANCES: list[str] = ["coupled", "rejection"]
OWN_ACCEPTANCES = tuple(ACCEPTANCES)  # before any is registered
_MOST_DRAFTS = 64  # of a tree, per cycle


class NgramConfig(Settings):
    """Prompt lookup: the last tokens are searched for in the request's prompt and output, and the tokens that
    followed their latest occurrence are proposed.

    max_size, min_size   tokens that must be the same, the longest match first
    match_confidence     propose what followed as long as all that is proposed is right with at least this
                         probability, as far as can be told by the number of tokens that matched: longer
                         matches are right more often; None = always num_draft_tokens
    datastore_tokens     tokens of earlier requests' outputs that are searched too, at most; 0 = none
    guess_confidence     where nothing matches, or a match is much less sure, propose what most often followed
                         the last tokens in answers that were counted, as long as all that is proposed is
                         right with at least this probability; None = no guesses
    guess_path           folder of these n-grams; None = those that come with the model or with HiSpec for it
    learn_tokens         guesses are learnt, too, from outputs that have ended, the latest so many tokens of
                         them, and need nothing that was counted beforehand; 0 = nothing is learnt
    """

    max_size: Annotated[int, Field(ge=1, le=16)] = 4
    min_size: Annotated[int, Field(ge=1, le=16)] = 1
    match_confidence: Annotated[float, Field(gt=0.0, lt=1.0)] | None = 0.2
    datastore_tokens: Annotated[int, Field(ge=0, le=1 << 22)] = 0
    guess_confidence: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    guess_path: Annotated[str, Field(min_length=1)] | None = None
    learn_tokens: Annotated[int, Field(ge=0, le=1 << 22)] = 0

    @property
    def guesses(self) -> bool:
        return self.guess_confidence is not None

    @property
    def needs_table(self) -> bool:
        """Whether there must be n-grams that were counted beforehand, not only may be."""
        return self.guesses and (self.guess_path is not None or self.learn_tokens == 0)

    @property
    def keeps_outputs(self) -> bool:
        """Whether what it proposes depends on requests that have ended."""
        return self.datastore_tokens > 0 or self.learn_tokens > 0

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        for name, value in (("guess_path", self.guess_path), ("learn_tokens", self.learn_tokens or None)):
            if value is not None and not self.guesses:
                raise ValueError(
                    f"{name}={shown(value)} has no effect without guess_confidence; give that (0.2 is a good"
                    f" start), or leave {name} out"
                )
        if self.min_size > self.max_size:
            raise ValueError(
                f"min_size={self.min_size} is above max_size={self.max_size}; choose min_size <= max_size"
            )
        if 0 < self.datastore_tokens < 1024:
            raise ValueError(
                f"datastore_tokens={self.datastore_tokens} holds hardly one output; choose 0 (none) or at"
                " least 1024"
            )
        if 0 < self.learn_tokens < 8192:
            raise ValueError(
                f"learn_tokens={self.learn_tokens} are too few to learn from; choose 0 (learn nothing) or at"
                " least 8192 (1000000 is a good start)"
            )
        return self


class DraftConfig(Settings):
    """The draft tier: how tokens are proposed.

    kind              "exit": an early exit of the model, through its own norm and head; "adapter": a trained
                      early exit; "ngram": prompt lookup; "hybrid": prompt lookup where it matches, an early
                      exit where it does not; "model": a separate small model with the same tokenizer
    layer             D, of exit, adapter and hybrid: the draft tier runs layers [0, D)
    path              of adapter and hybrid: folder of trained exits, None = the ones that come with HiSpec
                      for this model; of model: the small model, as LLM takes one
    ngram             of ngram and hybrid: what counts as a match
    exit              of hybrid: "adapter" or "exit", as above
    num_exit_tokens   of hybrid: tokens that the exit drafts where nothing matches, None = as many as prompt
                      lookup would
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
            if given and name not in self.traits.fields:
                takers = ", ".join(kind for kind, traits in TRAITS.items() if name in traits.fields)
                raise ValueError(
                    f"{name}={shown(getattr(self, name))} means nothing for kind={self.kind!r}; leave it"
                    f" out, or choose a kind that takes it: {takers}"
                )
            if not given and name in self.traits.required:
                what = "the layer after which it drafts" if name == "layer" else "the model that drafts"
                raise ValueError(f"kind={self.kind!r} needs {name}: {what}")
        if self.exit == "exit" and self.path is not None:
            raise ValueError(
                f"path={shown(self.path)} names trained exits, but exit='exit' reads the model's own head;"
                " set exit: adapter, or leave path out"
            )
        return self

    @property
    def traits(self) -> DraftKindTraits:
        return TRAITS[self.kind]

    @property
    def is_trained(self) -> bool:
        """Whether it drafts through a trained exit."""
        return self.traits.is_trained and self.exit != "exit"

    @property
    def lookup(self) -> NgramConfig | None:
        """What counts as a match, for a drafter that looks up; None for others."""
        return (self.ngram or NgramConfig()) if self.traits.looks_up else None


class CheckConfig(Settings):
    """The check tier: a later exit that filters drafts before the full model sees them.

    kind         "exit": the model's own norm and head; "adapter": a trained exit
    layer        C: the check tier runs layers [D, C)
    path         folder of trained exits; None: the ones that come with HiSpec for this model
    confidence   overrule a draft only where the exit gives its own token at least this probability; None =
                 always [HiSpec]. Verify has the last word in any case
    continue_confidence   a row goes on to another cycle only while the exit, at the place of its own token,
                 gives some token at least this probability; else the row waits for verify. None = always R
    """

    kind: Literal["exit", "adapter"] = "exit"
    layer: Annotated[int, Field(ge=2)]
    path: Annotated[str, Field(min_length=1)] | None = None
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    continue_confidence: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None

    @model_validator(mode="after")
    def _path_of_adapter(self) -> CheckConfig:
        if self.path is not None and self.kind == "exit":
            raise ValueError(
                f"path={shown(self.path)} names trained exits, but kind='exit' reads the model's own head;"
                " set kind: adapter, or leave path out"
            )
        return self

    @property
    def is_trained(self) -> bool:
        return self.kind == "adapter"


class GoodputConfig(Settings):
    """How `control: goodput` decides. A plan's goodput is the tokens that it is expected to commit per second
    [SmartSpec].

    latency            file of a latency profile of this model on this machine (`hispec profile --latency`);
                       None = the cached profile, which is measured first if there is none
    interval           rounds between two decisions
    margin             another plan is chosen only if its expected goodput is so many times that of the
                       present plan
    probe_share        share of rounds, at most, that try plans that were not tried lately
    shadow_share       share of rounds that also record what exits not in use predict [DEL]
    window             rounds after which an observation counts half
    prior_acceptance   acceptance that is assumed of every drafter before its first draft was judged
    prior_weight       number of drafts that this assumption counts as; for a single request, the number that
                       the acceptance of all requests counts as
    per_request        whether K and R of a request follow its own acceptance
    drafters           kinds of drafters to choose from; None = all that the settings allow: prompt lookup,
                       exits and hybrids if there are exits, the draft model that `draft` names
    layers             exits to choose D and C from; None = all trained ones, where `draft` or `check` names
                       one, else those that they name
    """

    latency: Annotated[str, Field(min_length=1)] | None = None
    interval: Annotated[int, Field(ge=1, le=4096)] = 16
    margin: Annotated[float, Field(ge=1.0, le=10.0)] = 1.03
    probe_share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.02
    shadow_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.02
    window: Annotated[float, Field(gt=0.0)] = 512.0
    prior_acceptance: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    prior_weight: Annotated[float, Field(gt=0.0)] = 16.0
    per_request: bool = True
    drafters: Tuple[DraftKind] | None = None
    layers: Tuple[Annotated[int, Field(ge=1)]] | None = None


class SpeculativeConfig(Settings):
    """How to speculate. The default of R = 2 checks of K = 2 drafts is the paper's N_d = 2, N_i = 4 [HiSpec
    §4].

    draft              who drafts tokens: {"kind": "exit", "adapter", "ngram", "hybrid" or "model", "layer":
                       D, "path": None, ...}
    check              where drafts are checked: {"kind": "exit" or "adapter", "layer": C, "path": None}, or
                       None for two tiers
    num_draft_tokens   K, tokens per draft cycle
    num_checks         R, checks per verify; ignored (1) without a check tier
    num_branches       B, chains of K tokens per draft cycle, which begin with the drafter's B likeliest; 1 =
                       one chain
    draft_confidence   a row drafts no further where the drafter gives no token at least this probability
                       [Kangaroo]; None = always K
    acceptance         "coupled": the output is plain decoding's, token for token, at every temperature;
                       "rejection": standard speculative sampling, equal in distribution
    control            "fixed": always this plan; "goodput": the plan that promises the most tokens per
                       second, plain decoding among them, with num_draft_tokens and num_checks as the most it
                       may choose; `goodput` says how
    graphs             on a GPU, whether rounds are captured as CUDA graphs; False runs the same operations
                       one by one
    """

    draft: DraftConfig
    check: CheckConfig | None = None
    num_draft_tokens: Annotated[int, Field(ge=1, le=32)] = 2
    num_checks: Annotated[int, Field(ge=1, le=16)] = 2
    num_branches: Annotated[int, Field(ge=1, le=16)] = 1
    draft_confidence: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    acceptance: Annotated[str, one_of(ACCEPTANCES)] = "coupled"
    control: Literal["fixed", "goodput"] = "fixed"
    goodput: GoodputConfig | None = None
    graphs: bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> SpeculativeConfig:
        draft, check = self.draft, self.check
        if check is not None and draft.layer is not None and check.layer <= draft.layer:
            raise ValueError(
                f"check.layer={check.layer} must lie above draft.layer={draft.layer}: the check tier resumes"
                " where the draft tier stops"
            )
        if draft.num_exit_tokens is not None and draft.num_exit_tokens > self.num_draft_tokens:
            raise ValueError(
                f"draft.num_exit_tokens={draft.num_exit_tokens} is more than"
                f" num_draft_tokens={self.num_draft_tokens}, the drafts of a cycle; lower it"
            )
        if self.draft_confidence is not None and not draft.traits.computes:
            raise ValueError(
                f"draft_confidence={self.draft_confidence} means nothing for draft.kind={draft.kind!r}, which"
                " has no probabilities; leave it out"
            )
        if check is not None and check.continue_confidence is not None and self.num_checks == 1:
            raise ValueError(
                f"check.continue_confidence={check.continue_confidence} decides whether another cycle"
                " follows, and num_checks=1 allows none; raise num_checks, or leave it out"
            )
        if self.num_branches > 1:
            self._check_branches()
        if self.control == "goodput" and not draft.traits.has_costs:
            raise ValueError(
                f"control='goodput' does not know what draft.kind={draft.kind!r} costs; use control='fixed'"
            )
        if self.goodput is not None and self.control != "goodput":
            raise ValueError(
                f"goodput={shown(self.goodput)} means nothing for control={self.control!r}; set control:"
                " goodput, or leave it out"
            )
        if self.acceptance == "rejection" and check is not None and check.confidence is not None:
            raise ValueError(
                f"check.confidence={check.confidence} keeps drafts that the check tier would overrule, which"
                " acceptance='rejection' does not allow; use 'coupled', or leave it out"
            )
        return self

    def _check_branches(self) -> None:
        what = f"num_branches={self.num_branches}"
        if not self.draft.traits.may_branch:
            raise ValueError(
                f"{what} needs a drafter with probabilities, not draft.kind={self.draft.kind!r}; use exit,"
                " adapter or model, or num_branches=1"
            )
        if self.acceptance == "rejection":
            raise ValueError(
                f"{what} takes tokens by rank, which acceptance='rejection' does not allow; use 'coupled', or"
                " num_branches=1"
            )
        if self.draft_confidence is not None:
            raise ValueError(
                f"{what} and draft_confidence={self.draft_confidence} cannot be combined: a tree's shape is"
                " fixed; leave one of them out"
            )
        if self.control == "goodput":
            raise ValueError(
                f"{what} has a fixed shape, and control='goodput' chooses among chains; use control='fixed',"
                " or num_branches=1"
            )
        if self.num_branches * self.num_draft_tokens > _MOST_DRAFTS:
            raise ValueError(
                f"{what} times num_draft_tokens={self.num_draft_tokens} is more than {_MOST_DRAFTS} drafts"
                " per cycle; lower one of them"
            )

    def trained_layers(self) -> dict[str, int]:
        """The layers of the trained exits, by the name of the tier that reads them."""
        layers = {}
        if self.draft.is_trained and self.draft.layer is not None:
            layers["draft"] = self.draft.layer
        if self.check is not None and self.check.is_trained:
            layers["check"] = self.check.layer
        return layers

    @property
    def guess_paths(self) -> list[str | None]:
        """The folders of n-grams that it guesses from, None = those that come with the model, which may be
        missing if it learns; empty if it does not guess."""
        lookup = self.draft.lookup
        return [lookup.guess_path] if lookup is not None and lookup.guesses else []

    def plan(self, num_layers: int) -> Plan:
        """The plan for a model of `num_layers` layers. Raises ConfigError if an exit lies outside of it."""
        of_goodput = (self.goodput and self.goodput.layers) or ()
        for name, layer in (
            ("draft.layer", self.draft.layer),
            ("check.layer", self.check.layer if self.check else None),
            *(("goodput.layers", layer) for layer in of_goodput),
        ):
            if layer is not None and layer >= num_layers:
                raise ConfigError(
                    f"speculative.{name}={layer} is not an early exit of a model of {num_layers} layers;"
                    f" choose 1 to {num_layers - 1}"
                )
        return Plan(
            draft_layer=self.draft.layer or 0,
            check_layer=self.check.layer if self.check else None,
            num_draft_tokens=self.num_draft_tokens,
            num_checks=self.num_checks if self.check else 1,
            num_branches=self.num_branches,
        )
