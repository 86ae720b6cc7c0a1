"""What a plan needs besides the model: its exits and drafter, a judge, and buffers. Checked, then made all at
once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV
from ee_models.exits import Exit

from ..config import PLAIN, DraftConfig, Plan, SpeculativeConfig
from ..control.candidates import candidates, route_of
from ..control.choice import Route
from ..decoding.acceptance import JUDGES, Judge, RejectionJudge
from ..decoding.drafter import Drafter
from ..decoding.stages import DecoderLike, PassCounts, Stages, Tier
from ..drafters.make import DrafterFactory
from ..errors import ConfigError
from ..scheduling.request import Owner


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine that a plan's buffers depend on: rows of a round, tokens of a sequence, KV blocks
    and their positions."""

    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, eq=False, repr=False)
class PlanRuntime:
    """A plan, ready to run; and, where a controller decides, all that it may choose from instead. `drafter`
    is None for plain decoding; `draft_kv` is a draft model's. All of `routes` share buffers, exits and
    models.

    plan          the most that a round of it does: those of fewer drafts or checks run on the same buffers
    owners        exits (by layer) and models whose own KV its rounds write; that of others falls behind
                  meanwhile
    watched       exits that it does not use, and that its rounds could read
    stops_early   whether the host decides in the middle of a round how far drafting goes
    captures      whether its rounds may be captured as graphs
    route         the plan without its sizes, where it is one of several
    routes        the other ways, in the controller's order; then this one is plain decoding
    shared        drafters that several of them consist of
    """

    plan: Plan
    exits: tuple[Exit, ...]
    draft_model: DecoderLike | None
    stages: Stages
    judge: Judge
    drafter: Drafter | None
    kv: PagedKV
    draft_kv: PagedKV | None
    hidden: HiddenBuffer
    owners: frozenset[Owner]
    watched: tuple[int, ...] = ()
    stops_early: bool = False
    captures: bool = True
    route: Route | None = None
    routes: tuple[PlanRuntime, ...] = ()
    shared: tuple[Drafter, ...] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan})"

    def of(self, route: int | None) -> PlanRuntime:
        """What runs a controller's choice."""
        return self.routes[route] if self.routes and route is not None else self

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Who is to be told of prompts, and of requests that end; each once."""
        return self.shared or (() if self.drafter is None else (self.drafter,))

    @property
    def all_owners(self) -> frozenset[Owner]:
        return self.owners.union(*(route.owners for route in self.routes))

    @property
    def kv_owners(self) -> tuple[object, ...]:
        """Whose KV the blocks hold besides the model's own: what is cached is of no use to others."""
        return *self.exits, self.draft_model

    @property
    def kvs(self) -> tuple[PagedKV, ...]:
        """All tensors that a request's blocks lie in."""
        return (self.kv,) if self.draft_kv is None else (self.kv, self.draft_kv)

    def release(self) -> None:
        """Gives the KV memory back."""
        for kv in self.kvs:
            kv.release()

    def memory(self) -> dict[str, int]:
        """Bytes allocated, once, by what they are for."""
        judge = next(
            (each.judge for each in (self, *self.routes) if isinstance(each.judge, RejectionJudge)), None
        )
        return {
            "kv_bytes": self.kv.num_bytes,
            "hidden_bytes": self.hidden.num_bytes,
            "exit_bytes": sum(exit_.num_bytes for exit_ in self.exits),
            "drafter_bytes": sum(drafter.num_bytes for drafter in self.drafters),
            "probability_bytes": judge.num_bytes if judge is not None else 0,
        }


def total_memory(runtimes: Iterable[PlanRuntime]) -> dict[str, int]:
    """PlanRuntime.memory() of several that share KV."""
    each, total = list(runtimes), Counter[str]()
    for speculation in each:
        total.update(speculation.memory())
    total["kv_bytes"] = max(speculation.kv.num_bytes for speculation in each)
    return dict(total)


