"""Launchers: the rows of a round from the host to the device, and what was committed back, in one copy each
way.

packed   eagerly, over the live places alone; the host may look at values in the middle of a round. For CPUs
static   every round of a plan and a number of rows has the same shapes and addresses, so that it can be one
         captured graph, and the next may follow on the device before the host has read what this one
         committed. For GPUs
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..config import Plan
from ..decoding.batch import STATIC, Execution, RoundBatch, RoundResult, Watch, directly
from ..decoding.drafter import Drafter, guarded
from ..decoding.round import run_round
from ..sampling.sampler import Sampler
from ..scheduling.request import Owner, Request
from .block_tables import RowTables
from .cuda_graphs import GraphCache
from .plan_runtime import PlanRuntime
from .round_output import RowOutcome, outcomes_of

_LEAST_CONTEXT = (
    512  # positions; a static round attends within one of few lengths, each four times the one before
)


class Input(IntEnum):
    """What a round needs to know of a row: its last committed token, that one's position, the places that it
    may take in a round, the tokens that it may still output, and the drafts that a cycle may have."""

    TOKEN = 0
    START = 1
    CAP = 2
    ROOM = 3
    DRAFTS = 4


@dataclass(frozen=True)
class Rows:
    """inputs [5, rows] int64 by Input; requests in them that take part, by row; context_len: positions that
    any may reach; whether logits are asked for after the round; whether exits that are not in use are asked
    too."""

    inputs: np.ndarray[Any, np.dtype[np.int64]]
    requests: tuple[tuple[int, Request], ...]
    context_len: int
    keeps_logits: bool
    watches: bool = False


@dataclass(frozen=True)
class Flight:
    """A round that was launched; outcomes(): of all its rows, once the device has done it; layers of the
    model that it runs; when it was launched, by time.perf_counter; the controller's route; whether nothing
    else was done meanwhile, such as capturing it.
    """

    runtime: PlanRuntime
    plan: Plan
    rows: Rows
    result: RoundResult
    outcomes: Callable[[], list[RowOutcome]]
    tokens: Tensor
    layer_passes: int = 0
    launched_s: float = 0.0
    route: int | None = None
    is_timed: bool = True

    @property
    def owners(self) -> frozenset[Owner]:
        """Exits and models whose own KV the round writes."""
        return self.runtime.owners - {"model"} if self.plan.is_plain else self.runtime.owners

    @property
    def drafter(self) -> Drafter | None:
        return None if self.plan.is_plain else self.runtime.drafter


class Launcher(Protocol):
    """Runs rounds of an engine, on its rows' tables and sampler."""

    runs_ahead: bool  # whether `proceed` ever launches one

    def launch(self, runtime: PlanRuntime, plan: Plan, rows: Rows) -> Flight:
        """A round from what the host knows."""

    def proceed(self, flight: Flight, context_len: int) -> Flight | None:
        """The round after `flight` for the same rows, from what the device knows. Rows that `flight` brings
        to their end do nothing in it. None where the host is never behind."""


class PackedLauncher:
    runs_ahead = False

    def __init__(self, tables: RowTables, sampler: Sampler, block_size: int, device: torch.device) -> None:
        self._tables, self._sampler, self._block_size, self._device = tables, sampler, block_size, device

    def launch(self, runtime: PlanRuntime, plan: Plan, rows: Rows) -> Flight:
        num_rows = rows.inputs.shape[1]
        host = np.zeros((num_rows, plan.window + 4), np.int64)  # the window's tokens, start, limit, drafts
        host[:, 0], host[:, -3], host[:, -1] = (
            rows.inputs[Input.TOKEN],
            rows.inputs[Input.START],
            rows.inputs[Input.DRAFTS],
        )
        host[:, -2] = np.minimum(rows.inputs[Input.CAP], rows.inputs[Input.ROOM])
        inputs = torch.from_numpy(host).to(self._device)
        batch = RoundBatch(
            tokens=inputs[:, : plan.window + 1].contiguous(),
            starts=inputs[:, -3],
            limits=inputs[:, -2],
            most_drafts=inputs[:, -1],
            block_tables=self._tables.tensor[:num_rows].to(self._device),
            block_size=self._block_size,
            max_context_len=rows.context_len,
            sampler=self._sampler,
            keeps_logits=rows.keeps_logits,
            watch=_watch(runtime, plan, rows, num_rows, self._device),
        )
        result = run_round(
            runtime.stages, plan, runtime.judge, None if plan.is_plain else runtime.drafter, batch
        )
        packed = _packed(result, batch.watch)
        return Flight(runtime, plan, rows, result, partial(outcomes_of, packed, plan), batch.tokens)

    def proceed(self, flight: Flight, context_len: int) -> Flight | None:
        return None


