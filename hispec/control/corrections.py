"""Corrections of predicted round times and token counts by what rounds really took and gave."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .acceptance_model import MOST_TENTATIVE
from .choice import Ints, Observation, Route
from .goodput import PlanGrid, Widths
from .hazards import Floats
from .kalman import CostRatioFilter

_GROUPS = 8  # of batch sizes: 1, 2 to 3, 4 to 7, ...
_ROUND_VARIANCE = 0.02  # of log seconds of a single round
_LEAST_VARIANCE = 0.0005  # of log seconds, however many rounds
_OUTLIER = 5.0  # times the predicted time: something else ran too, the measurement hardly counts
_MOST_OF_MEDIAN = 2.0
_MAX_SECONDS_FACTOR, _MAX_EXTRAS_FACTOR = 4.0, 2.0
_MAX_LOG = math.log(8.0)


class Corrections:
    """By route, the last being plain decoding: measured over predicted seconds, by batch size; and accepted
    over expected drafts."""

    def __init__(self, grid: PlanGrid, window: float) -> None:
        num = len(grid.routes) + 1
        self._grid = grid
        memories = (min(window, 512.0), 32.0 * window, 32.0 * window)
        self._seconds = CostRatioFilter(num, _GROUPS, _MAX_SECONDS_FACTOR, (0.7, 0.35, 0.15), memories)
        self._extras = CostRatioFilter(num, 0, _MAX_EXTRAS_FACTOR, (0.05, 0.2, 0.0), (window, window, window))
        self._counts = np.zeros((2, num))  # rounds that each rests on

    def time_factors(self, rows: int) -> tuple[Floats, Floats]:
        """[routes + 1]: factors of predicted seconds, and the standard deviations of their logs."""
        logs, deviations = self._seconds.logs(_group(rows))
        return np.exp(logs), deviations

    def extra_factors(self) -> Floats:
        """[routes + 1]: factors of expected accepted drafts."""
        return np.exp(self._extras.logs(0)[0])

    def add_seconds(self, seen: Sequence[Observation], round_index: float) -> None:
        """Rounds of one plan with one number of rows. Those without a valid time, or that read shadows too,
        are left out."""
        seen = [each for each in seen if 0.0 < each.seconds < math.inf and not each.choice.watches]
        if not seen:
            return
        choice, rows = seen[0].choice, seen[0].num_rows
        rounds = np.array([each.rounds for each in seen])
        total = float(rounds.sum())
        each_ms = np.array([each.seconds for each in seen]) * 1e3 / rounds
        route = None if choice.route is None else self._grid.routes[choice.route]
        widths = _observed(seen, route, int(rounds.sum()) * rows)
        context = float(np.dot(rounds, [each.context_tokens for each in seen])) / total
        plan = self._grid.one(choice.route, choice.plan)
        expected = float(self._grid.milliseconds(widths, rows, context, plan)[0])
        if expected <= 0.0:
            return
        index = len(self._grid.routes) if choice.route is None else choice.route
        variance = _ROUND_VARIANCE / total + _LEAST_VARIANCE
        usual = expected * float(self.time_factors(rows)[0][index])
        if len(seen) > 2:
            each_ms = np.minimum(each_ms, _MOST_OF_MEDIAN * np.median(each_ms))
        elif each_ms.max() > _OUTLIER * usual:
            variance += _OUTLIER**2 * _ROUND_VARIANCE
        ratio = _clipped_log(float(np.dot(rounds, each_ms)) / total / expected)
        self._seconds.add(index, _group(rows), ratio, variance, round_index)
        self._counts[0, index] += rounds.sum()

    def add_extras(
        self, route: int, expected: float, measured: float, rounds: int, round_index: float
    ) -> None:
        """Drafts accepted in these rounds, against those expected."""
        ratio = _clipped_log((measured + 0.5) / (expected + 0.5))
        self._extras.add(route, 0, ratio, 2.0 / (expected + 1.0) + 0.01, round_index)
        self._counts[1, route] += rounds

    def stats(self, rows: int) -> dict[str, dict[str, float]]:
        """By route: the factors for this number of rows, and the rounds that they rest on."""
        columns = self.time_factors(rows)[0], self._counts[0], self.extra_factors(), self._counts[1]
        return {
            str(route): {
                "seconds": float(seconds),
                "timed_rounds": int(timed),
                "drafts": float(extras),
                "counted_rounds": int(counted),
            }
            for route, seconds, timed, extras, counted in zip(
                (*self._grid.routes, "plain"), *columns, strict=True
            )
        }


def _group(rows: int) -> int:
    return min(rows.bit_length(), _GROUPS) - 1


def _clipped_log(ratio: float) -> float:
    return min(max(math.log(ratio), -_MAX_LOG), _MAX_LOG)


def _observed(seen: Sequence[Observation], route: Route | None, row_rounds: int) -> Widths:
    """How far rows got in these rounds. A row that could not draft took one cycle without drafts."""
    most, most_checks = seen[0].choice.plan.num_draft_tokens, seen[0].choice.plan.num_checks
    drafted, kept, looked_up, went_on = (
        np.concatenate([getattr(each, name) for each in seen])
        for name in ("drafted", "kept", "looked_up", "went_on")
    )
    cycles = _shares(went_on, row_rounds, most_checks - 1)
    num = round(row_rounds * float(cycles.sum()))
    only_looks_up = route is not None and not route.traits.computes
    is_mixed = route is not None and route.traits.is_mixed
    looked = looked_up > 0 if is_mixed else np.full(len(drafted), only_looks_up)
    num_looked = num if only_looks_up else int(looked.sum())
    return Widths(
        computed=_shares(drafted[~looked], num - num_looked, most),
        looked=_shares(drafted[looked], num_looked, most),
        found=np.array([num_looked / num]),
        kept=_shares(kept, num, most),
        accepted=np.ones((1, MOST_TENTATIVE + 1)),
        cycles=cycles,
    )


def _shares(lengths: Ints, num: int, most: int) -> Floats:
    """[1, most + 1]: the share of `num` runs of length >= j; runs beyond those in `lengths` have length 0."""
    counts = np.bincount(np.minimum(lengths, most), minlength=most + 1)[::-1].cumsum()[::-1] / max(num, 1)
    counts[0] = 1.0
    return counts[None]
