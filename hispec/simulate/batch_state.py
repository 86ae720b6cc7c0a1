"""Who is in the rows of a simulated engine and with which KV blocks: requests are moved as
hispec/scheduling/scheduler.py moves them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..config import PLAIN
from ..scheduling.policy import FirstComeFirstServed, Key, Policy, Service
from .config import EngineSettings
from .costs import Costs
from .distributions import Floats, Ints
from .row_columns import (
    CHECKS,
    DRAFTS,
    FIRST,
    FIRST_TOKEN,
    LAST,
    LEFT,
    LENGTH,
    MOST,
    NUM_REAL,
    NUM_TOTALS,
    NUM_WHOLE,
    OUTPUT,
    REQUEST,
    S_PASSES,
    S_ROUNDS,
    TARGET,
    Rows,
    Tables,
)
from .workload import Workload


@dataclass
class Counts:
    """preemptions: rows taken; swaps: KV moved out; recomputed: positions of KV that were lost; rounds: by
    (route, K, R)"""

    preemptions: int = 0
    swaps: int = 0
    recomputed: int = 0
    rounds: dict[tuple[int, int, int], float] = field(default_factory=dict)
    totals: Floats = field(default_factory=lambda: np.zeros(NUM_TOTALS))


@dataclass(frozen=True)
class Setup:
    """What all replicas of a run share. tables: of costs and recorded rounds; swap_bytes: host memory of
    each; route_numbers: what the controller's routes are in the tables."""

    engine: EngineSettings
    costs: Costs
    workload: Workload
    tables: Tables
    swap_bytes: int
    route_numbers: tuple[int, ...]


def empty_rows(num: int, num_routes: int) -> Rows:
    return Rows(
        np.zeros((num, NUM_WHOLE), np.int64),
        np.zeros((num, NUM_REAL)),
        np.zeros(num, np.uint64),
        np.zeros((num, num_routes, 4)),
    )