class StaticLauncher:
    """Its tensors are as large as the engine's batch can be, and stay where they are; a round uses the first
    of their rows."""

    runs_ahead = True

    def __init__(
        self,
        tables: RowTables,
        sampler: Sampler,
        block_size: int,
        max_model_len: int,
        device: torch.device,
        graphs: GraphCache | None,
    ) -> None:
        """graphs: where rounds are captured; None = they run eagerly, with the same results."""
        num_rows = tables.tensor.shape[0]
        self._tables, self._sampler, self._block_size, self._device = tables, sampler, block_size, device
        self._max_model_len, self._num_rows = max_model_len, num_rows
        self._inputs = torch.zeros(len(Input), num_rows, dtype=torch.int64, device=device)
        self._limits = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros_like(tables.tensor, device=device)
        self._windows: dict[int, Tensor] = {}  # tokens [rows, window + 1] by window
        self._graphs = graphs
        # Copies from the host are read when the device gets to them, so what they read must stay: there are
        # at most two rounds in the air.
        self._upload = [_Upload(device) for _ in range(3)]
        self._num_uploads = 0

    def launch(self, runtime: PlanRuntime, plan: Plan, rows: Rows) -> Flight:
        inputs = np.zeros(
            (len(Input), self._num_rows), np.int64
        )  # rows that nobody is in have room for nothing
        inputs[:, : rows.inputs.shape[1]] = rows.inputs
        self._copy(self._inputs, torch.from_numpy(inputs))
        return self._run(runtime, plan, rows)

    def proceed(self, flight: Flight, context_len: int) -> Flight:
        """As Launcher.proceed."""
        num_rows, plan, drafter = (
            bucket(flight.rows.inputs.shape[1], self._num_rows),
            flight.plan,
            flight.drafter,
        )

        def advance(counts: Tensor) -> None:
            token, start, _, room, _ = self._inputs[:, :num_rows]
            self._sampler.advance(flight.tokens, counts)
            if drafter is not None:
                with guarded(drafter):
                    drafter.advance(self._batch(plan, num_rows, context_len, STATIC), counts)
            token.copy_(flight.tokens.gather(1, counts.unsqueeze(1)).squeeze(1))
            start += counts
            room -= counts

        # Not to be done twice, as a capture does; it is a handful of operations, and the device is busy with
        # the round before.
        advance(flight.result.counts)
        return self._run(
            flight.runtime, plan, Rows(flight.rows.inputs, flight.rows.requests, context_len, False)
        )

    def _run(self, runtime: PlanRuntime, plan: Plan, rows: Rows) -> Flight:
        if self._tables.has_changed:
            self._copy(self._block_tables, self._tables.tensor)
            self._tables.has_changed = False  # last, since a copy may be interrupted
        num_rows, context_len = (
            bucket(rows.inputs.shape[1], self._num_rows),
            context_bucket(rows.context_len, self._max_model_len),
        )
        by_stage = (
            runtime.stops_early and not plan.is_plain
        )  # the host decides how far drafting goes, so there is a graph per stage
        watches = rows.watches and not by_stage and bool(runtime.watched)
        key = (runtime, plan, num_rows, context_len, self._sampler.mode, rows.keeps_logits, watches)
        graphs = self._graphs if runtime.captures else None
        execution = STATIC
        if by_stage:
            # Where nobody is in the rows, as when warming up, all stages are gone through.
            execution = Execution(
                is_static=True,
                may_sync=bool(rows.requests),
                call=directly if graphs is None else partial(_stage, graphs, key),
            )

        def run() -> tuple[RoundResult, Tensor]:
            watch = _watch(runtime, plan, rows, num_rows, self._device) if watches else None
            batch = self._batch(plan, num_rows, context_len, execution, rows.keeps_logits, watch)
            batch.tokens[:, 0] = self._inputs[Input.TOKEN, :num_rows]
            result = run_round(
                runtime.stages, plan, runtime.judge, None if plan.is_plain else runtime.drafter, batch
            )
            return result, _packed(result, watch)

        result, packed = run() if by_stage or graphs is None else graphs.run(key, run)
        return Flight(runtime, plan, rows, result, _to_host(packed, plan), self._window(plan)[:num_rows])

    def _batch(
        self,
        plan: Plan,
        num_rows: int,
        context_len: int,
        execution: Execution,
        keeps_logits: bool = False,
        watch: Watch | None = None,
    ) -> RoundBatch:
        _, start, cap, room, drafts = self._inputs[:, :num_rows]
        limits = torch.minimum(cap, room, out=self._limits[:num_rows])  # where every stage's graph reads them
        return RoundBatch(
            tokens=self._window(plan)[:num_rows],
            starts=start,
            limits=limits,
            most_drafts=drafts,
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
        upload = self._upload[self._num_uploads % len(self._upload)]
        self._num_uploads += 1
        upload(target, source)


class _Upload:
    """A copy to the device that need not wait for it: from pinned memory of its own, by target."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._pinned: dict[int, Tensor] = {}

    def __call__(self, target: Tensor, source: Tensor) -> None:
        if not self._is_pinned:
            target.copy_(source)
            return
        pinned = self._pinned.get(target.data_ptr())
        if pinned is None:
            pinned = self._pinned[target.data_ptr()] = torch.empty_like(source, pin_memory=True)
        pinned.copy_(source)
        target.copy_(pinned, non_blocking=True)


def bucket(num_rows: int, most: int) -> int:
    """Rows of the static round that `num_rows` rows run in: powers of 2 up to 8, then multiples of 8 up to
    64, then of 32."""
    step = 1 << max(0, num_rows - 1).bit_length() if num_rows <= 8 else 8 if num_rows <= 64 else 32
    return min(-(-num_rows // step) * step, most)


def buckets(most: int) -> list[int]:
    """All of them, the largest first."""
    return sorted({bucket(num_rows, most) for num_rows in range(1, most + 1)}, reverse=True)


def context_bucket(context_len: int, most: int) -> int:
    """Positions that a static round attends within, at least context_len."""
    length = _LEAST_CONTEXT
    while length < context_len:
        length *= 4
    return min(length, max(most, context_len))


def context_buckets(most: int) -> list[int]:
    """All of them."""
    lengths = [context_bucket(1, most)]
    while lengths[-1] < most:
        lengths.append(context_bucket(lengths[-1] + 1, most))
    return lengths


def _stage(
    graphs: GraphCache, key: Hashable, name: Hashable, run: Callable[..., Any], *inputs: Tensor
) -> Any:
    return graphs.run((key, name), run, *inputs)


def _watch(runtime: PlanRuntime, plan: Plan, rows: Rows, num_rows: int, device: torch.device) -> Watch | None:
    return Watch(runtime.watched, num_rows, plan.window, device) if rows.watches and runtime.watched else None


def _packed(result: RoundResult, watch: Watch | None) -> Tensor:
    """All that the host needs to know, as one tensor [rows, ...]; `outcomes_of` knows the columns."""
    columns = torch.stack((result.counts, result.tentative, result.accepted), dim=1)
    parts = [columns, result.drafted, result.kept, result.source, result.tokens[:, 1:]]
    if watch is not None:
        parts.append(watch.count_agreements(result.tokens, result.counts).flatten(1))
    return torch.cat(parts, dim=1)


def _to_host(packed: Tensor, plan: Plan) -> Callable[[], list[RowOutcome]]:
    """Begins the copy -> waits for it."""
    if packed.device.type != "cuda":
        copy = packed.clone()  # the next round overwrites it
        return partial(outcomes_of, copy, plan)
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[RowOutcome]:
        done.synchronize()
        return outcomes_of(host, plan)

    return wait