def make_plan_runtime(
    decoder: DecoderLike,
    limits: Limits,
    speculative: SpeculativeConfig | None,
    plan: Plan | None,
    exits: Sequence[Exit],
    draft_model: DecoderLike | None,
    counts: PassCounts,
    draft_counts: PassCounts,
    kv: PagedKV | None,
    draft_kv: PagedKV | None,
    along: Callable[[int], bool] | None = None,
) -> PlanRuntime:
    """Raises ConfigError for what does not fit together, before anything is allocated.

    counts, draft_counts   where passes of the model, and of a draft model, are counted
    kv, draft_kv           what there is already: it is taken over where it serves
    along                  whether every round writes the KV of the exit at a layer; None = of all. Others
                           fall behind while they are not used
    """
    model = decoder.config
    if speculative is not None and speculative.control == "goodput":
        if plan is not None:
            raise ConfigError(
                "`plan` is given, but speculative.control='goodput' chooses the plan; leave it out, or use"
                " control='fixed'"
            )
        ways = candidates(speculative, [exit_.layer for exit_ in exits])
    else:
        ways = [] if speculative is None else [speculative]
    plans = [way.plan(model.num_layers) for way in ways] if plan is None else [plan]
    if len(ways) <= 1:
        _check(plans[0] if plans else PLAIN, speculative, exits, decoder, draft_model, limits)
    else:
        for each_plan, way in zip(plans, ways, strict=True):
            read = [exit_ for exit_ in exits if exit_.layer in way.trained_layers().values()]
            _check(each_plan, way, read, decoder, draft_model if way.draft.traits.has_model else None, limits)
    num_kv_layers = model.num_layers + sum(exit_.num_kv_layers for exit_ in exits)
    kv = kv if kv is not None and kv.num_layers >= num_kv_layers else _make_kv(decoder, num_kv_layers, limits)
    if draft_model is not None:
        draft_kv = draft_kv or _make_kv(draft_model, draft_model.config.num_layers, limits)
    window = max(plan.window for plan in plans or [PLAIN])
    hidden = HiddenBuffer(
        len(Tier), limits.max_num_seqs, window, model.hidden_size, decoder.dtype, decoder.device
    )
    read_layers = {layer for each in plans or () for layer in (each.draft_layer, each.check_layer) if layer}
    parts = _Parts(
        decoder,
        limits,
        tuple(exits),
        draft_model,
        counts,
        draft_counts,
        kv,
        draft_kv,
        hidden,
        window,
        read_layers,
        along,
    )
    if speculative is None or speculative.control == "fixed":
        return parts.make((plans or [PLAIN])[0], speculative)
    routes = tuple(parts.make(each_plan, way) for each_plan, way in zip(plans, ways, strict=True))
    return replace(
        parts.make(PLAIN, None), captures=speculative.graphs, routes=routes, shared=parts.drafters.shared
    )


class _Parts:
    """What several ways to speculate share, and makes each of them."""

    def __init__(
        self,
        decoder: DecoderLike,
        limits: Limits,
        exits: tuple[Exit, ...],
        draft_model: DecoderLike | None,
        counts: PassCounts,
        draft_counts: PassCounts,
        kv: PagedKV,
        draft_kv: PagedKV | None,
        hidden: HiddenBuffer,
        window: int,
        read_layers: Collection[int],
        along: Callable[[int], bool] | None,
    ) -> None:
        """read_layers: of all exits that any of them reads; along: as for make_plan_runtime."""
        self._decoder, self._limits, self._exits, self._draft_model = decoder, limits, exits, draft_model
        self._counts, self._kv, self._draft_kv, self._hidden, self._window = (
            counts,
            kv,
            draft_kv,
            hidden,
            window,
        )
        self._along = frozenset(exit_.layer for exit_ in exits if along is None or along(exit_.layer))
        # One whose KV falls behind has nothing to say meanwhile.
        self._readable = frozenset(read_layers) - {exit_.layer for exit_ in exits} | self._along
        self._rejection: RejectionJudge | None = None
        self.drafters = DrafterFactory(
            limits.max_num_seqs, limits.max_model_len, draft_model, draft_kv, draft_counts
        )

    def make(self, plan: Plan, speculative: SpeculativeConfig | None) -> PlanRuntime:
        read = {plan.draft_layer, plan.check_layer}
        own = {exit_.layer for exit_ in self._exits} & read
        written = self._along | own
        stages = Stages(
            self._decoder,
            self._decoder.config.num_layers,
            self._kv,
            self._hidden,
            self._counts,
            self._exits,
            written,
        )
        judge = self._judge(plan, speculative)
        drafter = None
        if not plan.is_plain:
            draft = speculative.draft if speculative else DraftConfig(layer=max(1, plan.draft_layer))
            confidence = speculative.draft_confidence if speculative else None
            drafter = self.drafters.make(draft, plan.draft_layer, confidence, stages, judge)
        has_model = speculative is not None and not plan.is_plain and speculative.draft.traits.has_model
        return PlanRuntime(
            plan,
            self._exits,
            self._draft_model,
            stages,
            judge,
            drafter,
            self._kv,
            self._draft_kv,
            self._hidden,
            owners=frozenset((*written, *(("model",) if has_model else ()))),
            watched=() if self._rejection is not None else tuple(sorted(self._readable - read)),
            stops_early=speculative is not None and speculative.draft_confidence is not None,
            captures=speculative is None or speculative.graphs,
            route=None if speculative is None else route_of(speculative),
        )

    def _judge(self, plan: Plan, speculative: SpeculativeConfig | None) -> Judge:
        acceptance = speculative.acceptance if speculative else "coupled"
        if acceptance != "rejection":
            return JUDGES[acceptance](speculative.check if speculative else None)
        if self._rejection is None:
            limits, model = self._limits, self._decoder.config
            self._rejection = RejectionJudge(
                limits.max_num_seqs,
                self._window,
                model.vocab_size,
                self._decoder.device,
                plan.check_layer is not None,
            )
        return self._rejection.of_plan(plan.check_layer is not None)


