"""What a plan needs to run besides the models: a judge, a drafter, and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV

from ..config import PLAIN, DraftConfig, Plan, SpeculativeConfig
from ..control.candidates import candidates, route_of
from ..control.choice import Route
from ..decoding.acceptance import JUDGES, Judge, RejectionJudge
from ..decoding.drafter import Drafter
from ..decoding.stages import Stages, Tier
from ..drafters.make import DrafterFactory
from ..errors import ConfigError
from ..scheduling.request import ExtraKV
from ..utils.memory import free_memory_bytes, mb
from .plan_checks import check_plan
from .plan_spec import Counters, EngineSizes, Models, PlanSpec

_PURPOSES = "kv_bytes", "hidden_bytes", "exit_bytes", "drafter_bytes", "probability_bytes"


class _Holder(Protocol):
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, eq=False, repr=False)
class PlanRuntime:
    """A plan with all that its rounds run on; where a controller decides, plain decoding with all plans to
    choose from, which share KV, hidden-state buffer and drafters.

    plan          the most that a round does: those of fewer drafts or checks run on the same buffers
    drafter       None for plain decoding
    draft_kv      KV of the draft model
    extra_kv      the exits and the draft model whose KV its rounds write; that of others falls behind and is
                  backfilled when a round needs it (backfill.py)
    watched       exits that it does not use and whose predictions its rounds could record
    stops_early   whether rows may draft less than the plan says, where they are unsure
    continue_confidence   as CheckConfig.continue_confidence
    captures      whether its rounds may be captured as graphs
    route         the plan without its sizes, for the controller
    routes        the plans that a controller chooses from, in its order
    shared        drafters that several of `routes` use
    """

    plan: Plan
    models: Models
    stages: Stages
    judge: Judge
    drafter: Drafter | None
    kv: PagedKV
    draft_kv: PagedKV | None
    hidden: HiddenBuffer
    extra_kv: frozenset[ExtraKV]
    watched: tuple[int, ...] = ()
    stops_early: bool = False
    continue_confidence: float | None = None
    captures: bool = True
    route: Route | None = None
    routes: tuple[PlanRuntime, ...] = ()
    shared: tuple[Drafter, ...] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan})"

    def for_route(self, route: int | None) -> PlanRuntime:
        """What runs a controller's choice; itself for plain decoding, or if nothing is to choose from."""
        return self.routes[route] if self.routes and route is not None else self

    def gate(self, plan: Plan) -> float | None:
        """How sure a check must be for another cycle of `plan`, of K and R of its own; None = it always
        follows, or there is one cycle alone."""
        return self.continue_confidence if plan.num_checks > 1 else None

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Each drafter once: they are told of prompts, and of requests that end."""
        return self.shared or (() if self.drafter is None else (self.drafter,))

    @cached_property
    def all_extra_kv(self) -> frozenset[ExtraKV]:
        """extra_kv of all routes together."""
        return self.extra_kv.union(*(route.extra_kv for route in self.routes))

    @property
    def kvs(self) -> tuple[PagedKV, ...]:
        """All tensors that a request's blocks lie in."""
        return (self.kv,) if self.draft_kv is None else (self.kv, self.draft_kv)

    def release(self) -> None:
        """Gives the KV memory back."""
        for kv in self.kvs:
            kv.release()

    def held(self) -> Iterator[tuple[str, _Holder]]:
        """What holds memory, with its purpose; several runtimes may share it."""
        yield "kv_bytes", self.kv
        yield "hidden_bytes", self.hidden
        yield from (("exit_bytes", exit_) for exit_ in self.models.exits)
        yield from (("drafter_bytes", drafter) for drafter in self.drafters)
        yield from (("drafter_bytes", table) for table in self.models.tables)
        if self.draft_kv is not None:
            yield "drafter_bytes", self.draft_kv
        judges = [each.judge for each in (self, *self.routes) if isinstance(each.judge, RejectionJudge)]
        yield from (("probability_bytes", each) for each in judges[:1])  # routes' have one memory


def memory_of(runtimes: Iterable[PlanRuntime]) -> dict[str, int]:
    """Bytes allocated by purpose; what they share counts once."""
    total = dict.fromkeys(_PURPOSES, 0)
    holders = {id(holder): (purpose, holder) for each in runtimes for purpose, holder in each.held()}
    for purpose, holder in holders.values():
        total[purpose] += holder.num_bytes
    return total


def make_plan_runtime(
    spec: PlanSpec, sizes: EngineSizes, counters: Counters, kv: PagedKV | None, draft_kv: PagedKV | None
) -> PlanRuntime:
    """Raises ConfigError for what does not fit together, before anything is allocated.

    counters       where passes are counted
    kv, draft_kv   what is allocated already; it is used again if it has enough layers
    """
    speculative, ways = spec.speculative, _ways(spec)
    for plan, way in ways or [(PLAIN, speculative)]:
        models = spec.models.read_by(way) if way is not None and len(ways) > 1 else spec.models
        check_plan(plan, way, models, sizes)
    factory = _RuntimeFactory(spec, sizes, counters, [plan for plan, _ in ways], kv, draft_kv)
    if speculative is None or speculative.control == "fixed":
        return factory.make(*ways[0])
    routes = tuple(factory.make(plan, way) for plan, way in ways)
    shared = factory.drafters.shared
    return replace(factory.make(PLAIN, None), captures=speculative.graphs, routes=routes, shared=shared)


