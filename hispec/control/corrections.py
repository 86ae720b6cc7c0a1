"""Costs and promises, refined by what rounds took and gave."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .acceptance_model import MOST_TENTATIVE
from .choice import Ints, Observation, Route
from .goodput import PlanGrid, Widths
from .hazards import Floats
from .kalman import LogRatios

_GROUPS = 8  # of numbers of rows: 1, 2 to 3, 4 to 7, ...
_ROUND_VARIANCE, _LEAST_VARIANCE = (
    0.02,
    0.0005,
)  # of log seconds: of a single round, and of what more rounds do not mend
_PAUSE = 5.0  # times what was predicted: something else happened, which hardly counts
_MOST_OF_MEDIAN = 2.0
_MOST_SECONDS, _MOST_EXTRAS = 4.0, 2.0  # factors that are believed, and their inverses
_MOST_LOG = math.log(8.0)


class Refinement:
    """Of routes, the last being plain decoding: what measured seconds are of predicted ones, by number of
    rows; what measured drafts that were accepted are of expected ones."""

    def __init__(self, grid: PlanGrid, window: float) -> None:
        num = len(grid.routes) + 1
        self._grid = grid
        self._seconds = LogRatios(
            num, _GROUPS, _MOST_SECONDS, (0.7, 0.35, 0.15), (min(window, 512.0), 32.0 * window, 32.0 * window)
        )
        self._extras = LogRatios(num, 0, _MOST_EXTRAS, (0.05, 0.2, 0.0), (window, window, window))
        self._counts = np.zeros((2, num))  # rounds that each stands on

    def time_factors(self, rows: int) -> tuple[Floats, Floats]:
        """[routes + 1]: by what to multiply predicted seconds; and how unsure that is, of its log."""
        logs, deviations = self._seconds.logs(_group(rows))
        return np.exp(logs), deviations

    def extra_factors(self) -> Floats:
        """[routes + 1]: by what to multiply the drafts that are expected to be accepted."""
        return np.exp(self._extras.logs(0)[0])

    def add_seconds(self, seen: Sequence[Observation], now: float) -> None:
        """Rounds of one plan over one number of rows. Those with seconds = nan, and those that read other
        exits too, say nothing of seconds."""
        seen = [
            each
            for each in seen
            if each.seconds > 0.0 and math.isfinite(each.seconds) and not each.choice.watches
        ]
        if not seen:
            return
        choice, rows = seen[0].choice, seen[0].num_rows
        rounds = np.array([each.rounds for each in seen])
        each_ms = np.array([each.seconds for each in seen]) * 1e3 / rounds
        widths, cycles = _observed(
            seen, None if choice.route is None else self._grid.routes[choice.route], int(rounds.sum()) * rows
        )
        context = float(np.dot(rounds, [each.context_tokens for each in seen])) / float(rounds.sum())
        expected = float(
            self._grid.milliseconds(widths, rows, context, self._grid.one(choice.route, choice.plan, cycles))[
                0
            ]
        )
        if expected <= 0.0:
            return
        index, variance = self._index(choice.route), _ROUND_VARIANCE / float(rounds.sum()) + _LEAST_VARIANCE
        usual = expected * float(self.time_factors(rows)[0][index])
        if len(seen) > 2:
            each_ms = np.minimum(each_ms, _MOST_OF_MEDIAN * np.median(each_ms))
        elif each_ms.max() > _PAUSE * usual:
            variance += _PAUSE**2 * _ROUND_VARIANCE
        ratio = math.log(float(np.dot(rounds, each_ms)) / float(rounds.sum()) / expected)
        self._seconds.add(index, _group(rows), min(max(ratio, -_MOST_LOG), _MOST_LOG), variance, now)
        self._counts[0, index] += rounds.sum()

    def add_extras(self, route: int, expected: float, measured: float, rounds: int, now: float) -> None:
        """Drafts that were accepted in these rounds, against those that should have been."""
        ratio = math.log((measured + 0.5) / (expected + 0.5))
        self._extras.add(route, 0, min(max(ratio, -_MOST_LOG), _MOST_LOG), 2.0 / (expected + 1.0) + 0.01, now)
        self._counts[1, route] += rounds

    def stats(self, rows: int) -> dict[str, dict[str, float]]:
        """Factors for this number of rows, by route, and the rounds that they stand on."""
        seconds, extras = self.time_factors(rows)[0], self.extra_factors()
        names = [*map(str, self._grid.routes), "plain"]
        return {
            name: {
                "seconds": float(seconds[at]),
                "timed_rounds": int(timed),
                "drafts": float(extras[at]),
                "counted_rounds": int(counted),
            }
            for at, (name, timed, counted) in enumerate(zip(names, *self._counts, strict=True))
        }

    def _index(self, route: int | None) -> int:
        return len(self._grid.routes) if route is None else route


def _group(rows: int) -> int:
    return min(rows.bit_length(), _GROUPS) - 1


def _observed(seen: Sequence[Observation], route: Route | None, row_rounds: int) -> tuple[Widths, float]:
    """How far rows got in these rounds; and how many cycles a row took in a round. A row that could not draft
    took one, without drafts."""
    most = seen[0].choice.plan.num_draft_tokens
    drafted, kept, looked_up = (
        np.concatenate([getattr(each, name) for each in seen]) for name in ("drafted", "kept", "looked_up")
    )
    num = max(len(drafted), row_rounds)
    only_looks_up = route is not None and not route.traits.computes
    is_mixed = route is not None and route.traits.is_mixed
    looked = looked_up > 0 if is_mixed else np.full(len(drafted), only_looks_up)
    num_looked = num if only_looks_up else int(looked.sum())
    by_source = [
        _shares(drafted[which], count, most)
        for which, count in ((~looked, num - num_looked), (looked, num_looked))
    ]
    accepted = np.ones((1, MOST_TENTATIVE + 1))
    return (
        Widths(by_source[0], by_source[1], np.array([num_looked / num]), _shares(kept, num, most), accepted),
        num / row_rounds,
    )


def _shares(lengths: Ints, num: int, most: int) -> Floats:
    """[1, most + 1]: the share of `num` runs that are so long at least; the first of them have these lengths,
    and the others none."""
    counts = np.bincount(np.minimum(lengths, most), minlength=most + 1)[::-1].cumsum()[::-1] / max(num, 1)
    counts[0] = 1.0
    return counts[None]
