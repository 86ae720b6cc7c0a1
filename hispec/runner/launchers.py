"""Launchers: they copy the rows of a round to the device, run it there, and begin the copy of its results
back.

packed   eagerly, over the live places alone; the host may read values in the middle of a round. For CPUs
static   every round of a plan and a number of rows has the same shapes and addresses, so that it can be one
         captured graph, and the next round may follow on the device before the host has read the results of
         this one. For GPUs
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..config import Plan
from ..decoding.acceptance import Judge
from ..decoding.batch import STATIC, Execution, RoundBatch, RoundResult, Together, Watch, directly
from ..decoding.drafter import Drafter, guarded
from ..decoding.round import run_round
from ..decoding.rounds_together import run_together
from ..decoding.stages import Stages
from ..sampling.sampler import Sampler
from ..scheduling.request import ExtraKV, Request
from ..utils.uploads import upload
from .block_tables import RowTables
from .buckets import context_bucket, row_bucket
from .cuda_graphs import GraphCache
from .downloads import make_downloads
from .plan_runtime import PlanRuntime
from .round_inputs import Input, advance, begin
from .round_output import RowOutcome, pack, read_rows, unpack


@dataclass(frozen=True)
class Rows:
    """The rows of a round, on the host.

    inputs         [6, rows] int64 by Input; of a round that was launched ahead of the host, token, start and
                   room are those of the round in which the row's request began
    requests       those that take part, with their rows; the other rows do nothing
    context_len    positions that any row may reach
    keeps_logits   whether logits are read after the round
    watches        whether the predictions of exits that are not in use are recorded
    num_rounds     rounds that run as one call at most; 0: one that does not
    ends           positions that each row has KV blocks for
    """

    inputs: np.ndarray[Any, np.dtype[np.int64]]
    requests: tuple[tuple[int, Request], ...]
    context_len: int
    keeps_logits: bool
    watches: bool = False
    num_rounds: int = 0
    ends: Sequence[int] = ()

    @property
    def may_draft(self) -> bool:
        """Whether any has places for more than the token before."""
        return bool(np.minimum(self.inputs[Input.CAP], self.inputs[Input.ROOM]).max() > 1)


@dataclass(slots=True)  # not frozen, which would triple the time that making one takes
class Flight:
    """A round that was launched. Whoever launches it adds what that cost; nobody else changes one.

    outcomes       waits until the device has done it -> one RowOutcome per row
    layer_passes   layers of the model that it ran
    draft_model_layer_passes   layers of a draft model that it ran
    pass_s         seconds in passes of draft, check and verify; zeros on a GPU
    launched_s     when it was launched, by time.perf_counter; 0.0 = before the one ahead of it was read, from
                   when on it is timed
    route          index of the controller's route
    is_timed       whether its time is that of what the device did: not so if it was captured too
    waits_for_prompts   whether prompts were queued ahead of it, in the time of which it has a part
    """

    runtime: PlanRuntime
    plan: Plan
    rows: Rows
    result: RoundResult
    outcomes: Callable[[], list[RowOutcome]]
    layer_passes: int = 0
    draft_model_layer_passes: int = 0
    pass_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    launched_s: float = 0.0
    route: int | None = None
    is_timed: bool = True
    waits_for_prompts: bool = False

    @property
    def extra_kv(self) -> frozenset[ExtraKV]:
        """The exits and the draft model whose KV the round writes."""
        return self.runtime.extra_kv - {"model"} if self.plan.is_plain else self.runtime.extra_kv

    @property
    def left(self) -> tuple[tuple[int, Request], ...]:
        """Its requests that have not ended since it was launched, with their rows."""
        return tuple(each for each in self.rows.requests if each[1].finish_reason is None)

    @property
    def drafter(self) -> Drafter | None:
        return None if self.plan.is_plain else self.runtime.drafter


class Launcher(Protocol):
    """Runs rounds of an engine, on its block tables and sampler."""

    runs_ahead: bool  # whether `launch_next` ever launches a round

    def launch(self, runtime: PlanRuntime, plan: Plan, rows: Rows) -> Flight:
        """Launches a round over these rows."""

    def advance(self, flight: Flight) -> None:
        """Tells sampler, drafter and inputs, on the device, what `flight` commits there."""

    def launch_next(self, flight: Flight, rows: Rows, changed: Sequence[int]) -> Flight:
        """Launches the round after `flight`, which `advance` was called for. The inputs of rows `changed` are
        those of `rows`; those of the others are on the device. Rows that reach their end in `flight` do
        nothing."""


class PackedLauncher:
    """Runs each round eagerly over its live places."""

    runs_ahead = False

    def __init__(self, tables: RowTables, sampler: Sampler, block_size: int, device: torch.device) -> None:
        self._tables, self._sampler, self._block_size, self._device = tables, sampler, block_size, device

    def launch(self, runtime: PlanRuntime, plan: Plan, rows: Rows) -> Flight:
        num_rows, device = rows.inputs.shape[1], self._device
        window = np.zeros((num_rows, plan.window + 1), np.int64)
        window[:, 0] = rows.inputs[Input.TOKEN]
        inputs = torch.from_numpy(np.ascontiguousarray(rows.inputs)).to(device)  # each line lies together
        _, starts, caps, rooms, most_drafts, most_checks = inputs
        batch = RoundBatch(
            tokens=torch.from_numpy(window).to(device),
            starts=starts,
            limits=torch.minimum(caps, rooms),
            most_drafts=most_drafts,
            most_checks=most_checks,
            block_tables=self._tables.tensor[:num_rows].to(device),
            block_size=self._block_size,
            max_context_len=rows.context_len,
            sampler=self._sampler,
            keeps_logits=rows.keeps_logits,
            watch=_watch(runtime, plan, rows, num_rows, device),
        )
        # A single one of plain decoding is a single pass.
        if rows.num_rounds > 1 or (rows.num_rounds == 1 and not plan.is_plain):
            together = Together(rows.num_rounds, _stop_ids(rows), caps, rooms, torch.tensor(rows.ends))
            result = run_together(*_how(runtime, plan), batch, runtime.gate(plan), together)
        else:
            result = _run_round(runtime, plan, batch)
        outcomes: Callable[[], list[RowOutcome]]
        if device.type == "cpu":
            outcomes = partial(read_rows, result, batch.watch, plan)
        else:
            outcomes = partial(unpack, pack(result, batch.watch).cpu(), plan)
        return Flight(runtime, plan, rows, result, outcomes)

    def advance(self, flight: Flight) -> None:
        raise NotImplementedError

    def launch_next(self, flight: Flight, rows: Rows, changed: Sequence[int]) -> Flight:
        raise NotImplementedError


class StaticLauncher:
    """Runs rounds of static shapes. Its tensors are as large as the engine's batch can be, and stay where
    they are; a round uses their first rows."""

    runs_ahead = True

    def __init__(
        self,
        tables: RowTables,
        sampler: Sampler,
        block_size: int,
        max_model_len: int,
        device: torch.device,
        graphs: GraphCache | None,
        *,
        by_stage: bool = False,
    ) -> None:
        """graphs: where rounds are captured; None = they run eagerly, with the same results. by_stage: as
        EngineConfig.stage_graphs."""
        num_rows = tables.tensor.shape[0]
        self._tables, self._sampler, self._block_size, self._device = tables, sampler, block_size, device
        self._max_model_len, self._num_rows, self._by_stage = max_model_len, num_rows, by_stage
        self._inputs = torch.zeros(len(Input), num_rows, dtype=torch.int64, device=device)
        self._limits = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros_like(tables.tensor, device=device)
        self._windows: dict[int, Tensor] = {}  # tokens [rows, window + 1] by window
        self._graphs = graphs
        # The device reads a copy's source later than the host starts it, so the source must stay unchanged
        # until then. Two rounds are in flight, as a rule.
        self._uploads = cycle([_Upload(device) for _ in range(3)])
        self._downloads = make_downloads(device)

    def launch(self, runtime: PlanRuntime, plan: Plan, rows: Rows) -> Flight:
        inputs = np.zeros((len(Input), self._num_rows), np.int64)  # empty rows have room for nothing
        inputs[:, : rows.inputs.shape[1]] = rows.inputs
        self._copy(self._inputs, torch.from_numpy(inputs))
        return self._run(runtime, plan, rows)

    def advance(self, flight: Flight) -> None:
        drafter = flight.drafter
        # Not captured, since a capture would do it twice; and the device is busy with the round before.
        counts = flight.result.counts
        self._sampler.advance(flight.result.tokens, counts)
        if drafter is not None:
            with guarded(drafter):
                drafter.advance(
                    self._batch(flight.plan, len(counts), flight.rows.context_len, STATIC), counts
                )
        advance(self._inputs, flight.result.tokens, counts)

    def launch_next(self, flight: Flight, rows: Rows, changed: Sequence[int]) -> Flight:
        if changed:
            inputs = upload(torch.from_numpy(rows.inputs[:, changed]), self._device)
            self._inputs.index_copy_(1, upload(torch.tensor(changed), self._device), inputs)
        return self._run(flight.runtime, flight.plan, rows)

    def _run(self, runtime: PlanRuntime, plan: Plan, rows: Rows) -> Flight:
        if self._tables.has_changed:
            self._copy(self._block_tables, self._tables.tensor)
            self._tables.has_changed = False  # last, since a copy may be interrupted
        num_rows = row_bucket(rows.inputs.shape[1], self._num_rows)
        context_len = context_bucket(rows.context_len, self._max_model_len)
        may_stop = not plan.is_plain and (runtime.stops_early or runtime.gate(plan) is not None)
        by_stage = self._by_stage and may_stop  # the host decides how far drafting goes, and how many cycles
        watches = rows.watches and not by_stage and bool(runtime.watched)
        key = (runtime, plan, num_rows, context_len, self._sampler.mode, rows.keeps_logits, watches)
        graphs = self._graphs if runtime.captures else None
        execution = STATIC
        if by_stage:
            # A round without requests, as in a warm-up, goes through all stages.
            call = directly if graphs is None else partial(_run_stage, graphs, key)
            execution = Execution(is_static=True, may_sync=bool(rows.requests), call=call)

        def run() -> tuple[RoundResult, Tensor]:
            watch = _watch(runtime, plan, rows, num_rows, self._device) if watches else None
            batch = self._batch(plan, num_rows, context_len, execution, rows.keeps_logits, watch)
            begin(self._inputs, batch.tokens, batch.limits)
            result = _run_round(runtime, plan, batch)
            return result, pack(result, watch)

        self._downloads.settle()  # a replay writes where the round before has left its results
        result, packed = run() if by_stage or graphs is None else graphs.run(key, run)
        wait = self._downloads.begin(packed)
        return Flight(runtime, plan, rows, result, lambda: unpack(wait(), plan))

    def _batch(
        self,
        plan: Plan,
        num_rows: int,
        context_len: int,
        execution: Execution,
        keeps_logits: bool = False,
        watch: Watch | None = None,
    ) -> RoundBatch:
        _, start, _, _, drafts, checks = self._inputs[:, :num_rows]
        return RoundBatch(
            tokens=self._window(plan)[:num_rows],
            starts=start,
            limits=self._limits[:num_rows],  # every stage's graph reads them there
            most_drafts=drafts,
            most_checks=checks,
            block_tables=self._block_tables[:num_rows],
            block_size=self._block_size,
            max_context_len=context_len,
            sampler=self._sampler,
            execution=execution,
            keeps_logits=keeps_logits,
            watch=watch,
        )

    def _window(self, plan: Plan) -> Tensor:
        if plan.window not in self._windows:
            self._windows[plan.window] = torch.zeros(
                self._num_rows, plan.window + 1, dtype=torch.int64, device=self._device
            )
        return self._windows[plan.window]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        next(self._uploads)(target, source)


class _Upload:
    """Copies to the device, as a rule without waiting for it, from pinned memory of its own for each
    target."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._pinned: dict[int, Tensor] = {}
        self._copied: dict[int, torch.cuda.Event] = {}  # after the last copy from each

    def __call__(self, target: Tensor, source: Tensor) -> None:
        if not self._is_pinned:
            target.copy_(source)
            return
        place = target.data_ptr()
        pinned = self._pinned.get(place)
        if pinned is None:
            self._copied[place] = torch.cuda.Event()  # first: an interrupt may come after any of these lines
            pinned = self._pinned[place] = torch.empty_like(source, pin_memory=True)
        self._copied[place].synchronize()  # rounds that were given up unread may still wait to read it
        pinned.copy_(source)
        target.copy_(pinned, non_blocking=True)
        self._copied[place].record()


def _how(runtime: PlanRuntime, plan: Plan) -> tuple[Stages, Plan, Judge, Drafter | None]:
    return runtime.stages, plan, runtime.judge, None if plan.is_plain else runtime.drafter


def _run_round(runtime: PlanRuntime, plan: Plan, batch: RoundBatch) -> RoundResult:
    return run_round(*_how(runtime, plan), batch, runtime.gate(plan))


def _stop_ids(rows: Rows) -> list[frozenset[int]]:
    """By row, the tokens that end its request."""
    stop_ids = [frozenset[int]()] * rows.inputs.shape[1]
    for row, request in rows.requests:
        stop_ids[row] = request.stop_ids
    return stop_ids


def _run_stage(
    graphs: GraphCache, key: Hashable, name: Hashable, run: Callable[..., Any], *inputs: Tensor
) -> Any:
    return graphs.run(key, run, *inputs, stage=name)


def _watch(runtime: PlanRuntime, plan: Plan, rows: Rows, num_rows: int, device: torch.device) -> Watch | None:
    return Watch(runtime.watched, num_rows, plan.window, device) if rows.watches and runtime.watched else None
