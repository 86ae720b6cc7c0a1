"""Launches the rounds of an engine: over which rows, by which launcher, and one round ahead of the host."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from cache.view import BatchView

from ..config import PLAIN, EngineConfig, Plan
from ..control.choice import Choice
from ..decoding.drafter import DrafterError, guarded
from ..decoding.rounds_together import can_link, prepare
from ..decoding.stages import DecoderLike, PassCounts
from ..sampling.inputs import RowSampling
from ..sampling.sampler import Sampler
from ..sampling_params import SamplingParams
from ..scheduling.request import Request
from ..scheduling.scheduler import Scheduler
from ..stats import EngineStats
from ..utils.clock import seconds_since
from ..utils.memory import is_out_of_memory
from .backfill import backfill
from .block_tables import RowTables
from .buckets import context_buckets, row_bucket, row_buckets
from .cuda_graphs import CudaGraphs, GraphCache, GraphDevice
from .drafter_failures import fall_back_to_plain
from .launchers import Flight, Launcher, PackedLauncher, Rows, StaticLauncher
from .plan_runtime import PlanRuntime
from .prefill import PackedPrompts, PromptPasses, StaticPrompts
from .rows import can_join, empty_rows, ends_after, make_rows, make_rows_after

_log = logging.getLogger(__name__)
_MOST_TOGETHER = 8  # rounds: seven eighths of the host's work around them are saved then
_PROMPTS_SHARE = 4  # of the memory for graphs those of prompts have a quarter
_LEAST_ROUND_MS = 0.1  # the clock may have stood still


def _may_be_one_call(request: Request) -> bool:
    """Whether nobody looks at the logits of the request's rounds, or changes them, or doubts them."""
    params = request.params
    return not (
        params.logprobs is not None
        or params.has_penalties
        or params.min_tokens
        or params.logit_bias
        or request.is_suspect
    )


def _route(runtime: PlanRuntime, choice: Choice) -> int | None:
    """Index of the controller's route that is chosen; None if nothing is to choose from."""
    return choice.route if runtime.routes else None


def num_together(max_run_ms: float, round_ms: float) -> int:
    """Rounds that run together, if each takes so long."""
    return min(_MOST_TOGETHER, max(1, int(max_run_ms / round_ms)))