class Seats:
    """Requests that wait, and those in rows [0, num_running)."""

    def __init__(self, setup: Setup, policy: Policy) -> None:
        from .round_parts_numba import blocks_needed

        engine = setup.engine
        self.setup, self.policy, self.counts = setup, policy, Counts()
        self.waiting, self.num_running, self.plan = list[int](), 0, PLAIN
        self.rows = empty_rows(engine.max_num_seqs, setup.workload.shares.shape[0])
        self.new: list[int] = []  # that came since the last review
        self.rounds_since_review = 0
        self.now_s = self.stall_s = 0.0  # time; seconds of moving KV, before the next step
        self._blocks_needed: Callable[..., int] = blocks_needed
        self._is_told = not isinstance(policy, FirstComeFirstServed)
        self._num_blocks = -1 if engine.num_kv_tokens is None else engine.num_kv_tokens // engine.block_size
        self._row_of: dict[int, int] = {}
        self._paused: dict[int, int] = {}  # blocks of who has some without a row
        self._saved: dict[int, tuple[Ints, Floats]] = {}  # row of who had one before
        self._kept_bytes, self._moved = 0, dict[int, int]()  # bytes in host memory, by request

    def settle(self) -> None:
        """Decides who is in a row, now that a step is over."""
        if self.waiting:
            self._tell_all()
            if self._is_review_due:
                self._review()
            self._admit()

    @property
    def num_blocks(self) -> int:
        """That those in rows may have; -1 = enough."""
        return -1 if self._num_blocks < 0 else self._num_blocks - sum(self._paused.values())

    def order(self) -> Ints | list[int]:
        """Rows, whose prompt goes first."""
        whole = self.rows.whole[: self.num_running]
        if self.num_running == 1:
            return [0]
        if self._is_told and np.count_nonzero(whole[:, LEFT]) > 1:
            keys = [self._key(int(request)) for request in whole[:, REQUEST]]
            return sorted(range(self.num_running), key=keys.__getitem__)
        return np.argsort(whole[:, REQUEST])

    def progress_of(self, request: int) -> tuple[int, int]:
        """Of a request that is here: tokens that it has, positions that are to be computed before it gets
        more."""
        row = self._row_of.get(request)
        if row is not None:
            return int(self.rows.whole[row, OUTPUT]), int(self.rows.whole[row, LEFT])
        if request in self._saved:
            saved = self._saved[request][0]
            return int(saved[OUTPUT]), int(saved[LEFT])
        workload = self.setup.workload
        return 0, int(workload.prompt_tokens[request] - 1 - workload.cached_tokens[request])

    # ---- order ----

    def _key(self, request: int) -> Key:
        return self.policy.key(request, self.now_s)

    @property
    def _is_review_due(self) -> bool:
        return self.policy.preempts and (
            bool(self.new) or self.rounds_since_review >= self.policy.review_rounds
        )

    def _review(self) -> None:
        """As Scheduler._review."""
        is_regular = self.rounds_since_review >= self.policy.review_rounds
        if is_regular:
            self.rounds_since_review = 0
        may_displace, self.new = self.waiting if is_regular else self.new, []
        is_limited, size = self._num_blocks >= 0, self.setup.engine.block_size
        held = {
            request: -(-int(self.rows.whole[row, LENGTH] - 1) // size) if is_limited else 0
            for request, row in self._row_of.items()
        }
        rest = sorted((self._key(request), request) for request in held)
        num_rows = self.setup.engine.max_num_seqs - self.num_running
        num_blocks = self._num_blocks - sum(held.values()) if is_limited else 0
        for key, request in sorted((self._key(request), request) for request in may_displace):
            num_blocks, num_rows = num_blocks - (self._end_blocks(request) if is_limited else 0), num_rows - 1
            victims = []
            while (num_rows < 0 or num_blocks < 0) and rest and self.policy.displaces(key, rest[-1][0]):
                victims.append(rest.pop()[1])
                num_rows, num_blocks = num_rows + 1, num_blocks + held[victims[-1]]
            if num_rows < 0 or num_blocks < 0:
                return
            for victim in victims:
                self._pause(victim)

    def _admit(self) -> None:
        if self.num_running == self.setup.engine.max_num_seqs:
            return
        order = (
            sorted((self._key(request), request) for request in self.waiting)
            if len(self.waiting) > 1
            else [((), self.waiting[0])]
        )
        for _, request in order[: self.setup.engine.max_num_seqs - self.num_running]:
            if self._num_blocks >= 0:
                needed = self._needed() + self._end_blocks(request)
                while needed + sum(self._paused.values()) - self._paused.get(request, 0) > self._num_blocks:
                    others = [other for other in self._paused if other != request]
                    if not others:
                        return
                    self._give_up(max(others, key=self._key))
            self._take_row(request)

    # ---- rows and blocks ----

    def _needed(self) -> int:
        return int(
            self._blocks_needed(
                self.rows.whole,
                self.num_running,
                self.plan.num_draft_tokens,
                self.plan.num_checks,
                self.setup.engine.block_size,
            )
        )

    def _end_blocks(self, request: int) -> int:
        """Blocks that a request may need in its next round."""
        workload = self.setup.workload
        saved = self._saved.get(request)
        length = int(workload.prompt_tokens[request]) if saved is None else int(saved[0][LENGTH])
        output = 0 if saved is None else int(saved[0][OUTPUT])
        window = self.plan.num_checks * (self.plan.num_draft_tokens + 1)
        return -(
            -(length - 1 + min(window, int(workload.max_tokens[request]) - output))
            // self.setup.engine.block_size
        )

    def make_room(self) -> None:
        """Blocks are short for the next round: who is paused gives up, who goes last first; then who runs."""
        if self._paused:
            self._give_up(max(self._paused, key=self._key))
            return
        if self._is_told:
            self._tell_all()
        victim = max(self.rows.whole[: self.num_running, REQUEST].tolist(), key=self._key)
        self._pause(victim)
        self._give_up(victim)

    def _take_row(self, request: int) -> None:
        row, workload, rows = self.num_running, self.setup.workload, self.rows
        self.num_running += 1
        self._row_of[request] = row
        self.waiting.remove(request)
        if request in self.new:
            self.new.remove(request)
        self._paused.pop(request, None)
        if request in self._moved:
            self._kept_bytes -= self._moved.pop(request)
            self.stall_s += (self.setup.costs.swap_s(int(self._saved[request][0][LENGTH]) - 1) or 0.0) / 2
        saved = self._saved.pop(request, None)
        rows.seeds[row], rows.shares[row] = workload.seeds[request], workload.shares[:, request]
        if saved is not None:
            rows.whole[row], rows.real[row] = saved
            return
        prompt, replay = int(workload.prompt_tokens[request]), int(workload.replays[request])
        first, last = (
            (workload.recorded.starts[replay], workload.recorded.starts[replay + 1])
            if replay >= 0
            else (-1, -1)
        )
        new = rows.whole[row]
        new[:] = 0
        new[REQUEST], new[LEFT], new[LENGTH], new[TARGET], new[MOST] = (
            request,
            prompt - 1 - workload.cached_tokens[request],
            prompt,
            workload.output_tokens[request],
            workload.max_tokens[request],
        )
        new[FIRST], new[LAST], new[DRAFTS], new[CHECKS] = first, last, -1, -1
        rows.real[row] = 0.0
        rows.real[row, FIRST_TOKEN] = math.nan

    def leave(self, row: int) -> None:
        self.num_running -= 1
        del self._row_of[int(self.rows.whole[row, REQUEST])]
        if row != self.num_running:
            for array in self.rows:
                array[row] = array[self.num_running]
            self._row_of[int(self.rows.whole[row, REQUEST])] = row

    def _pause(self, request: int) -> None:
        """Takes its row; it keeps the blocks of what is computed."""
        row = self._row_of[request]
        self.tell(row)
        whole = self.rows.whole[row].copy()
        self._saved[request] = whole, self.rows.real[row].copy()
        if self._num_blocks >= 0:
            self._paused[request] = -(-int(whole[LENGTH] - 1 - whole[LEFT]) // self.setup.engine.block_size)
        self.leave(row)
        self.counts.preemptions += 1
        self.waiting.append(request)

    def _give_up(self, request: int) -> None:
        """Takes the blocks of a paused request: its KV goes to host memory, or is computed again."""
        del self._paused[request]
        whole, costs = self._saved[request][0], self.setup.costs
        computed = int(whole[LENGTH] - 1 - whole[LEFT])
        num_bytes, swap_s = computed * self.setup.engine.kv_bytes_per_token, costs.swap_s(computed)
        if (
            swap_s is not None
            and swap_s < costs.prefill_s(computed)
            and self._kept_bytes + num_bytes <= self.setup.swap_bytes
        ):
            self._kept_bytes += num_bytes
            self._moved[request] = num_bytes
            self.stall_s += swap_s / 2
            self.counts.swaps += 1
        else:
            self.counts.recomputed += computed
            whole[LEFT] = whole[LENGTH] - 1

    # ---- what the policy is told ----

    def _tell_all(self) -> None:
        if self._is_told:
            for row in range(self.num_running):
                self.tell(row)

    def tell(self, row: int) -> None:
        """What a row has had since the policy was last told."""
        if not self._is_told:
            return
        whole, real = self.rows.whole[row], self.rows.real[row]
        rounds, tokens, drafted, accepted = whole[S_ROUNDS:].tolist()
        passes, seconds, prefill_passes, prefill_s = real[S_PASSES:].tolist()
        if prefill_passes > 0.0:
            self.policy.served(int(whole[REQUEST]), Service(0, 0, 0, 0, prefill_passes, prefill_s))
        if rounds:
            self.policy.served(
                int(whole[REQUEST]), Service(rounds, tokens, drafted, accepted, passes, seconds)
            )
        whole[S_ROUNDS:], real[S_PASSES:] = 0, 0.0