def _make_kv(decoder: DecoderLike, num_layers: int, limits: Limits) -> PagedKV:
    model = decoder.config
    return PagedKV(
        num_layers,
        limits.num_blocks,
        limits.block_size,
        model.num_kv_heads,
        model.head_dim,
        decoder.dtype,
        decoder.device,
    )


def _check(
    plan: Plan,
    speculative: SpeculativeConfig | None,
    exits: Sequence[Exit],
    decoder: DecoderLike,
    draft_model: DecoderLike | None,
    limits: Limits,
) -> None:
    num_layers = decoder.config.num_layers
    if plan.top_layer > num_layers:
        raise ConfigError(f"{plan} has an exit at layer {plan.top_layer} of a model of {num_layers}")
    read = set() if plan.is_plain else {plan.draft_layer, plan.check_layer} - {num_layers}
    if stray := [exit_.layer for exit_ in exits if exit_.layer not in read]:
        raise ConfigError(
            f"{plan} does not read trained exits at layers {stray}; pass only those that it reads, below"
            f" layer {num_layers}"
        )
    trained = {exit_.layer for exit_ in exits}
    for name, layer in speculative.trained_layers().items() if speculative else ():
        if layer not in trained:
            raise ConfigError(
                f"speculative.{name} is an adapter, but none for layer {layer} was given; pass it in `exits`,"
                " or use LLM, which loads it"
            )
    if plan.window > limits.max_model_len:
        raise ConfigError(
            f"a round of {plan} takes {plan.window} places, more than max_model_len={limits.max_model_len};"
            " lower num_draft_tokens, num_checks or num_branches"
        )
    if speculative is not None and not plan.is_plain:
        _check_shape(plan, speculative)
    wants_model = speculative is not None and speculative.draft.traits.has_model
    if wants_model != (draft_model is not None):
        raise ConfigError(
            "draft.kind='model' needs `draft_model`"
            if wants_model
            else "`draft_model` is given, but draft.kind is not 'model'"
        )
    if draft_model is not None:
        check_draft_model(decoder, draft_model, limits.max_model_len)


def _check_shape(plan: Plan, speculative: SpeculativeConfig) -> None:
    """A plan of the caller's must be one that the drafter can draft for; those that SpeculativeConfig gives
    are."""
    draft = speculative.draft
    if plan.draft_layer and not draft.traits.in_trunk:
        raise ConfigError(
            f"{plan} resumes at layer {plan.draft_layer}, but draft.kind={draft.kind!r} leaves nothing there;"
            " its draft_layer must be 0"
        )
    if plan.num_branches > 1 and (
        not draft.traits.may_branch
        or speculative.acceptance == "rejection"
        or speculative.draft_confidence is not None
    ):
        raise ConfigError(
            f"{plan} has branches, which need draft.kind exit, adapter or model, acceptance='coupled' and no"
            " draft_confidence"
        )


def check_draft_model(target: DecoderLike, draft_model: DecoderLike, max_model_len: int) -> None:
    """Raises ConfigError if the model cannot draft for the target, or cannot be of use."""
    if draft_model.max_positions < max_model_len:
        raise ConfigError(
            f"speculative.draft.path: the draft model attends to {draft_model.max_positions} positions, but"
            f" engine.max_model_len is {max_model_len}; lower it to {draft_model.max_positions}"
        )
    if draft_model.device != target.device:
        raise ConfigError(
            f"speculative.draft.path: the draft model is on {draft_model.device}, the target on"
            f" {target.device}"
        )
    sizes = [_num_parameters(decoder) for decoder in (draft_model, target)]
    if sizes[0] > sizes[1]:
        raise ConfigError(
            f"speculative.draft.path: the draft model is larger than the target ({sizes[0] / 1e6:.0f} M and"
            f" {sizes[1] / 1e6:.0f} M parameters); choose a smaller one"
        )


def _num_parameters(decoder: DecoderLike) -> int:
    """Weights that a pass reads, by the sizes of the model; norms and biases are left out."""
    config = decoder.config
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    return (
        config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
        + config.vocab_size * config.hidden_size
    )
