"""Rounds that are given up to learn: of routes that were not run of late, at most a share of all."""

from __future__ import annotations

import numpy as np

from ..config import GoodputConfig
from .choice import Ints
from .goodput import Bools
from .hazards import Floats

_MOST_SAVED = 64.0  # rounds
_LEAST_AT_START, _MORE_AT_START = 6, 1  # probes, and by route
_ROW_ROUNDS, _LEAST_ROUNDS, _MOST_ROUNDS = 16, 2, 8  # a probe's: fewer rounds where there are many rows
_AGAIN, _IN_TURN = (
    0.125,
    4.0,
)  # windows: since a route was run, before it may be probed again; until it is, whatever it promises
_FIRST_BAR = 0.25  # windows that a route is left alone whose drafter failed; each further time twice as long
_LOOK_AGAIN = 0.0625  # windows after nothing was found


class Probes:
    """Which routes to try, and when: one that might be better than the present plan, or that was not run for
    long. A round that takes longer than those of the present plan counts as so many. Plain decoding is the
    last of the routes. At the start what is most promising is tried, a few rounds each and perhaps again,
    before the share counts."""

    def __init__(self, num_routes: int, config: GoodputConfig) -> None:
        self._share, self._window = config.probe_share, config.window
        self._saved, self._look_at = 0.0, 0.0
        self._is_turn = (
            False  # whether what was not run for long goes before what promises most: every other time
        )
        self._tried_at = np.full(num_routes + 1, -np.inf)
        self._barred_until, self._bar = (
            np.full(num_routes + 1, -np.inf),
            np.full(num_routes + 1, _FIRST_BAR * config.window),
        )
        self._left_at_start = (
            _LEAST_AT_START + _MORE_AT_START * num_routes if self._share > 0.0 and num_routes else 0
        )
        self.is_start = self._left_at_start > 0  # whether rounds are not yet counted

    @property
    def may_run_untried(self) -> bool:
        """Whether there is no other way to get to know a route than to take it."""
        return self._share == 0.0

    @property
    def was_tried(self) -> Floats:
        """[routes + 1] bool"""
        return np.isfinite(self._tried_at)

    def ran(self, route: int | None, now: int) -> None:
        self._tried_at[-1 if route is None else route] = now

    def failed(self, route: int, now: int) -> None:
        """Its drafter did: leave it alone for a while."""
        self._tried_at[route], self._barred_until[route] = now, now + self._bar[route]
        self._bar[route] *= 2.0

    def may_run(self, now: int) -> Bools:
        """[routes + 1]: which do not fail, as far as is known."""
        return self._barred_until <= now

    def earn(self, rounds: int) -> None:
        if not self.is_start:
            self._saved = min(self._saved + self._share * rounds, _MOST_SAVED)

    def spend(self, rounds: int, cost: float) -> None:
        """Rounds of a probe were run, which took so many times as long as others."""
        if not self.is_start:
            self._saved -= rounds * max(1.0, cost)

    @staticmethod
    def rounds(rows: int, cost: float) -> int:
        """Of a probe whose rounds take so many times as long as others."""
        rounds = min(max(-(-_ROW_ROUNDS // rows), _LEAST_ROUNDS), _MOST_ROUNDS)
        return max(1, int(rounds / max(cost, 1.0)))

    def is_due(self, rows: int, now: int) -> bool:
        """Whether it is time to look for something to try."""
        if self._left_at_start:
            return True
        self.is_start = False
        return now >= self._look_at and self._allows(self.rounds(rows, 1.0))

    def pick(
        self,
        route_of: Ints,
        hopeful: Floats,
        cost: Floats,
        present: int | None,
        bar: float,
        rows: int,
        now: int,
    ) -> int | None:
        """One of the candidates, by their routes, what might be hoped of them at best, and what their rounds
        cost in rounds of the present plan, whose route, and what it promises, is given."""
        at_start, age = self._left_at_start > 0, now - self._tried_at
        age[-1 if present is None else present] = -1.0
        age[~self.may_run(now)] = -1.0
        least = 0.0 if at_start else _AGAIN * self._window
        index, oldest = int(np.where((age >= least)[route_of], hopeful, 0.0).argmax()), int(age.argmax())
        promises = age[route_of[index]] >= least and hopeful[index] > bar
        is_overdue = not at_start and age[oldest] >= _IN_TURN * self._window
        if not promises and not is_overdue:
            self._found_nothing(now)
            return None
        if is_overdue and (self._is_turn or not promises):
            index = int(np.where(route_of == oldest, hopeful, 0.0).argmax())
        price = max(1.0, float(cost[index]))
        if at_start:
            self._left_at_start -= 1
        elif not self._allows(price * self.rounds(rows, price)):
            self._found_nothing(now)
            return None
        self._is_turn = not self._is_turn
        return index

    def _allows(self, rounds: float) -> bool:
        return self._share > 0.0 and self._saved >= min(rounds, _MOST_SAVED)

    def _found_nothing(self, now: int) -> None:
        self._left_at_start, self._look_at = 0, now + _LOOK_AGAIN * self._window


class Evenly:
    """One round in so many, at most a share of all."""

    def __init__(self, share: float, phase: float) -> None:
        """phase: 0 to 1, where in its turn the first one comes."""
        self._spacing = float(-(-1.0 // share)) if share > 0.0 else np.inf
        self._next = (1.0 + phase) * self._spacing if share < 1.0 else 0.0

    def left(self, now: int) -> float:
        """Rounds until the next one."""
        return self._next - now

    def take(self, now: int) -> None:
        self._next = now + self._spacing
