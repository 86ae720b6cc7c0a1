"""One simulated engine: runs of rounds between the events that may change its rows or its plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..control.choice import Choice, Control, FixedControl, Observation
from ..scheduling.lengths import LengthPredictor
from ..scheduling.policy import Job, Policy
from .batch_state import BatchState, Setup
from .predictors import KnownLengths, prompt_of
from .row_state import FINISHED, MANY, NO_ROOM, T_CONTEXT, T_ROUND_S, T_ROUNDS, T_TOKENS, RoundPlan, make_log

_ROUNDS_PER_RUN = 64  # at most, if the controller observes them


class Finished(NamedTuple):
    request: int
    first_token_s: float
    finished_s: float


class Replica(BatchState):
    """Runs rounds ahead of the clock until something happens by itself; an arrival that may change what they
    do makes it run them again, up to then."""

    def __init__(self, setup: Setup, policy: Policy, control: Control, predictor: LengthPredictor) -> None:
        super().__init__(setup, policy)
        from .rounds_numba import run_rounds

        self.control, self.predictor = control, predictor
        self.end_s = math.inf  # of the run that was looked ahead; inf = idle
        self._run_rounds, self._ahead = run_rounds, np.zeros_like(self.rows)
        self._is_fixed = isinstance(control, FixedControl)
        most_checks = max((route.most_checks for route in control.routes), default=1)
        num_verified = 0 if self._is_fixed else setup.engine.max_num_seqs * _ROUNDS_PER_RUN
        self._log, self._reason = make_log(num_verified * most_checks, num_verified), NO_ROOM
        self._order = np.arange(setup.engine.max_num_seqs)
        self._predict: dict[int, Callable[[int], float]] = {}
        self._choice, self._max_rounds = Choice(), MANY
        if self._is_fixed:
            self._set_choice(control.choose((), 0))

    # ---- events ----

    def arrive(self, request: int, now_s: float) -> float:
        """Adds a request -> how many tokens it is expected to take, prompt included."""
        workload, prompt = self.setup.workload, prompt_of(self.setup.workload, request)
        if isinstance(self.predictor, KnownLengths):
            self.predictor.expect(request)
        max_tokens = int(workload.max_tokens[request])
        predict = self.predictor.predictor(prompt, max_tokens)
        self.policy.add(Job(request, now_s, len(prompt), max_tokens, predict))
        self._predict[request] = predict
        self.add(request)
        if self.end_s == math.inf or now_s <= self.now_s:  # idle, or it comes as the run begins
            self.now_s = max(self.now_s, now_s)
            self._begin()
        elif self.num_running < self.setup.engine.max_num_seqs or self.policy.preempts:
            self._look_ahead(now_s)
        return len(prompt) + predict(0)

    def advance(self) -> list[Finished]:
        """Makes the run that was looked ahead the present, and looks ahead again -> requests that finished
        in it."""
        self.rows, self._ahead, self.now_s = self._ahead, self.rows, self.end_s
        self.counts.stall_s += self.stall_s
        self.stall_s = 0.0
        totals, rounds = self._log.totals, self._log.totals[T_ROUNDS]
        self.counts.totals += totals
        self.counts.rounds[self.plan] = self.counts.rounds.get(self.plan, 0.0) + rounds
        self.rounds_since_review += int(rounds)
        if not self._is_fixed and rounds:
            self._observe(int(rounds))
        finished = self._finish() if self._reason == FINISHED else []
        if self.num_running or self.waiting:
            self._begin()
        else:
            self.end_s = math.inf
        return finished

    def predicted(self, request: int, output: int) -> float:
        """Predicted length of the output of an unfinished request that has so many tokens."""
        return self._predict[request](output)

    def _observe(self, rounds: int) -> None:
        log = self._log
        self.control.observe(
            Observation(
                self._choice,
                int((self.rows["prefill_left"][: self.num_running] == 0).sum()),
                log.totals[T_CONTEXT] / rounds,
                log.totals[T_ROUND_S],
                int(log.totals[T_TOKENS]),
                rounds,
                *log.cycles[: log.num[0]].T.copy(),
                *log.verified[: log.num[1]].T.copy(),
            )
        )

    def _finish(self) -> list[Finished]:
        finished = []
        rows = self.rows[: self.num_running]
        for at in np.flatnonzero(rows["output"] >= rows["target"])[::-1]:
            request, num_output = int(rows["request"][at]), int(rows["output"][at])
            self.report_service(slice(at, at + 1))
            finished.append(Finished(request, float(rows["first_token_s"][at]), self.now_s))
            self.leave_row(at)
            self.policy.remove(request)
            self.control.forget(request)
            self.predictor.finished(prompt_of(self.setup.workload, request), num_output)
            del self._predict[request]
        return finished

    # ---- a run of rounds ----

    def _begin(self) -> None:
        """Decides which requests run by which plan, and looks ahead."""
        self.schedule()
        self._choose()
        self._look_ahead(math.inf)
        while self._reason == NO_ROOM and not self._log.totals[T_ROUNDS] and self.end_s == self._start_s:
            self.make_room()
            self._choose()
            self._look_ahead(math.inf)

    def _choose(self) -> None:
        if not self._is_fixed:
            rows = self.rows[: self.num_running]
            requests = rows["request"].tolist()
            choice = self.control.choose(requests, int(rows["length"].sum()))
            self._set_choice(choice)
            is_one = choice.usual is None and not (choice.most_drafts or choice.most_checks)
            for name, of in (("num_drafts", choice.num_drafts), ("num_checks", choice.num_checks)):
                rows[name] = -1 if is_one else [of(request) for request in requests]
        self._order[: self.num_running] = self.prefill_order()
        self._max_rounds = MANY if self._is_fixed else min(self.control.rounds_left, _ROUNDS_PER_RUN)
        if self.policy.preempts and self.waiting:
            until_review = max(1, self.policy.review_rounds - self.rounds_since_review)
            self._max_rounds = min(self._max_rounds, until_review)

    def _set_choice(self, choice: Choice) -> None:
        route = -1 if choice.route is None else self.setup.route_numbers[choice.route]
        self._choice = choice
        self.plan = RoundPlan(route, choice.plan.num_draft_tokens, choice.plan.num_checks)

    @property
    def _start_s(self) -> float:
        return self.now_s + self.stall_s

    def _look_ahead(self, until_s: float) -> None:
        num, log = self.num_running, self._log
        self._ahead[:num] = self.rows[:num]
        log.num[:], log.totals[:] = 0, 0.0
        self.end_s, self._reason = self._run_rounds(
            self.setup.tables,
            self._ahead[:num],
            self._order[:num],
            self.plan,
            self.num_blocks,
            self._start_s,
            until_s,
            self._max_rounds,
            log,
        )
