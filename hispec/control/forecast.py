"""Goodput of every candidate plan for the running requests: E[tokens of a round] / E[time of a round]
[SmartSpec §4], from acceptance estimates, stage costs and their corrections."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..config import GoodputConfig, Plan
from ..latency.model import LatencyModel
from .acceptance_model import DRAFT, VERIFY, AcceptanceModel, Estimates
from .choice import Choice, Observation, Route
from .corrections import Corrections
from .goodput import PlanGrid, Widths
from .hazards import Floats
from .request_sizes import Shifts, size_requests

PlanKey = tuple[int | None, Plan, int]  # route, plan, number of rows
_NO_SHIFTS = (np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Forecast:
    """Predictions for all candidate plans and these requests.

    shifts         of the requests' log odds. They share out a plan but do not choose it: the estimates of all
                   requests count these ones already, and counting them twice makes a small batch oscillate
    extras         [candidates] accepted drafts that are expected of a row in a round, not corrected
    milliseconds, tokens_per_s   [candidates] of a round of all rows, corrected
    """

    numbers: Sequence[int]
    rows: int
    context_tokens: float
    estimates: Estimates
    shifts: Shifts
    widths: Widths
    extras: Floats
    milliseconds: Floats
    tokens_per_s: Floats


@dataclass(frozen=True)
class Selection:
    """A selected candidate, and the choice made of it.

    index          of the candidate in the grid
    extras_ratio   accepted drafts expected of a row, over those of the candidate itself: requests may have a
                   K of their own
    milliseconds, tokens_per_s   of a round of all rows, corrected
    reason         why it was selected
    """

    index: int
    choice: Choice
    extras_ratio: float
    milliseconds: float
    tokens_per_s: float
    reason: str


class Forecaster:
    """Learns from what rounds did, and predicts what others would do. Raises ConfigError if the latency model
    lacks a stage that a route runs."""

    def __init__(
        self,
        routes: Sequence[Route],
        latency: LatencyModel,
        config: GoodputConfig,
        written_layers: Collection[int],
    ) -> None:
        """written_layers: exits whose KV every round writes, in use or not."""
        self.grid, self._config = PlanGrid(routes, latency, written_layers), config
        self.acceptance = AcceptanceModel(routes, config)
        self._corrections, self._is_static = Corrections(self.grid, config.window), latency.is_static

    def learn(self, seen: Sequence[Observation], selected: Selection | None, round_index: int) -> None:
        """Updates all estimates by the rounds since the last call; selected: the decision that they
        followed."""
        acceptance, estimates = self.acceptance, self.acceptance.estimates()
        acceptance.requests.decay(round_index)
        by_route: dict[int, list[Observation]] = {}
        by_plan: dict[PlanKey, list[Observation]] = {}
        for each in seen:
            choice = each.choice
            by_plan.setdefault((choice.route, choice.plan, each.num_rows), []).append(each)
            if choice.route is not None:
                by_route.setdefault(choice.route, []).append(each)
            if each.shadows:
                acceptance.add_shadows(choice.route, each.shadows, round_index, each.rounds)
        for route, group in by_route.items():
            acceptance.add(route, group, round_index, sum(each.rounds for each in group), estimates)
        for group in by_plan.values():
            self._corrections.add_seconds(group, round_index)
        if selected is not None and selected.choice.route is not None:
            self._learn_extras(by_plan, selected, selected.choice.route, round_index)

    def _learn_extras(
        self,
        by_plan: Mapping[PlanKey, Sequence[Observation]],
        selected: Selection,
        route: int,
        round_index: int,
    ) -> None:
        """Accepted drafts of the selected plan, against those that today's estimates expect of it."""
        expected = 0.0
        for (of_route, of_plan, rows), seen in by_plan.items():
            if (of_route, of_plan) == (route, selected.choice.plan):
                if not expected:
                    widths = self.grid.widths(self.acceptance.estimates()).of(route)
                    one = self.grid.one(route, self.grid.plan(selected.index))
                    expected = selected.extras_ratio * (float(self.grid.tokens(widths, one)[0]) - 1.0)
                rounds = sum(each.rounds for each in seen)
                measured = sum(each.tokens for each in seen) - rows * rounds
                self._corrections.add_extras(route, expected * rows * rounds, measured, rounds, round_index)

    def predict(
        self, numbers: Sequence[int], context_tokens: float, estimates: Estimates | None = None
    ) -> Forecast:
        """For these requests (none = for one unknown request), by these estimates (None = the present
        ones)."""
        rows, shifts = max(1, len(numbers)), (_NO_SHIFTS, _NO_SHIFTS)
        estimates = estimates or self.acceptance.estimates()
        if self._config.per_request and len(numbers) > 1:
            requests = self.acceptance.requests
            shifts = requests.shifts(DRAFT, numbers), requests.shifts(VERIFY, numbers)
        widths, route = self.grid.widths(estimates), self.grid.sizes.route
        extras = self.grid.tokens(widths) - 1.0
        milliseconds = self.grid.milliseconds(widths, rows, context_tokens)
        milliseconds = milliseconds * self._corrections.time_factors(rows)[0][route]
        tokens = rows * (1.0 + extras * self._corrections.extra_factors()[route])
        speed = tokens * 1e3 / np.maximum(milliseconds, 1e-9)
        return Forecast(numbers, rows, context_tokens, estimates, shifts, widths, extras, milliseconds, speed)

    def optimistic_tokens_per_s(self, forecast: Forecast, round_index: int, deviations: float) -> Floats:
        """[candidates]: upper confidence bounds of tokens/s for the same requests: acceptance better by so
        many standard errors, costs by one."""
        estimates = self.acceptance.optimistic(round_index, deviations)
        raised = self.predict(forecast.numbers, forecast.context_tokens, estimates)
        deviation = self._corrections.time_factors(forecast.rows)[1]
        return raised.tokens_per_s * np.exp(deviation)[self.grid.sizes.route]

    def select(self, index: int, reason: str, forecast: Forecast, is_probe: bool = False) -> Selection:
        """Selects a candidate. Requests get a K and R of their own if that promises more tokens/s than the
        same for all: it need not, since a pass costs its constant for as long as a single row drafts."""
        route, plan = self.grid.route(index), self.grid.plan(index)
        milliseconds, tokens_per_s = float(forecast.milliseconds[index]), float(forecast.tokens_per_s[index])
        choice = Choice(route, plan, is_probe=is_probe)
        selection = Selection(index, choice, 1.0, milliseconds, tokens_per_s, reason)
        # With static shapes a row that drafts less costs as much.
        may_differ = self._config.per_request and not self._is_static and not is_probe
        if route is None or not may_differ or len(forecast.numbers) < 2:
            return selection
        sizes = size_requests(
            self.grid, route, plan, forecast.estimates, forecast.widths, forecast.shifts, forecast.numbers
        )
        if sizes is None:
            return selection
        _, _, uniform = self._predict_one(route, plan, sizes.uniform, forecast)
        extras, milliseconds, tokens_per_s = self._predict_one(route, sizes.plan, sizes.own, forecast)
        if tokens_per_s <= uniform:
            return selection
        return replace(
            selection,
            choice=Choice(route, sizes.plan, sizes.usual, sizes.most_drafts, sizes.most_checks),
            extras_ratio=extras / max(float(forecast.extras[index]), 1e-9),
            milliseconds=milliseconds,
            tokens_per_s=tokens_per_s,
        )

    def _predict_one(
        self, route: int, plan: Plan, widths: Widths, forecast: Forecast
    ) -> tuple[float, float, float]:
        """A plan, with widths of each row -> accepted drafts of a row, milliseconds and tokens/s of a
        round."""
        per_row, milliseconds = self.grid.of_batch(route, plan, widths, forecast.context_tokens)
        milliseconds *= float(self._corrections.time_factors(forecast.rows)[0][route])
        milliseconds, extras = max(milliseconds, 1e-9), per_row - 1.0
        tokens = forecast.rows * (1.0 + extras * float(self._corrections.extra_factors()[route]))
        return extras, milliseconds, tokens * 1e3 / milliseconds

    def name(self, choice: Choice) -> str:
        return self.grid.name(choice.route, choice.plan)

    def best_of_routes(self, forecast: Forecast, most: int) -> list[list[Any]]:
        """[name, tokens/s] of the best candidate of each route, the best `most` of them, best first."""
        order = np.argsort(-forecast.tokens_per_s, kind="stable")
        _, first = np.unique(self.grid.sizes.route[order], return_index=True)
        return [
            [
                self.grid.name(self.grid.route(index), self.grid.plan(index)),
                float(forecast.tokens_per_s[index]),
            ]
            for index in order[np.sort(first)][:most].tolist()
        ]

    def stats(self, round_index: int, rows: int) -> dict[str, Any]:
        return {
            "acceptance": self.acceptance.stats(round_index),
            "refinement": self._corrections.stats(rows),
        }
