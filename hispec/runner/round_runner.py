"""Rounds of an engine: with which plan, over which rows, and how far ahead of the host."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from cache.view import BatchView

from ..config import PLAIN, EngineConfig, Plan
from ..control.choice import Choice
from ..decoding.drafter import DrafterError, guarded
from ..decoding.stages import DecoderLike, PassCounts
from ..sampling.inputs import RowSampling
from ..sampling.sampler import Sampler
from ..sampling_params import SamplingParams
from ..scheduling.request import Request
from ..scheduling.scheduler import Scheduler
from ..stats import EngineStats
from ..utils.memory import is_out_of_memory
from .backfill import catch_up
from .block_tables import RowTables
from .cuda_graphs import CudaGraphs, GraphCache, GraphDevice
from .drafter_failures import give_up_drafting
from .launchers import Flight, Input, Launcher, PackedLauncher, Rows, StaticLauncher, buckets
from .plan_runtime import PlanRuntime

_log = logging.getLogger(__name__)


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
        """scheduler: None = for `try_out` alone; counters: what passes are counted in; is_static,
        graph_device: whether rounds have static shapes, and where they are captured: None = as the decoder's
        device wants it; on_failure: told of the controller's route whose drafter failed."""
        device = decoder.device
        if is_static is None:
            is_static = device.type == "cuda"
        if graph_device is None and device.type == "cuda":
            graph_device = CudaGraphs(device)
        self._scheduled, self._tables, self._counters = scheduler, tables, tuple(counters) or (PassCounts(),)
        self._block_size, self._on_failure = config.block_size, on_failure
        self._sampler = Sampler([], decoder.config.vocab_size, device, config.max_num_seqs)
        self._seated: tuple[int, ...] | None = None  # numbers of the requests that the sampler knows
        self.graphs: GraphCache | None = None
        self._launcher: Launcher = PackedLauncher(tables, self._sampler, config.block_size, device)
        if is_static:
            if config.graphs and graph_device is not None:
                self.graphs = GraphCache(graph_device, counters, config.max_graphs, config.max_graph_bytes)
            self._launcher = StaticLauncher(
                tables, self._sampler, config.block_size, max_model_len, device, self.graphs
            )

    @property
    def _scheduler(self) -> Scheduler:
        assert self._scheduled is not None
        return self._scheduled

    def launch(
        self, runtime: PlanRuntime, choice: Choice, limits: Mapping[int, int], stats: EngineStats
    ) -> Flight:
        """A round as chosen, for the rows of `limits`, which may process so many places each. If the drafter
        fails, the round is one of plain decoding; and so are all further ones of its requests, if there is no
        other drafter."""
        running, route, started_s = (
            self._scheduler.running,
            choice.route if runtime.routes else None,
            time.perf_counter(),
        )
        runtime = runtime.of(choice.route)
        for row in limits:
            assert running[row].is_ready, (
                "a round's entry invariant: all but the last committed token are computed"
            )
        self._seat(running)
        rows = self._rows(choice, limits)
        if (
            runtime.drafter is not None
            and np.minimum(rows.inputs[Input.CAP], rows.inputs[Input.ROOM]).max() > 1
        ):  # else no row may speculate
            try:
                with guarded(runtime.drafter):
                    runtime.drafter.follow([(request.number, request.token_ids) for request in running])
                    tables = self._tables.tensor[: len(running)]
                    most = self._scheduler.max_prefill_tokens
                    stats.caught_up_tokens += catch_up(
                        runtime, [running[row] for row in limits], tables, self._block_size, most
                    )
                return self._launch(runtime, choice.plan, rows, route, started_s)
            except DrafterError as error:
                if error.lacks_memory and len(running) > 1:
                    raise
                self._give_up(route, [running[row] for row in limits], error, stats)
        if not choice.plan.is_plain:
            rows = self._rows(Choice(watches=choice.watches), limits)
        return self._launch(runtime, PLAIN, rows, None, started_s)

    def proceed(self, flight: Flight, stats: EngineStats) -> Flight | None:
        """The round after `flight`, which the host has not read yet; None if that has to be read first.

        What ends a request is found out when its round is read. By then it may be in the next round too: what
        that commits for it is dropped, and what it writes lies above the request's end.
        """
        running = self._scheduler.running
        if not self._launcher.runs_ahead or flight.rows.keeps_logits or self._scheduler.may_admit:
            return None
        if list(flight.rows.requests) != list(enumerate(running)):  # somebody came, left, or is not ready yet
            return None
        cap, room = (
            flight.rows.inputs[Input.CAP],
            [request.max_tokens - request.num_output for request in running],
        )
        if max(room) <= 1:  # all end with the round in the air
            return None
        # In both rounds together a row goes no further than this.
        ends = [
            len(request.token_ids) - 1 + min(2 * int(most), left)
            for request, most, left in zip(running, cap, room, strict=True)
        ]
        if not all(self._scheduler.reserve(request, end) for request, end in zip(running, ends, strict=True)):
            return None
        self._tables.update([request.table.blocks for request in running])
        before, captures = self._counters[0].layer_passes, self._num_captures
        try:
            ahead = self._launcher.proceed(flight, max(ends))
            self._scheduler.ran_ahead()
            passes, is_timed = self._counters[0].layer_passes - before, captures == self._num_captures
            return ahead and replace(ahead, layer_passes=passes, route=flight.route, is_timed=is_timed)
        except Exception as error:
            if is_out_of_memory(error):
                self.forget_graphs()  # the next round shows whether that is enough
            elif isinstance(error, DrafterError):
                self._give_up(flight.route, running, error, stats)
            else:
                raise
        self.forget()
        return None

    def follow_up(self, flight: Flight) -> None:
        """`flight` was read and committed, and no other is in the air."""
        try:
            self._sampler.advance(flight.tokens, flight.result.counts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.forget()

    def forget(self) -> None:
        """The sampler may have been told of tokens that were not committed: an interrupt, or an error, came
        in between."""
        self._seated = None

    def warm_up(self, runtime: PlanRuntime, context_lens: Sequence[int]) -> None:
        """Runs, and so captures, the rounds of a plan for every number of rows and these lengths of context,
        the largest first: without any row in them, so that nothing changes."""
        if self.graphs is None:
            return
        self._sampler.load([])
        self.forget()
        plans = [(each, each.plan) for each in runtime.routes] or [(runtime, runtime.plan)]
        plans += [(runtime, PLAIN)] if runtime.routes or not runtime.plan.is_plain else []
        kinds = [
            (rows, length, plan)
            for rows in buckets(self._tables.tensor.shape[0])
            for length in sorted(context_lens, reverse=True)
            for plan in plans
        ]
        most = self.graphs.max_graphs
        if len(kinds) > most:
            _log.warning(
                "%d graphs are needed for all numbers of rows and lengths of context, more than"
                " engine.max_graphs=%d; raise it",
                len(kinds),
                most,
            )
        before = [counter.copy() for counter in self._counters]
        for num_rows, context_len, (each, plan) in kinds[:most]:
            self._launcher.launch(
                each, plan, Rows(np.zeros((len(Input), num_rows), np.int64), (), context_len, False)
            ).outcomes()
        for counter, counts in zip(self._counters, before, strict=True):
            counter.set(counts)

    def try_out(self, runtime: PlanRuntime, num_tokens: int, context_len: int) -> None:
        """The largest passes that there can be, for their memory: prefill of num_tokens, and rounds of all
        rows. Nobody is in them."""
        device = runtime.kv.data.device
        # Rows that ask for all that takes memory.
        params = SamplingParams(
            temperature=1.0, top_k=100, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1
        )
        self._sampler.load([RowSampling(params, 0, [0], [0], frozenset())] * self._tables.tensor.shape[0])
        nowhere = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        tables = torch.zeros(1, self._tables.tensor.shape[1], dtype=torch.int64, device=device)
        places = torch.tensor([0, num_tokens], device=device)
        view = BatchView(
            torch.arange(num_tokens, device=device), nowhere, tables, places, num_tokens, num_tokens
        )
        runtime.stages.prefill(torch.zeros_like(nowhere), view)
        for drafter in runtime.drafters:
            drafter.prefill(torch.zeros_like(nowhere), view)
        for each, plan in dict.fromkeys(
            ((runtime, PLAIN), (runtime, runtime.plan), *((route, route.plan) for route in runtime.routes))
        ):
            rows = Rows(
                np.zeros((len(Input), self._tables.tensor.shape[0]), np.int64), (), context_len, False
            )
            self._launcher.launch(each, plan, rows).outcomes()

    def forget_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def stats(self) -> dict[str, int]:
        """Of captured graphs; nothing where rounds are not captured."""
        graphs = self.graphs
        if graphs is None:
            return {}
        return {
            "graphs": len(graphs),
            "graph_captures": graphs.num_captures,
            "graph_replays": graphs.num_replays,
            "graph_bytes": graphs.num_bytes,
        }

    def _launch(
        self, runtime: PlanRuntime, plan: Plan, rows: Rows, route: int | None, started_s: float
    ) -> Flight:
        before, captures = self._counters[0].layer_passes, self._num_captures
        flight = self._launcher.launch(runtime, plan, rows)
        passes = self._counters[0].layer_passes - before
        return replace(
            flight,
            layer_passes=passes,
            launched_s=started_s,
            route=route,
            is_timed=captures == self._num_captures,
        )

    @property
    def _num_captures(self) -> int:
        return 0 if self.graphs is None else self.graphs.num_captures

    def _give_up(
        self, route: int | None, requests: Sequence[Request], error: DrafterError, stats: EngineStats
    ) -> None:
        """Of several ways to speculate one has failed, for now; the only one is done without."""
        if route is None or self._on_failure is None:
            give_up_drafting(requests, error, stats)
            return
        stats.drafter_failures += 1
        _log.warning("a drafter failed (%s); its round goes on with plain decoding", error)
        self._on_failure(route)

    def _rows(self, choice: Choice, limits: Mapping[int, int]) -> Rows:
        running, plan = self._scheduler.running, choice.plan
        inputs = np.zeros((len(Input), len(running)), np.int64)
        for row, request in enumerate(running):
            drafts = choice.most_drafts.get(request.number, plan.num_draft_tokens)
            cap = min(limits.get(row, 0), request.cap(choice.window(request.number)))
            inputs[:, row] = (
                request.token_ids[-1],
                len(request.token_ids) - 1,
                cap,
                request.max_tokens - request.num_output,
                drafts,
            )
        context_len = int((inputs[Input.START] + np.minimum(inputs[Input.CAP], inputs[Input.ROOM])).max())
        keeps_logits = any(running[row].params.logprobs is not None for row in limits)
        return Rows(
            inputs,
            tuple((row, running[row]) for row in sorted(limits)),
            context_len,
            keeps_logits,
            choice.watches,
        )

    def _seat(self, running: Sequence[Request]) -> None:
        """Tells the sampler whose parameters are in which row, if that has changed."""
        numbers = tuple(request.number for request in running)
        if self._seated != numbers:
            self._sampler.load(
                [
                    RowSampling(r.params, r.seed, r.prompt_token_ids, r.output_token_ids, r.stop_ids)
                    for r in running
                ]
            )
            self._seated = numbers
