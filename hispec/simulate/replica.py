"""One simulated engine: runs of rounds between the events that may change who is in them, or what they do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..control.choice import Choice, Control, FixedControl, Observation
from ..scheduling.lengths import LengthPredictor
from ..scheduling.policy import Job, Policy
from .batch_state import Seats, Setup, empty_rows
from .predictors import KnownLengths, prompt_of
from .row_columns import (
    CHECKS,
    DRAFTS,
    FINISHED,
    FIRST_TOKEN,
    LEFT,
    LENGTH,
    MANY,
    NO_ROOM,
    NUM_TOTALS,
    OUTPUT,
    REQUEST,
    T_CONTEXT,
    T_ROUND_S,
    T_ROUNDS,
    T_TOKENS,
    TARGET,
    Kept,
)

_ROUNDS_PER_RUN = 64  # of controllers that are told what rounds did, at most


@dataclass(frozen=True)
class Finished:
    request: int
    first_token_s: float
    finished_s: float
    replica: int


class Replica(Seats):
    """Runs rounds ahead of the clock until something happens of itself; an arrival that may change that makes
    it run them again, up to then."""

    def __init__(
        self, index: int, setup: Setup, policy: Policy, control: Control, predictor: LengthPredictor
    ) -> None:
        super().__init__(setup, policy)
        from .rounds_numba import run_rounds

        self.index, self.control, self.predictor = index, control, predictor
        self.end_s = math.inf  # of the run of rounds that was looked ahead; inf = idle
        self._run_rounds, self._ahead = (
            run_rounds,
            empty_rows(setup.engine.max_num_seqs, setup.workload.shares.shape[0]),
        )
        self._is_fixed = isinstance(control, FixedControl)
        most_checks = max((route.most_checks for route in control.routes), default=1)
        entries = 1 if self._is_fixed else setup.engine.max_num_seqs * _ROUNDS_PER_RUN
        self._kept = Kept(
            not self._is_fixed,
            np.zeros((entries * most_checks, 5), np.int64),
            np.zeros((entries, 3), np.int64),
            np.zeros(2, np.int64),
        )
        self._totals, self._reason = np.zeros(NUM_TOTALS), NO_ROOM
        self._order = np.arange(setup.engine.max_num_seqs)
        self._predict: dict[int, Callable[[int], float]] = {}
        self._choice, self._max_rounds = control.choose((), 0) if self._is_fixed else Choice(), MANY
        self.plan = self._choice.plan

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
        self.new.append(request)
        if self.end_s == math.inf or now_s <= self.now_s:  # idle, or it comes as the run begins
            self.now_s = max(self.now_s, now_s)
            self._begin()
        elif self.num_running < self.setup.engine.max_num_seqs or self.policy.preempts:
            self._look_ahead(now_s)
        return len(prompt) + predict(0)

    def advance(self) -> list[Finished]:
        """Takes the run of rounds that was looked ahead for done, and looks ahead again -> who has finished
        with it."""
        self.rows, self._ahead, self.now_s = self._ahead, self.rows, self.end_s
        self.stall_s = 0.0
        totals, choice = self._totals, self._choice
        self.counts.totals += totals
        key = (
            -1 if choice.route is None else self._route_number,
            choice.plan.num_draft_tokens,
            choice.plan.num_checks,
        )
        self.counts.rounds[key] = self.counts.rounds.get(key, 0.0) + totals[T_ROUNDS]
        self.rounds_since_review += int(totals[T_ROUNDS])
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

    def _observe(self) -> None:
        totals, kept = self._totals, self._kept
        rounds, (num_cycles, num_verified) = int(totals[T_ROUNDS]), kept.num
        cycles, verified = kept.cycles[:num_cycles].T.copy(), kept.verified[:num_verified].T.copy()
        whole = self.rows.whole[: self.num_running]
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
        done = np.flatnonzero(
            self.rows.whole[: self.num_running, OUTPUT] >= self.rows.whole[: self.num_running, TARGET]
        )
        for row in done[::-1]:
            request, num_output = int(self.rows.whole[row, REQUEST]), int(self.rows.whole[row, OUTPUT])
            self.tell(row)
            finished.append(
                Finished(request, float(self.rows.real[row, FIRST_TOKEN]), self.now_s, self.index)
            )
            self.leave(row)
            self.policy.remove(request)
            self.control.forget(request)
            self.predictor.finished(prompt_of(self.setup.workload, request), num_output)
            del self._predict[request]
        return finished

    # ---- a run of rounds ----

    def _begin(self) -> None:
        """Decides who runs and what rounds do, and looks ahead."""
        self.settle()
        self._choose()
        self._look_ahead(math.inf)
        while self._reason == NO_ROOM and not self._totals[T_ROUNDS] and self.end_s == self._start_s:
            self.make_room()
            self._choose()
            self._look_ahead(math.inf)

    def _choose(self) -> None:
        whole = self.rows.whole[: self.num_running]
        if not self._is_fixed:
            self._choice = self.control.choose(whole[:, REQUEST].tolist(), int(whole[:, LENGTH].sum()))
            for column, own in ((DRAFTS, self._choice.most_drafts), (CHECKS, self._choice.most_checks)):
                whole[:, column] = (
                    [own.get(request, -1) for request in whole[:, REQUEST].tolist()] if own else -1
                )
        self.plan = self._choice.plan
        self._order[: self.num_running] = self.order()
        self._max_rounds = min(self.control.rounds_left, _ROUNDS_PER_RUN) if self._kept.is_kept else MANY
        if self.policy.preempts and self.waiting:
            self._max_rounds = min(
                self._max_rounds, max(1, self.policy.review_rounds - self.rounds_since_review)
            )

    @property
    def _start_s(self) -> float:
        return self.now_s + self.stall_s

    @property
    def _route_number(self) -> int:
        return 0 if self._choice.route is None else self.setup.route_numbers[self._choice.route]

    def _look_ahead(self, until_s: float) -> None:
        engine, choice, num = self.setup.engine, self._choice, self.num_running
        for mine, ahead in zip(self.rows, self._ahead, strict=True):
            ahead[:num] = mine[:num]
        self._kept.num[:] = 0
        self._totals = np.zeros(NUM_TOTALS)
        self.end_s, self._reason = self._run_rounds(
            self._ahead,
            num,
            self._order,
            self._route_number,
            choice.plan.num_draft_tokens,
            choice.plan.num_checks,
            self.setup.tables,
            engine.max_prefill_tokens,
            engine.block_size,
            self.num_blocks,
            self._start_s,
            until_s,
            self._max_rounds,
            self._kept,
            self._totals,
        )