def _ways(spec: PlanSpec) -> list[tuple[Plan, SpeculativeConfig | None]]:
    """The plan of `spec` with its settings, or all those that a controller may choose from."""
    speculative, num_layers = spec.speculative, spec.models.decoder.config.num_layers
    if speculative is None:
        return [(spec.plan or PLAIN, None)]
    if speculative.control == "fixed":
        return [(spec.plan or speculative.plan(num_layers), speculative)]
    if spec.plan is not None:
        raise ConfigError(
            "`plan` is given, but speculative.control='goodput' chooses the plan; leave it out, or use"
            " control='fixed'"
        )
    ways = candidates(speculative, [exit_.layer for exit_ in spec.models.exits])
    return [(way.plan(num_layers), way) for way in ways]


class _RuntimeFactory:
    """Allocates what the plans of one PlanSpec share, and makes the PlanRuntime of each."""

    def __init__(
        self,
        spec: PlanSpec,
        sizes: EngineSizes,
        counters: Counters,
        plans: Sequence[Plan],
        kv: PagedKV | None,
        draft_kv: PagedKV | None,
    ) -> None:
        """plans: all that will be made, besides plain decoding."""
        models = self._models = spec.models
        decoder, draft_model = models.decoder, models.draft_model
        self._sizes, self._counts = sizes, counters[0]
        if kv is None or kv.num_layers < models.num_kv_layers:
            kv = sizes.make_kv(decoder, models.num_kv_layers)
        if draft_model is not None and draft_kv is None:
            draft_kv = sizes.make_kv(draft_model, draft_model.config.num_layers)
        self._kv, self._draft_kv = kv, draft_kv
        self._window = max((plan.window for plan in plans), default=PLAIN.window)
        shape = len(Tier), sizes.max_num_seqs, self._window, decoder.config.hidden_size
        self._hidden = HiddenBuffer(*shape, decoder.dtype, decoder.device)
        self.drafters = DrafterFactory(
            sizes.max_num_seqs, sizes.max_model_len, draft_model, draft_kv, counters[1], models.tables
        )
        self._rejection: RejectionJudge | None = None
        trained = {exit_.layer for exit_ in models.exits}
        read = {layer for plan in plans for layer in (plan.draft_layer, plan.check_layer) if layer}
        self._always_written = frozenset(layer for layer in trained if spec.always_writes(layer))
        # An exit whose KV falls behind cannot predict meanwhile.
        self._watchable = read - trained | self._always_written

    def make(self, plan: Plan, speculative: SpeculativeConfig | None) -> PlanRuntime:
        models, read = self._models, {plan.draft_layer, plan.check_layer}
        written = self._always_written | {exit_.layer for exit_ in models.exits} & read
        stages = Stages(
            models.decoder,
            models.decoder.config.num_layers,
            self._kv,
            self._hidden,
            self._counts,
            models.exits,
            written,
        )
        judge = self._judge(plan, speculative)
        confidence = None if speculative is None else speculative.draft_confidence
        check = None if speculative is None else speculative.check
        drafter, extra_kv = None, set[ExtraKV](written)
        if not plan.is_plain:
            draft = speculative.draft if speculative else DraftConfig(layer=max(1, plan.draft_layer))
            drafter = self.drafters.make(draft, plan.draft_layer, confidence, stages, judge)
            extra_kv |= {"model"} if draft.traits.has_model else set()
        return PlanRuntime(
            plan,
            models,
            stages,
            judge,
            drafter,
            self._kv,
            self._draft_kv,
            self._hidden,
            extra_kv=frozenset(extra_kv),
            watched=() if self._rejection is not None else tuple(sorted(self._watchable - read)),
            stops_early=confidence is not None,
            continue_confidence=check.continue_confidence if check else None,
            captures=speculative is None or speculative.graphs,
            route=None if speculative is None else route_of(speculative),
        )

    def _judge(self, plan: Plan, speculative: SpeculativeConfig | None) -> Judge:
        acceptance = speculative.acceptance if speculative else "coupled"
        if acceptance != "rejection":
            return JUDGES[acceptance](speculative.check if speculative else None)
        has_check, decoder = plan.check_layer is not None, self._models.decoder
        if self._rejection is None:
            sizes = self._sizes.max_num_seqs, self._window, decoder.config.vocab_size
            # On a CPU the system may give what there is not, and end the process that writes to it.
            if decoder.device.type == "cpu" and (num := RejectionJudge.num_bytes_of(*sizes)) > (
                free := free_memory_bytes()
            ):
                raise MemoryError(
                    f"acceptance='rejection' keeps {mb(num)} of probabilities, {mb(free)} are free"
                )
            self._rejection = RejectionJudge(*sizes, decoder.device, has_check)
        return self._rejection.of_plan(has_check)