class RoundRunner:
    """Launches rounds for the requests in the scheduler's rows."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler | None,
        tables: RowTables,
        max_model_len: int,
        decoder: DecoderLike,
        counters: Sequence[PassCounts],
        is_static: bool | None = None,
        graph_device: GraphDevice | None = None,
        on_failure: Callable[[int], None] | None = None,
    ) -> None:
        """
        scheduler      None = only `try_largest_passes` will be called
        counters       where passes are counted, those of the model first
        is_static      whether rounds have static shapes; None = on a GPU
        graph_device   where rounds are captured; None = on the decoder's device, if it is a GPU
        on_failure     called with the controller's route whose drafter failed
        """
        device = decoder.device
        if is_static is None:
            is_static = device.type == "cuda"
        if graph_device is None and device.type == "cuda":
            graph_device = CudaGraphs(device)
        self._scheduled, self._tables, self._counters = scheduler, tables, tuple(counters) or (PassCounts(),)
        self._block_size, self._max_model_len = config.block_size, max_model_len
        self._on_failure = on_failure
        self.max_run_ms = config.max_run_ms if device.type == "cpu" else 0.0
        # Milliseconds of the last round of each route's plan, and its rows.
        self._last_rounds: dict[tuple[int | None, Plan], tuple[float, int]] = {}
        if self.max_run_ms > 0.0:
            prepare(device)
        self._sampler = Sampler([], decoder.config.vocab_size, device, config.max_num_seqs)
        self._loaded: tuple[int, ...] | None = None  # numbers of the requests that the sampler has loaded
        self.graphs: GraphCache | None = None
        self._launcher: Launcher = PackedLauncher(tables, self._sampler, config.block_size, device)
        self.prompts: PromptPasses = PackedPrompts(config.block_size)
        self._caches: list[GraphCache] = []
        if is_static:
            prompt_graphs: GraphCache | None = None
            if config.graphs and graph_device is not None:
                of_prompts = config.max_graph_bytes // _PROMPTS_SHARE
                self._caches = [
                    GraphCache(each, counters, config.max_graphs, num_bytes)
                    for each, num_bytes in (
                        (graph_device, config.max_graph_bytes - of_prompts),
                        (graph_device.another(), of_prompts),
                    )
                ]
                self.graphs, prompt_graphs = self._caches
            self._launcher = StaticLauncher(
                tables,
                self._sampler,
                config.block_size,
                max_model_len,
                device,
                self.graphs,
                by_stage=config.stage_graphs,
            )
            self.prompts = StaticPrompts(config.block_size, max_model_len, config.max_num_seqs, prompt_graphs)

    @property
    def _scheduler(self) -> Scheduler:
        assert self._scheduled is not None
        return self._scheduled

    def num_together(self, runtime: PlanRuntime, choice: Choice, requests: Sequence[Request]) -> int:
        """Rounds that these requests, all that have a row, should run as one call, without the host between
        their passes: on a CPU, as many as take engine.max_run_ms, by those before; 1 where a text is to be
        looked at between two; plain decoding's may still run one by one. 0: a round that is no such call: its
        logits are asked for, exits are watched, a row of a plan is sampled, a plan's passes are none, or
        max_run_ms is 0."""
        if self.max_run_ms <= 0.0 or choice.watches or self._launcher.runs_ahead:
            return 0
        if not all(map(_may_be_one_call, requests)):
            return 0
        route, plan, window = _route(runtime, choice), choice.plan, choice.plan.window
        if plan.is_plain or all(request.cap(window) == 1 for request in requests):
            route, plan = None, PLAIN  # as `launch` has it where no row may speculate
        elif not self._can_link(runtime.for_route(route), plan, requests):
            return 0
        if any(request.params.stop for request in requests):
            return 1
        # More rows take longer: at most in proportion.
        round_ms, num_rows = self._last_rounds.get((route, plan), (math.inf, 1))
        num = num_together(self.max_run_ms, round_ms * max(1.0, len(requests) / num_rows))
        return min([num, *(request.max_tokens - request.num_output for request in requests)])

    @staticmethod
    def _can_link(runtime: PlanRuntime, plan: Plan, requests: Sequence[Request]) -> bool:
        is_greedy = all(request.params.temperature == 0.0 for request in requests)
        return is_greedy and can_link(runtime.stages, plan, runtime.judge, runtime.drafter)

    def launch(
        self,
        runtime: PlanRuntime,
        choice: Choice,
        limits: Mapping[int, int],
        stats: EngineStats,
        num_together: int = 0,
    ) -> Flight:
        """Launches a round as chosen, or up to num_together as one call, as far as each row has places.
        limits: the places that each row may process, by row. If the drafter fails, the round is one of plain
        decoding; and so are all further rounds of its requests, if there is no other drafter."""
        started_s, running = time.perf_counter(), self._scheduler.running
        route = _route(runtime, choice)
        runtime = runtime.for_route(route)
        requests = [running[row] for row in limits]
        assert all(request.is_ready for request in requests), "all but the last committed token are computed"
        self._load_sampler(running)
        rows = make_rows(running, choice, limits, num_together)
        if choice.plan.is_plain:
            return self._launch_rounds(runtime, PLAIN, rows, None, started_s)
        if runtime.drafter is not None and rows.may_draft:
            try:
                with guarded(runtime.drafter):
                    runtime.drafter.follow([(request.number, request.token_ids) for request in running])
                    tables, most = self._tables.tensor[: len(running)], self._scheduler.max_prefill_tokens
                    stats.caught_up_tokens += backfill(runtime, requests, tables, self._block_size, most)
                try:
                    return self._launch_rounds(runtime, choice.plan, rows, route, started_s)
                except Exception as error:
                    if len(running) > 1 or rows.num_rounds == 0 or not is_out_of_memory(error):
                        raise
                    _log.warning("out of memory (%s): a round alone goes on stage by stage", error)
                # There memory is asked for as it is needed, and a drafter that lacks it can be left out.
                rows = make_rows(running, choice, limits)
                return self._launch_rounds(runtime, choice.plan, rows, route, started_s)
            except DrafterError as error:
                if error.lacks_memory and len(running) > 1:
                    raise
                self._handle_failure(route, requests, error, stats)
        rows = make_rows(running, Choice(watches=choice.watches), limits, num_together)
        return self._launch_rounds(runtime, PLAIN, rows, None, started_s)

    def _launch_rounds(
        self, runtime: PlanRuntime, plan: Plan, rows: Rows, route: int | None, started_s: float
    ) -> Flight:
        """One round, or several that run together, which tell how long the next ones take."""
        began_s = time.perf_counter()
        flight = self._launch(runtime, plan, rows, route, started_s)
        num_rounds = flight.result.num_rounds
        round_ms = 1e3 * seconds_since(began_s) / num_rounds
        self._last_rounds[route, plan] = max(round_ms, _LEAST_ROUND_MS), len(rows.requests)
        self._scheduler.ran_on(num_rounds - 1)
        return flight

    def reserve_next(self, flight: Flight, left: Sequence[tuple[int, Request]]) -> int | None:
        """Reserves the blocks of the round after `flight` for `left`, what is left of its requests -> the
        positions that any of these may reach. None if the host has to read `flight` first."""
        if not self._launcher.runs_ahead or flight.rows.keeps_logits:
            return None
        ends = ends_after(flight, left)
        reserve = self._scheduler.reserve
        if not all(reserve(request, end) for (_, request), end in zip(left, ends, strict=True)):
            return None
        return max(ends, default=0)

    def launch_next(
        self,
        flight: Flight,
        left: Sequence[tuple[int, Request]],
        context_len: int,
        joining: Sequence[Request],
        choice: Choice,
        stats: EngineStats,
    ) -> Flight | None:
        """Launches the round after `flight`, which the host has not read yet, for `left`, what is left of its
        requests, and for those that join; None if it has to be read first. context_len: of `reserve_next`.

        A row whose request has ended is dead: it does nothing, until a request that joins takes it, or until
        half of the rows would do. A request that ends in `flight` may be in the next round too, since the
        host learns of its end only then: what that round commits for it is dropped, and what it writes lies
        above the request's end.
        """
        if not joining and all(request.max_tokens - request.num_output <= 1 for _, request in left):
            return None  # all end with the round in flight
        num_rows, most = flight.rows.inputs.shape[1], self._tables.tensor.shape[0]
        if 2 * row_bucket(len(self._scheduler.running), most) <= row_bucket(num_rows, most):
            return None
        if joining and not can_join(flight, left, joining, choice):
            return None
        # They were admitted with the blocks of another window, if another plan was in use then.
        window, reserve = choice.plan.window, self._scheduler.reserve
        if not all(reserve(request, request.round_end(window)) for request in joining):
            return None
        rows, joined, changed = make_rows_after(flight, left, context_len, joining, choice)
        if not (flight.plan.is_plain or rows.may_draft):
            return None  # plain rounds take over
        blocks: list[Sequence[int]] = [()] * rows.inputs.shape[1]
        for row, request in rows.requests:
            blocks[row] = request.table.blocks
        self._tables.update(blocks)
        before, captures = self._count(), self.num_captures
        try:
            self._launcher.advance(flight)
            if joined:
                self._take_rows(flight, rows, joined)
            ahead = self._launcher.launch_next(flight, rows, changed)
            self._scheduler.ran_on()
            return self._describe(ahead, before, captures, flight.route)
        except Exception as error:
            if is_out_of_memory(error):
                self.drop_graphs()  # the next round shows whether that is enough
            elif isinstance(error, DrafterError):
                self._handle_failure(flight.route, [request for _, request in rows.requests], error, stats)
            else:
                raise
        self.reset_sampler()
        return None

    def advance_sampler(self, flight: Flight) -> None:
        """Tells the sampler what `flight`, which was read, has committed; no other round is in flight."""
        try:
            self._sampler.advance(flight.result.tokens, flight.result.counts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.reset_sampler()

    def reset_sampler(self) -> None:
        """Has the sampler loaded anew before the next round: after an interrupt or an error it may count
        tokens that were not committed."""
        self._loaded = None

    def warm_up(self, runtime: PlanRuntime) -> None:
        """Runs, and so captures, the rounds of a plan for every bucket of rows and context, the largest
        first, without any request in them."""
        if self.graphs is None:
            return
        self._sampler.load([])
        self.reset_sampler()
        plans = [(each, each.plan) for each in runtime.routes] or [(runtime, runtime.plan)]
        plans += [(runtime, PLAIN)] if runtime.routes or not runtime.plan.is_plain else []
        rounds = [
            (num_rows, context_len, each, plan)
            for num_rows in row_buckets(self._tables.tensor.shape[0])
            for context_len in reversed(context_buckets(self._max_model_len))
            for each, plan in plans
        ]
        most = self.graphs.max_graphs
        if len(rounds) > most:
            _log.warning(
                "%d graphs are needed for all numbers of rows and lengths of context, more than"
                " engine.max_graphs=%d; raise it",
                len(rounds),
                most,
            )
        before = self._count()
        for num_rows, context_len, each, plan in rounds[:most]:
            self._launcher.launch(each, plan, empty_rows(num_rows, context_len)).outcomes()
        for counter, counts in zip(self._counters, before, strict=True):
            counter.set(counts)

    def try_largest_passes(self, runtime: PlanRuntime, num_tokens: int) -> None:
        """Runs the passes that need most memory: prefill of num_tokens, of as few requests as it may be of,
        and rounds of all rows, without any request in them."""
        device, (num_rows, max_blocks) = runtime.kv.data.device, self._tables.tensor.shape
        # Each row asks for all that takes memory.
        params = SamplingParams(
            temperature=1.0, top_k=100, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1
        )
        self._sampler.load([RowSampling(params, 0, [0], [0], frozenset())] * num_rows)
        nowhere = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        longest = min(num_tokens, self._max_model_len)
        ends = [*range(0, num_tokens, longest), num_tokens]
        tables = torch.zeros(len(ends) - 1, max_blocks, dtype=torch.int64, device=device)
        positions = torch.arange(num_tokens, device=device) % longest
        view = BatchView(positions, nowhere, tables, torch.tensor(ends, device=device), longest, longest)
        runtime.stages.prefill(torch.zeros_like(nowhere), view)
        for drafter in runtime.drafters:
            drafter.prefill(torch.zeros_like(nowhere), view)
        rounds = [(runtime, PLAIN), (runtime, runtime.plan), *((each, each.plan) for each in runtime.routes)]
        for each, plan in dict.fromkeys(rounds):
            self._launcher.launch(each, plan, empty_rows(num_rows, self._max_model_len)).outcomes()

    @property
    def graph_bytes(self) -> int | None:
        """Memory of captured graphs, as GraphCache has it; None if nothing is captured."""
        return sum(graphs.num_bytes for graphs in self._caches) if self._caches else None

    def drop_graphs(self, are_plans_gone: bool = False) -> None:
        """Drops all captured graphs; with are_plans_gone all that is known of plans, too."""
        for graphs in self._caches:
            if are_plans_gone:
                graphs.forget()
            else:
                graphs.clear()
        self.prompts.forget()

    def stats(self) -> dict[str, int]:
        """Counts of captured graphs, those of rounds and then those of prompts; empty if nothing is
        captured."""
        return {
            f"{kind}graph{name}": count
            for kind, graphs in zip(("", "prompt_"), self._caches, strict=False)
            for name, count in (
                ("s", len(graphs)),
                ("_captures", graphs.num_captures),
                ("_replays", graphs.num_replays),
                ("_bytes", graphs.num_bytes),
            )
        }

    def _launch(
        self, runtime: PlanRuntime, plan: Plan, rows: Rows, route: int | None, started_s: float
    ) -> Flight:
        before, captures = self._count(), self.num_captures
        flight = self._launcher.launch(runtime, plan, rows)
        return self._describe(flight, before, captures, route, started_s)

    def _describe(
        self,
        flight: Flight,
        passes: Sequence[PassCounts],
        num_captures: int,
        route: int | None,
        launched_s: float = 0.0,
    ) -> Flight:
        """`flight` with its route, time and counts; passes, num_captures: the counts before it."""
        own, *drafts = (now.since(then) for now, then in zip(self._counters, passes, strict=True))
        flight.layer_passes = own.layer_passes
        flight.draft_model_layer_passes += sum(each.layer_passes for each in drafts)
        draft_s = own.draft_pass_s + sum(each.pass_s for each in drafts)
        flight.pass_s = draft_s, own.check_pass_s, own.verify_pass_s
        flight.launched_s, flight.route = launched_s, route
        flight.is_timed = num_captures == self.num_captures
        return flight

    def _count(self) -> list[PassCounts]:
        """Passes of the model, and of a draft model, so far."""
        return [each.copy() for each in self._counters]

    @property
    def num_captures(self) -> int:
        """Of rounds and prompts; tried ones, whatever came of them: they take time."""
        return sum(graphs.num_captures + graphs.num_failures for graphs in self._caches)

    def _handle_failure(
        self, route: int | None, requests: Sequence[Request], error: DrafterError, stats: EngineStats
    ) -> None:
        """Reports a failed route to the controller; without a controller the requests fall back to plain
        decoding."""
        if route is None or self._on_failure is None:
            fall_back_to_plain(requests, error, stats)
            return
        stats.drafter_failures += 1
        _log.warning("a drafter failed (%s); its round goes on with plain decoding", error)
        self._on_failure(route)

    def _take_rows(self, flight: Flight, rows: Rows, joined: Mapping[int, Request]) -> None:
        """Tells drafter and sampler of the requests that join."""
        if (drafter := flight.drafter) is not None:
            with guarded(drafter):
                drafter.join({row: (each.number, each.token_ids) for row, each in joined.items()})
        sampling: list[RowSampling | None] = [None] * rows.inputs.shape[1]
        for row, each in rows.requests:  # whose output tokens only penalties ask for
            sampling[row] = RowSampling(each.params, each.seed, each.prompt_token_ids, (), each.stop_ids)
        self.reset_sampler()  # the next round that the host starts has other rows
        self._sampler.load(sampling)

    def _load_sampler(self, running: Sequence[Request]) -> None:
        """Gives the sampler the parameters and tokens of each row, if other requests are in the rows now."""
        numbers = tuple(request.number for request in running)
        if self._loaded != numbers:
            self._sampler.load(
                [
                    RowSampling(r.params, r.seed, r.prompt_token_ids, r.output_token_ids, r.stop_ids)
                    for r in running
                ]
            )
            self._loaded = numbers
