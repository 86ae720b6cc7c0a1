"""How all plans look now, for the requests that are running: estimates, costs and their refinement put
together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..config import GoodputConfig, Plan
from ..latency.model import LatencyModel
from .acceptance_model import DRAFT, VERIFY, Acceptance, Estimates
from .choice import Choice, Observation, Route
from .corrections import Refinement
from .goodput import PlanGrid, Sizes, Widths
from .hazards import Floats
from .per_request import make_caps

Pass = tuple[int | None, Plan, int]  # route, plan, number of rows
_NO_SHIFTS = (np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Outlook:
    """All candidates, for these requests.

    shifts         of the requests' log odds, and the tries that they stand on, by tier. They share a plan
                   out; it is chosen by what is known of all, which these requests are in: to count them twice
                   makes a small batch swing
    extras         drafts that a row is expected to have accepted in a round, before refinement
    milliseconds, tokens_per_s   of a round of all rows, refined
    """

    numbers: Sequence[int]
    rows: int
    context_tokens: float
    estimates: Estimates
    shifts: tuple[tuple[Floats, Floats], tuple[Floats, Floats]]
    widths: Widths
    extras: Floats
    milliseconds: Floats
    tokens_per_s: Floats


@dataclass(frozen=True)
class Standing:
    """A candidate, by its index, and the choice made of it.

    share          drafts that a row is expected to have accepted, in those of the candidate itself: requests
                   may have a K of their own
    milliseconds, tokens_per_s   of a round of all rows, refined
    """

    index: int
    choice: Choice
    share: float
    milliseconds: float
    tokens_per_s: float
    reason: str


class Outlooks:
    """Learns from what rounds did, and says what others would do. Raises ConfigError if the latency model
    lacks a stage that a route runs."""

    def __init__(
        self, routes: Sequence[Route], latency: LatencyModel, config: GoodputConfig, along: Collection[int]
    ) -> None:
        self.grid, self.acceptance, self._config = (
            PlanGrid(routes, latency, along),
            Acceptance(routes, config),
            config,
        )
        self._refinement, self._is_static = Refinement(self.grid, config.window), latency.is_static

    def learn(self, seen: Sequence[Observation], standing: Standing | None, now: int) -> None:
        """Of rounds since the last time; standing: what was decided then."""
        acceptance, estimates = self.acceptance, self.acceptance.estimates()
        acceptance.requests.age(now)
        by_route: dict[int, list[Observation]] = {}
        by_pass: dict[Pass, list[Observation]] = {}
        for each in seen:
            choice = each.choice
            by_pass.setdefault((choice.route, choice.plan, each.num_rows), []).append(each)
            if choice.route is not None:
                by_route.setdefault(choice.route, []).append(each)
            if each.shadows:
                acceptance.add_shadows(choice.route, each.shadows, now, each.rounds)
        for route, group in by_route.items():
            acceptance.add(route, group, now, sum(each.rounds for each in group), estimates)
        for group in by_pass.values():
            self._refinement.add_seconds(group, now)
        if standing is not None and standing.choice.route is not None:
            self._learn_extras(by_pass, standing, now)

    def _learn_extras(
        self, by_pass: Mapping[Pass, Sequence[Observation]], standing: Standing, now: int
    ) -> None:
        """What the rounds of the present plan gave, against what would be expected of it by now."""
        route, plan, expected = standing.choice.route, standing.choice.plan, 0.0
        assert route is not None
        for (of_route, of_plan, rows), seen in by_pass.items():
            if (of_route, of_plan) == (route, plan):
                if not expected:
                    one = self.grid.one(route, self.grid.plan(standing.index))
                    expected = standing.share * (
                        float(
                            self.grid.tokens(self.grid.widths_of(self.acceptance.estimates(), route), one)[0]
                        )
                        - 1.0
                    )
                rounds = sum(each.rounds for each in seen)
                self._refinement.add_extras(
                    route,
                    expected * rows * rounds,
                    sum(each.tokens for each in seen) - rows * rounds,
                    rounds,
                    now,
                )

    def look(
        self, numbers: Sequence[int], context_tokens: float, estimates: Estimates | None = None
    ) -> Outlook:
        """For these requests (none = for one of which nothing is known), by what was learnt, or by other
        estimates."""
        rows, shifts = max(1, len(numbers)), (_NO_SHIFTS, _NO_SHIFTS)
        estimates = estimates or self.acceptance.estimates()
        if self._config.per_request and len(numbers) > 1:
            requests = self.acceptance.requests
            shifts = requests.shifts(DRAFT, numbers), requests.shifts(VERIFY, numbers)
        widths, route = self.grid.widths(estimates), self.grid.sizes.route
        extras = self.grid.tokens(widths) - 1.0
        milliseconds = (
            self.grid.milliseconds(widths, rows, context_tokens)
            * self._refinement.time_factors(rows)[0][route]
        )
        tokens = rows * (1.0 + extras * self._refinement.extra_factors()[route])
        return Outlook(
            numbers,
            rows,
            context_tokens,
            estimates,
            shifts,
            widths,
            extras,
            milliseconds,
            tokens * 1e3 / np.maximum(milliseconds, 1e-9),
        )

    def hopeful(self, numbers: Sequence[int], context_tokens: float, now: int, deviations: float) -> Floats:
        """[candidates]: tokens per second, if acceptance and costs are better than they are known to be by so
        many standard errors, and one."""
        outlook = self.look(numbers, context_tokens, self.acceptance.optimistic(now, deviations))
        unsure = np.exp(self._refinement.time_factors(outlook.rows)[1])
        return outlook.tokens_per_s * unsure[self.grid.sizes.route]

    def stand(self, index: int, reason: str, outlook: Outlook, is_probe: bool = False) -> Standing:
        """What follows from taking a candidate: requests that are drafted better or worse than others get K
        and R of their own, if that promises more than the same for all. A pass costs its constant for as long
        as a single row drafts, so it need not.
        """
        route, plan, milliseconds = (
            self.grid.route(index),
            self.grid.plan(index),
            float(outlook.milliseconds[index]),
        )
        standing = Standing(
            index,
            Choice(route, plan, is_probe=is_probe),
            1.0,
            milliseconds,
            float(outlook.tokens_per_s[index]),
            reason,
        )
        if (
            route is None
            or is_probe
            or self._is_static
            or not self._config.per_request
            or len(outlook.numbers) < 2
        ):
            return standing  # where shapes are static, who drafts less costs as much
        caps = make_caps(
            self.grid, route, plan, outlook.estimates, outlook.widths, outlook.shifts, outlook.numbers
        )
        if caps is None:
            return standing
        _, _, alike = self._promise(route, self.grid.one(route, plan), caps.alike, outlook)
        extras, milliseconds, tokens_per_s = self._promise(
            route, self.grid.one(route, caps.plan, caps.cycles), caps.widths, outlook
        )
        if tokens_per_s <= alike:
            return standing
        choice = Choice(route, caps.plan, caps.most_drafts, caps.most_checks)
        share = extras / max(float(outlook.extras[index]), 1e-9)
        return replace(
            standing, choice=choice, share=share, milliseconds=milliseconds, tokens_per_s=tokens_per_s
        )

    def _promise(
        self, route: int, sizes: Sizes, widths: Widths, outlook: Outlook
    ) -> tuple[float, float, float]:
        """Of one plan with widths of its own: drafts that a row is expected to have accepted, milliseconds
        and tokens per second, both refined."""
        extras = float(self.grid.tokens(widths, sizes)[0]) - 1.0
        factor = float(self._refinement.time_factors(outlook.rows)[0][route])
        milliseconds = max(
            float(self.grid.milliseconds(widths, outlook.rows, outlook.context_tokens, sizes)[0]) * factor,
            1e-9,
        )
        tokens = outlook.rows * (1.0 + extras * float(self._refinement.extra_factors()[route]))
        return extras, milliseconds, tokens * 1e3 / milliseconds

    def name(self, choice: Choice) -> str:
        return self.grid.name(choice.route, choice.plan)

    def best_of_routes(self, outlook: Outlook, most: int) -> list[tuple[str, float]]:
        """The best candidates of so many routes, the best first, and what they promise."""
        order = np.argsort(-outlook.tokens_per_s, kind="stable")
        _, first = np.unique(self.grid.sizes.route[order], return_index=True)
        best = order[np.sort(first)][:most].tolist()
        return [
            (
                self.grid.name(self.grid.route(index), self.grid.plan(index)),
                float(outlook.tokens_per_s[index]),
            )
            for index in best
        ]

    def stats(self, now: int, rows: int) -> dict[str, Any]:
        return {"acceptance": self.acceptance.stats(now), "refinement": self._refinement.stats(rows)}
