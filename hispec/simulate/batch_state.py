"""Which requests have rows and KV blocks of a simulated engine: moved as hispec/scheduling/scheduler.py moves
them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..latency.model import LatencyModel
from ..latency.moving import cheaper_to_move
from ..scheduling.policy import FirstComeFirstServed, Key, Policy, Service
from .config import EngineSettings
from .distributions import Floats, Ints
from .row_state import NUM_TOTALS, ROW, RoundPlan
from .tables import Tables
from .workload import Workload

_SERVICE = ["rounds", "tokens", "drafted", "accepted", "passes", "seconds", "prefill_passes", "prefill_s"]


@dataclass
class Counts:
    """preemptions: rows taken; swaps: requests whose KV was offloaded; recomputed: positions of KV that were
    lost; stall_s: seconds of moving KV; rounds: by plan"""

    preemptions: int = 0
    swaps: int = 0
    recomputed: int = 0
    stall_s: float = 0.0
    rounds: dict[RoundPlan, float] = field(default_factory=dict)
    totals: Floats = field(default_factory=lambda: np.zeros(NUM_TOTALS))


@dataclass(frozen=True)
class Setup:
    """What all replicas of a run share. swap_bytes: host memory of each; route_numbers: indices of the
    controller's routes among the experiment's."""

    engine: EngineSettings
    latency: LatencyModel
    workload: Workload
    tables: Tables
    swap_bytes: int
    route_numbers: tuple[int, ...]

    def prefill_s(self, num_positions: int) -> float:
        return self.latency["prefill"](1, num_positions, num_positions) / 1e3

    def swap_s(self, num_positions: int) -> float | None:
        """Seconds of moving KV out and in again; None without a `swap` stage."""
        if "swap" not in self.latency:
            return None
        return self.latency["swap"](1, num_positions, num_positions) / 1e3


def new_row(workload: Workload, request: int) -> np.void:
    """The row of a request that has not begun."""
    row = np.zeros(1, ROW)[0]
    row["request"], row["first_token_s"] = request, math.nan
    row["length"] = workload.prompt_tokens[request]
    row["prefill_left"] = row["length"] - 1 - workload.cached_tokens[request]
    row["target"], row["max_tokens"] = workload.output_tokens[request], workload.max_tokens[request]
    row["num_drafts"] = row["num_checks"] = row["first_recorded"] = -1
    if (replay := workload.replays[request]) >= 0:
        row["first_recorded"], row["end_recorded"] = workload.recorded.starts[replay : replay + 2]
    return row


class BatchState:
    """Requests that wait, and those in rows [0, num_running)."""

    def __init__(self, setup: Setup, policy: Policy) -> None:
        from .round_parts_numba import blocks_needed

        engine = setup.engine
        self.setup, self.policy, self.counts = setup, policy, Counts()
        self.waiting, self.num_running = list[int](), 0
        self.rows = np.zeros(engine.max_num_seqs, ROW)
        self.plan = RoundPlan(-1, 0, 1)
        self.new: set[int] = set()  # requests that arrived since the last review
        self.rounds_since_review = 0
        self.now_s = self.stall_s = 0.0  # time; seconds of moving KV before the next step
        self._blocks_needed: Callable[..., int] = blocks_needed
        self._is_cheaper_to_move = cheaper_to_move(setup.latency, engine.max_prefill_tokens)
        self._is_told = not isinstance(policy, FirstComeFirstServed)  # of service, which FCFS ignores
        self._num_blocks = (
            math.inf if engine.num_kv_tokens is None else engine.num_kv_tokens // engine.block_size
        )
        self._row_of: dict[int, int] = {}
        self._without_row: dict[int, np.void] = {}  # the rows of waiting requests
        self._paused: dict[int, int] = {}  # blocks of waiting requests that have some
        self._offloaded: dict[int, int] = {}  # bytes in host memory, by request

    def add(self, request: int) -> None:
        self._without_row[request] = new_row(self.setup.workload, request)
        self.waiting.append(request)
        if self.policy.preempts:
            self.new.add(request)

    def schedule(self) -> None:
        """Decides which requests have a row in the next step."""
        if self.waiting:
            self.report_service()
            if self._is_review_due:
                self._review()
            self._admit()

    @property
    def num_blocks(self) -> int:
        """Blocks that requests in rows may have; -1 = enough."""
        return int(self._num_blocks - sum(self._paused.values())) if self._num_blocks < math.inf else -1

    def prefill_order(self) -> Ints | list[int]:
        """Rows in the order of their prefill."""
        requests = self.rows["request"][: self.num_running]
        if self.num_running == 1:
            return [0]
        if self._is_told and np.count_nonzero(self.rows["prefill_left"][: self.num_running]) > 1:
            keys = [self._key(request) for request in requests.tolist()]
            return sorted(range(self.num_running), key=keys.__getitem__)
        return np.argsort(requests)

    def progress_of(self, request: int) -> tuple[int, int]:
        """Output tokens of an unfinished request, and positions to compute before the next one."""
        row = self._without_row[request] if request in self._without_row else self.rows[self._row_of[request]]
        return int(row["output"]), int(row["prefill_left"])

    # ---- order ----

    def _key(self, request: int) -> Key:
        return self.policy.key(request, self.now_s)

    @property
    def _is_review_due(self) -> bool:
        return self.policy.preempts and (
            bool(self.new) or self.rounds_since_review >= self.policy.review_rounds
        )

    def _review(self) -> None:
        """As Scheduler._review: between regular reviews only new requests may displace others, and nobody
        passes a request that may not."""
        is_regular = self.rounds_since_review >= self.policy.review_rounds
        if is_regular:
            self.rounds_since_review = 0
        new, self.new = self.new, set()
        ends = {request: self._end_blocks(self.rows[row]) for request, row in self._row_of.items()}
        rest = sorted((self._key(request), request) for request in ends)
        most_rows = self.setup.engine.max_num_seqs
        num_rows, num_blocks = most_rows - self.num_running, self._num_blocks - sum(ends.values())
        waiting = ((self._key(request), request) for request in self.waiting)
        for key, request in heapq.nsmallest(most_rows, waiting):
            num_rows -= 1
            num_blocks -= self._end_blocks(self._without_row[request])
            victims = []
            while min(num_rows, num_blocks) < 0 and rest and self.policy.displaces(key, rest[-1][0]):
                victims.append(rest.pop()[1])
                num_rows, num_blocks = num_rows + 1, num_blocks + ends[victims[-1]]
            if min(num_rows, num_blocks) < 0 or (victims and not is_regular and request not in new):
                return
            for victim in victims:
                self._pause(victim)

    def _admit(self) -> None:
        num_free = self.setup.engine.max_num_seqs - self.num_running
        if num_free == 0:
            return
        order = sorted(self.waiting, key=self._key) if len(self.waiting) > 1 else self.waiting
        for request in order[:num_free]:
            if self._num_blocks < math.inf:
                rows = self.rows[: self.num_running]
                needed = self._blocks_needed(rows, self.plan, self.setup.engine.block_size)
                needed += self._end_blocks(self._without_row[request])
                if needed > self._num_blocks:  # nobody is evicted for nothing
                    return
                needed -= self._paused.get(request, 0)
                while needed + sum(self._paused.values()) > self._num_blocks:
                    self._evict(max((other for other in self._paused if other != request), key=self._key))
            self._take_row(request)

    # ---- rows and blocks ----

    def _blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.setup.engine.block_size)

    def _end_blocks(self, row: np.void) -> int:
        """Blocks that a request may need in its next round."""
        window = self.plan.num_checks * (self.plan.num_drafts + 1)
        end = int(row["length"]) - 1 + min(window, int(row["max_tokens"]) - int(row["output"]))
        return self._blocks_for(end)

    def make_room(self) -> None:
        """Frees blocks for the next round: those of the paused request that goes last, or of the running one
        if none is paused."""
        if not self._paused:
            self.report_service()
            self._pause(max(self._row_of, key=self._key))
        self._evict(max(self._paused, key=self._key))

    def _take_row(self, request: int) -> None:
        self.waiting.remove(request)
        row = self._without_row.pop(request)
        self._paused.pop(request, None)
        if self._offloaded.pop(request, None) is not None:
            moved = int(row["length"]) - 1 - int(row["prefill_left"])
            self.stall_s += (self.setup.swap_s(moved) or 0.0) / 2
        self.rows[self.num_running] = row
        self._row_of[request] = self.num_running
        self.num_running += 1

    def leave_row(self, at: int) -> None:
        """Frees a row; the last request moves into it."""
        self.num_running -= 1
        del self._row_of[int(self.rows["request"][at])]
        if at != self.num_running:
            self.rows[at] = self.rows[self.num_running]
            self._row_of[int(self.rows["request"][at])] = at

    def _pause(self, request: int) -> None:
        """Preempts a running request, which keeps the blocks of what is computed."""
        at = self._row_of[request]
        self.report_service(slice(at, at + 1))
        self._without_row[request] = row = self.rows[at].copy()
        self._paused[request] = self._blocks_for(int(row["length"]) - 1 - int(row["prefill_left"]))
        self.leave_row(at)
        self.counts.preemptions += 1
        self.waiting.append(request)

    def _evict(self, request: int) -> None:
        """Takes the blocks of a paused request, whose KV is offloaded or will be computed again."""
        del self._paused[request]
        row, setup = self._without_row[request], self.setup
        computed = int(row["length"]) - 1 - int(row["prefill_left"])
        num_bytes, swap_s = computed * setup.engine.kv_bytes_per_token, setup.swap_s(computed)
        is_room = sum(self._offloaded.values()) + num_bytes <= setup.swap_bytes
        # Without a cost of moving nothing is moved: it would be for free.
        if swap_s is not None and self._is_cheaper_to_move(computed) and is_room:
            self._offloaded[request] = num_bytes
            self.stall_s += swap_s / 2
            self.counts.swaps += 1
        else:
            self.counts.recomputed += computed
            row["prefill_left"] = row["length"] - 1

    # ---- what the policy is told ----

    def report_service(self, rows: slice | None = None) -> None:
        """Tells the policy what service these rows, or all, have received since it was last told."""
        if not self._is_told:
            return
        told = self.rows[: self.num_running] if rows is None else self.rows[rows]
        for (
            request,
            *_,
            rounds,
            tokens,
            drafted,
            accepted,
            passes,
            seconds,
            prefill_passes,
            prefill_s,
            _,
        ) in told.tolist():
            if prefill_passes > 0.0:
                self.policy.served(request, Service(0, 0, 0, 0, prefill_passes, prefill_s))
            if rounds:
                self.policy.served(request, Service(rounds, tokens, drafted, accepted, passes, seconds))
        for name in _SERVICE:
            told[name] = 0
