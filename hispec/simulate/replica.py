"""One simulated engine: rows, waiting requests and KV blocks, as hispec/scheduling/scheduler.py handles them, and runs of rounds in between."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..control.choice import Choice, Control, FixedControl, Observation
from ..scheduling.lengths import LengthPredictor
from ..scheduling.policy import FirstComeFirstServed, Job, Key, Policy, Service
from .config import EngineSettings
from .costs import Costs
from .distributions import Floats, Ints
from .predictors import KnownLengths, prompt_of
from .rows import (
    CHECKS,
    DRAFTS,
    FINISHED,
    FIRST,
    FIRST_TOKEN,
    LAST,
    LEFT,
    LENGTH,
    MANY,
    MOST,
    NO_ROOM,
    NUM_REAL,
    NUM_TOTALS,
    NUM_WHOLE,
    OUTPUT,
    REQUEST,
    S_PASSES,
    S_ROUNDS,
    T_CONTEXT,
    T_ROUND_S,
    T_ROUNDS,
    T_TOKENS,
    TARGET,
    Kept,
    Rows,
    Tables,
)
from .workload import Workload

_ROUNDS_PER_RUN = 64  # of controllers that are told what rounds did, at most


@dataclass(frozen=True)
class Finished:
    request: int
    first_token_s: float
    finished_s: float
    replica: int


@dataclass
class Counts:
    """preemptions: rows taken; swaps: KV moved out; recomputed: positions of KV that were lost; rounds: by (route, K, R)"""

    preemptions: int = 0
    swaps: int = 0
    recomputed: int = 0
    rounds: dict[tuple[int, int, int], float] = field(default_factory=dict)
    totals: Floats = field(default_factory=lambda: np.zeros(NUM_TOTALS))


@dataclass(frozen=True)
class Setup:
    """What all replicas of a run share. tables: of costs and recorded rounds; swap_bytes: host memory of each; route_numbers: what the controller's
    routes are in the tables."""

    engine: EngineSettings
    costs: Costs
    workload: Workload
    tables: Tables
    swap_bytes: int
    route_numbers: tuple[int, ...]


class Replica:
    """Runs rounds ahead of the clock until something happens of itself; an arrival that may change that makes it run them again, up to then."""

    def __init__(self, index: int, setup: Setup, policy: Policy, control: Control, predictor: LengthPredictor) -> None:
        from .kernels import blocks_needed
        from .rounds import run_rounds

        self._blocks_needed, self._run_rounds = blocks_needed, run_rounds
        engine, workload = setup.engine, setup.workload
        self.index, self.setup, self.policy, self.control, self.predictor = index, setup, policy, control, predictor
        self.counts, self.waiting, self.num_running = Counts(), list[int](), 0
        self.end_s = math.inf  # of the run of rounds that was looked ahead; inf = idle
        rows, routes = engine.max_num_seqs, workload.shares.shape[0]
        self._now_s = self._stall_s = 0.0
        self._rows, self._ahead = (
            Rows(np.zeros((rows, NUM_WHOLE), np.int64), np.zeros((rows, NUM_REAL)), np.zeros(rows, np.uint64), np.zeros((rows, routes, 4)))
            for _ in range(2)
        )
        self._is_told = not isinstance(policy, FirstComeFirstServed)
        self._is_fixed = isinstance(control, FixedControl)
        most_checks = max((route.most_checks for route in control.routes), default=1)
        entries = 1 if self._is_fixed else rows * _ROUNDS_PER_RUN
        self._kept = Kept(not self._is_fixed, np.zeros((entries * most_checks, 5), np.int64), np.zeros((entries, 3), np.int64), np.zeros(2, np.int64))
        self._totals, self._reason = np.zeros(NUM_TOTALS), NO_ROOM
        self._order = np.arange(rows)
        self._num_blocks = -1 if engine.num_kv_tokens is None else engine.num_kv_tokens // engine.block_size
        self._row_of: dict[int, int] = {}
        self._paused: dict[int, int] = {}  # blocks of who has some without a row
        self._saved: dict[int, tuple[Ints, Floats]] = {}  # row of who had one before
        self._kept_bytes, self._moved = 0, dict[int, int]()  # bytes in host memory, by request
        self._new: list[int] = []
        self._rounds_since_review = 0
        self._predict: dict[int, Callable[[int], float]] = {}
        self._choice, self._max_rounds = control.choose((), 0) if self._is_fixed else Choice(), MANY

    # ---- events ----

    def arrive(self, request: int, now_s: float) -> float:
        """A request comes -> how many tokens it is expected to take, prompt included."""
        workload, prompt = self.setup.workload, prompt_of(self.setup.workload, request)
        if isinstance(self.predictor, KnownLengths):
            self.predictor.expect(request)
        max_tokens = int(workload.max_tokens[request])
        predict = self.predictor.predictor(prompt, max_tokens)
        self.policy.add(Job(request, now_s, len(prompt), max_tokens, predict))
        self._predict[request] = predict
        self.waiting.append(request)
        self._new.append(request)
        if self.end_s == math.inf or now_s <= self._now_s:  # idle, or it comes as the run begins
            self._now_s = max(self._now_s, now_s)
            self._begin()
        elif self.num_running < self.setup.engine.max_num_seqs or self.policy.preempts:
            self._look_ahead(now_s)
        return len(prompt) + predict(0)

    def advance(self) -> list[Finished]:
        """Takes the run of rounds that was looked ahead for done, and looks ahead again -> who has finished with it."""
        self._rows, self._ahead, self._now_s = self._ahead, self._rows, self.end_s
        self._stall_s = 0.0
        totals, choice = self._totals, self._choice
        self.counts.totals += totals
        key = (-1 if choice.route is None else self._route_number, choice.plan.num_draft_tokens, choice.plan.num_checks)
        self.counts.rounds[key] = self.counts.rounds.get(key, 0.0) + totals[T_ROUNDS]
        self._rounds_since_review += int(totals[T_ROUNDS])
        if not self._is_fixed and totals[T_ROUNDS]:
            self._observe()
        finished = self._finish()
        if self.num_running or self.waiting:
            self._begin()
        else:
            self.end_s = math.inf
        return finished

    def predicted(self, request: int, output: int) -> float:
        """Length of the output of a request that is here, and has so many tokens."""
        return self._predict[request](output)

    def progress_of(self, request: int) -> tuple[int, int]:
        """Of a request that is here: tokens that it has, positions that are to be computed before it gets more."""
        row = self._row_of.get(request)
        if row is not None:
            return int(self._rows.whole[row, OUTPUT]), int(self._rows.whole[row, LEFT])
        if request in self._saved:
            saved = self._saved[request][0]
            return int(saved[OUTPUT]), int(saved[LEFT])
        workload = self.setup.workload
        return 0, int(workload.prompt_tokens[request] - 1 - workload.cached_tokens[request])

    def _observe(self) -> None:
        totals, kept = self._totals, self._kept
        rounds, (num_cycles, num_verified) = int(totals[T_ROUNDS]), kept.num
        cycles, verified = kept.cycles[:num_cycles].T.copy(), kept.verified[:num_verified].T.copy()
        whole = self._rows.whole[: self.num_running]
        self.control.observe(
            Observation(
                self._choice,
                int((whole[:, LEFT] == 0).sum()),
                totals[T_CONTEXT] / rounds,
                totals[T_ROUND_S],
                int(totals[T_TOKENS]),
                rounds,
                *cycles,
                *verified,
            )
        )

    def _finish(self) -> list[Finished]:
        finished: list[Finished] = []
        if self._reason != FINISHED:
            return finished
        done = np.flatnonzero(self._rows.whole[: self.num_running, OUTPUT] >= self._rows.whole[: self.num_running, TARGET])
        for row in done[::-1]:
            request, num_output = int(self._rows.whole[row, REQUEST]), int(self._rows.whole[row, OUTPUT])
            self._tell(row)
            finished.append(Finished(request, float(self._rows.real[row, FIRST_TOKEN]), self._now_s, self.index))
            self._leave(row)
            self.policy.remove(request)
            self.control.forget(request)
            self.predictor.finished(prompt_of(self.setup.workload, request), num_output)
            del self._predict[request]
        return finished

    # ---- a run of rounds ----

    def _begin(self) -> None:
        """Decides who runs and what rounds do, and looks ahead."""
        if self.waiting:
            self._tell_all()
            if self._is_review_due:
                self._review()
            self._admit()
        self._choose()
        self._look_ahead(math.inf)
        while self._reason == NO_ROOM and not self._totals[T_ROUNDS] and self.end_s == self._start_s:
            self._make_room()
            self._choose()
            self._look_ahead(math.inf)

    def _choose(self) -> None:
        whole = self._rows.whole[: self.num_running]
        if not self._is_fixed:
            self._choice = self.control.choose(whole[:, REQUEST].tolist(), int(whole[:, LENGTH].sum()))
            for column, own in ((DRAFTS, self._choice.most_drafts), (CHECKS, self._choice.most_checks)):
                whole[:, column] = [own.get(request, -1) for request in whole[:, REQUEST].tolist()] if own else -1
        if self.num_running == 1:
            self._order[0] = 0
        elif self._is_told and np.count_nonzero(whole[:, LEFT]) > 1:
            keys = [self._key(int(request)) for request in whole[:, REQUEST]]
            self._order[: self.num_running] = sorted(range(self.num_running), key=keys.__getitem__)
        else:
            self._order[: self.num_running] = np.argsort(whole[:, REQUEST])
        self._max_rounds = min(self.control.rounds_left, _ROUNDS_PER_RUN) if self._kept.is_kept else MANY
        if self.policy.preempts and self.waiting:
            self._max_rounds = min(self._max_rounds, max(1, self.policy.review_rounds - self._rounds_since_review))

    @property
    def _start_s(self) -> float:
        return self._now_s + self._stall_s

    @property
    def _route_number(self) -> int:
        return 0 if self._choice.route is None else self.setup.route_numbers[self._choice.route]

    def _look_ahead(self, until_s: float) -> None:
        engine, choice, num = self.setup.engine, self._choice, self.num_running
        for mine, ahead in zip(self._rows, self._ahead, strict=True):
            ahead[:num] = mine[:num]
        self._kept.num[:] = 0
        self._totals = np.zeros(NUM_TOTALS)
        blocks = -1 if self._num_blocks < 0 else self._num_blocks - sum(self._paused.values())
        self.end_s, self._reason = self._run_rounds(
            self._ahead, num, self._order, self._route_number, choice.plan.num_draft_tokens, choice.plan.num_checks, self.setup.tables,
            engine.max_prefill_tokens, engine.block_size, blocks, self._start_s, until_s, self._max_rounds, self._kept, self._totals,
        )  # fmt: skip

    # ---- order ----

    def _key(self, request: int) -> Key:
        return self.policy.key(request, self._now_s)

    @property
    def _is_review_due(self) -> bool:
        return self.policy.preempts and (bool(self._new) or self._rounds_since_review >= self.policy.review_rounds)

    def _review(self) -> None:
        """As Scheduler._review."""
        is_regular = self._rounds_since_review >= self.policy.review_rounds
        if is_regular:
            self._rounds_since_review = 0
        may_displace, self._new = self.waiting if is_regular else self._new, []
        is_limited, size = self._num_blocks >= 0, self.setup.engine.block_size
        held = {request: -(-int(self._rows.whole[row, LENGTH] - 1) // size) if is_limited else 0 for request, row in self._row_of.items()}
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
        order = sorted((self._key(request), request) for request in self.waiting) if len(self.waiting) > 1 else [((), self.waiting[0])]
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

    def _plan_size(self) -> tuple[int, int]:
        return self._choice.plan.num_draft_tokens, self._choice.plan.num_checks

    def _needed(self) -> int:
        return int(self._blocks_needed(self._rows.whole, self.num_running, *self._plan_size(), self.setup.engine.block_size))

    def _end_blocks(self, request: int) -> int:
        """Blocks that a request may need in its next round."""
        workload = self.setup.workload
        saved = self._saved.get(request)
        length = int(workload.prompt_tokens[request]) if saved is None else int(saved[0][LENGTH])
        output = 0 if saved is None else int(saved[0][OUTPUT])
        num_drafts, num_checks = self._plan_size()
        return -(-(length - 1 + min(num_checks * (num_drafts + 1), int(workload.max_tokens[request]) - output)) // self.setup.engine.block_size)

    def _make_room(self) -> None:
        """Blocks are short for the next round: who is paused gives up, who goes last first; then who runs."""
        if self._paused:
            self._give_up(max(self._paused, key=self._key))
            return
        if self._is_told:
            self._tell_all()
        victim = max(self._rows.whole[: self.num_running, REQUEST].tolist(), key=self._key)
        self._pause(victim)
        self._give_up(victim)

    def _take_row(self, request: int) -> None:
        row, workload, rows = self.num_running, self.setup.workload, self._rows
        self.num_running += 1
        self._row_of[request] = row
        self.waiting.remove(request)
        if request in self._new:
            self._new.remove(request)
        self._paused.pop(request, None)
        if request in self._moved:
            self._kept_bytes -= self._moved.pop(request)
            self._stall_s += (self.setup.costs.swap_s(int(self._saved[request][0][LENGTH]) - 1) or 0.0) / 2
        saved = self._saved.pop(request, None)
        rows.seeds[row], rows.shares[row] = workload.seeds[request], workload.shares[:, request]
        if saved is not None:
            rows.whole[row], rows.real[row] = saved
            return
        prompt, replay = int(workload.prompt_tokens[request]), int(workload.replays[request])
        first, last = (workload.recorded.starts[replay], workload.recorded.starts[replay + 1]) if replay >= 0 else (-1, -1)
        new = rows.whole[row]
        new[:] = 0
        new[REQUEST], new[LEFT], new[LENGTH], new[TARGET], new[MOST] = (
            request, prompt - 1 - workload.cached_tokens[request], prompt, workload.output_tokens[request], workload.max_tokens[request],
        )  # fmt: skip
        new[FIRST], new[LAST], new[DRAFTS], new[CHECKS] = first, last, -1, -1
        rows.real[row] = 0.0
        rows.real[row, FIRST_TOKEN] = math.nan

    def _leave(self, row: int) -> None:
        self.num_running -= 1
        del self._row_of[int(self._rows.whole[row, REQUEST])]
        if row != self.num_running:
            for array in self._rows:
                array[row] = array[self.num_running]
            self._row_of[int(self._rows.whole[row, REQUEST])] = row

    def _pause(self, request: int) -> None:
        """Takes its row; it keeps the blocks of what is computed."""
        row = self._row_of[request]
        self._tell(row)
        whole = self._rows.whole[row].copy()
        self._saved[request] = whole, self._rows.real[row].copy()
        if self._num_blocks >= 0:
            self._paused[request] = -(-int(whole[LENGTH] - 1 - whole[LEFT]) // self.setup.engine.block_size)
        self._leave(row)
        self.counts.preemptions += 1
        self.waiting.append(request)

    def _give_up(self, request: int) -> None:
        """Takes the blocks of a paused request: its KV goes to host memory, or is computed again."""
        del self._paused[request]
        whole, costs = self._saved[request][0], self.setup.costs
        computed = int(whole[LENGTH] - 1 - whole[LEFT])
        num_bytes, swap_s = computed * self.setup.engine.kv_bytes_per_token, costs.swap_s(computed)
        if swap_s is not None and swap_s < costs.prefill_s(computed) and self._kept_bytes + num_bytes <= self.setup.swap_bytes:
            self._kept_bytes += num_bytes
            self._moved[request] = num_bytes
            self._stall_s += swap_s / 2
            self.counts.swaps += 1
        else:
            self.counts.recomputed += computed
            whole[LEFT] = whole[LENGTH] - 1

    # ---- what the policy is told ----

    def _tell_all(self) -> None:
        if self._is_told:
            for row in range(self.num_running):
                self._tell(row)

    def _tell(self, row: int) -> None:
        """What a row has had since the policy was last told."""
        if not self._is_told:
            return
        whole, real = self._rows.whole[row], self._rows.real[row]
        rounds, tokens, drafted, accepted = whole[S_ROUNDS:].tolist()
        passes, seconds, prefill_passes, prefill_s = real[S_PASSES:].tolist()
        if prefill_passes > 0.0:
            self.policy.served(int(whole[REQUEST]), Service(0, 0, 0, 0, prefill_passes, prefill_s))
        if rounds:
            self.policy.served(int(whole[REQUEST]), Service(rounds, tokens, drafted, accepted, passes, seconds))
        whole[S_ROUNDS:], real[S_PASSES:] = 0, 0.0

