"""Rounds given up to learn: probes of routes that were not run of late, at most a share of all rounds; and
rounds that read shadows."""

from __future__ import annotations

import numpy as np

from ..config import GoodputConfig
from .choice import Ints
from .goodput import Bools
from .hazards import Floats

_MAX_BUDGET = 64.0  # rounds that may be saved up
_START_PROBES, _START_PROBES_PER_ROUTE = 6, 1  # probes at the start, outside of the budget
_ROW_ROUNDS, _LEAST_ROUNDS, _MOST_ROUNDS = 16, 2, 8  # of a probe: fewer rounds where there are many rows
# All in windows: before a route may be probed again; until it is probed whatever it promises; for how long a
# route whose drafter failed is barred, the first time (until it runs again, each further time twice as
# long); between searches that fail.
_AGAIN, _OVERDUE, _FIRST_BAR, _SEARCH_AGAIN = 0.125, 4.0, 0.25, 0.0625


class Probes:
    """Which route to probe, and when: one that might be better than the present plan, or that was not run for
    long. The budget earns `probe_share` per round; a probe costs its time in rounds of the present plan.
    Plain decoding is the last route. At the start the most promising routes are probed for free."""

    def __init__(self, num_routes: int, config: GoodputConfig) -> None:
        self._share, self._window = config.probe_share, config.window
        self._budget, self._search_at = 0.0, 0.0
        self._prefer_overdue = False  # alternates: overdue routes, promising ones
        self._tried_at = np.full(num_routes + 1, -np.inf)
        self._barred_until = np.full(num_routes + 1, -np.inf)
        self._bar = np.full(num_routes + 1, _FIRST_BAR * config.window)
        has_start = self._share > 0.0 and num_routes > 0
        self._left_at_start = _START_PROBES + _START_PROBES_PER_ROUTE * num_routes if has_start else 0
        self.is_start = has_start  # whether rounds are not counted yet

    @property
    def may_run_untried(self) -> bool:
        """Whether routes may be chosen without a probe before: without a budget there is no other way."""
        return self._share == 0.0

    @property
    def was_tried(self) -> Bools:
        """[routes + 1]"""
        return np.isfinite(self._tried_at)

    def record_run(self, route: int | None, round_index: int) -> None:
        at = -1 if route is None else route
        self._tried_at[at], self._bar[at] = round_index, _FIRST_BAR * self._window

    def record_nothing(self, route: int, round_index: int) -> None:
        """A probe of the route has run plain rounds: no row could speculate, or its drafter failed. Not a
        try, but for a while there is no other."""
        until = round_index + _AGAIN * self._window
        self._barred_until[route] = max(self._barred_until[route], until)

    def record_failure(self, route: int, round_index: int) -> None:
        """The route's drafter failed: bars the route for a while. Not a try: no round of it has run."""
        self._barred_until[route] = round_index + self._bar[route]
        self._bar[route] *= 2.0

    def may_run(self, round_index: int) -> Bools:
        """[routes + 1]: which are not barred."""
        return self._barred_until <= round_index

    def earn(self, rounds: int) -> None:
        if not self.is_start:
            self._budget = min(self._budget + self._share * rounds, _MAX_BUDGET)

    def spend(self, rounds: int, cost: float) -> None:
        """Pays for rounds of a probe; cost: time of one, in rounds of the present plan. No debt is larger
        than all that can be saved: a process that was stopped meanwhile says nothing of the plan."""
        if not self.is_start:
            self._budget = max(self._budget - rounds * max(1.0, cost), -_MAX_BUDGET)

    @staticmethod
    def num_rounds(rows: int, cost: float) -> int:
        """Rounds of a probe, each of which takes `cost` rounds of the present plan."""
        rounds = min(max(-(-_ROW_ROUNDS // rows), _LEAST_ROUNDS), _MOST_ROUNDS)
        return max(1, int(rounds / max(cost, 1.0)))

    def is_due(self, rows: int, round_index: int) -> bool:
        """Whether to search for a route to probe."""
        if self._left_at_start:
            return True
        self.is_start = False
        return round_index >= self._search_at and self._affords(self.num_rounds(rows, 1.0))

    def pick(
        self,
        route_of: Ints,
        optimistic: Floats,
        cost: Floats,
        present: int | None,
        bar: float,
        rows: int,
        round_index: int,
    ) -> int | None:
        """The candidate plan to probe, or None.

        route_of, optimistic, cost   [candidates] route; upper confidence bound of tokens/s; time of a round,
                                     in rounds of the present plan
        present, bar                 route of the present plan, and its tokens/s
        """
        at_start, age = self._left_at_start > 0, round_index - self._tried_at
        age[-1 if present is None else present] = -1.0
        age[~self.may_run(round_index)] = -1.0
        least = 0.0 if at_start else _AGAIN * self._window
        index = int(np.where((age >= least)[route_of], optimistic, 0.0).argmax())
        oldest = int(age.argmax())
        is_promising = age[route_of[index]] >= least and optimistic[index] > bar
        is_overdue = not at_start and age[oldest] >= _OVERDUE * self._window
        if is_overdue and (self._prefer_overdue or not is_promising):
            index = int(np.where(route_of == oldest, optimistic, 0.0).argmax())
        price = max(1.0, float(cost[index]))
        affords = at_start or self._affords(price * self.num_rounds(rows, price))
        if not (is_promising or is_overdue) or not affords:
            self._left_at_start, self._search_at = 0, round_index + _SEARCH_AGAIN * self._window
            return None
        self._left_at_start -= at_start
        self._prefer_overdue = not self._prefer_overdue
        return index

    def _affords(self, rounds: float) -> bool:
        return self._share > 0.0 and self._budget >= min(rounds, _MAX_BUDGET)


class ShadowSchedule:
    """When rounds read shadows: every 1 / share rounds."""

    def __init__(self, share: float, phase: float) -> None:
        """phase: 0 to 1, where in the first period the first one comes."""
        self._spacing = float(-(-1.0 // share)) if share > 0.0 else np.inf
        self._next = (1.0 + phase) * self._spacing if share < 1.0 else 0.0

    def rounds_left(self, round_index: int) -> float:
        """Rounds until the next one."""
        return self._next - round_index

    def advance(self, round_index: int) -> None:
        """A round reads shadows now."""
        self._next = round_index + self._spacing
