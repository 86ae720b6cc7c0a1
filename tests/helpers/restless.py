"""A controller that changes its mind every round, and remembers what it was told."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hispec.config import PLAIN
from hispec.control.choice import Choice, Observation, Route
from hispec.engine import Engine
from hispec.latency.model import NOTHING, LatencyModel, Linear, stage_names

FLAT = Linear(constant_ms=1.0)


def flat_latency(layers: Sequence[int], *, has_model: bool = False, **stages: Linear) -> LatencyModel:
    """Every pass costs a millisecond, but for `stages`; what is written along costs nothing."""
    along = {f"along/{layer}": NOTHING for layer in layers}
    return LatencyModel(dict.fromkeys(stage_names(layers, layers, has_model), FLAT) | along | stages)


class Restless:
    """Chance decides on the route, its sizes, and what single requests have of them."""

    def __init__(
        self, routes: Sequence[Route], seed: int = 0, plain: float = 0.2, watches: float = 0.5
    ) -> None:
        self.routes = routes
        self._chance, self._plain, self._watches = random.Random(seed), plain, watches
        self.choices: list[Choice] = []
        self.seen: list[Observation] = []

    rounds_left = 1 << 62

    @property
    def is_due(self) -> bool:
        return self._chance.random() < 0.6

    def holds_for(self, num_rows: int) -> bool:
        return self._chance.random() < 0.5

    def choose(self, numbers: Sequence[int], context_tokens: int) -> Choice:
        chance = self._chance
        watches = chance.random() < self._watches
        if chance.random() < self._plain:
            return self._kept(Choice(None, PLAIN, watches=watches))
        index = chance.randrange(len(self.routes))
        route = self.routes[index]
        num_drafts, num_checks = chance.randint(1, route.most_drafts), chance.randint(1, route.most_checks)
        some = [number for number in numbers if chance.random() < 0.4]
        caps = {number: chance.randint(0, num_drafts) for number in some}
        checks = {number: chance.randint(1, num_checks) for number in some if chance.random() < 0.5}
        return self._kept(Choice(index, route.plan(num_drafts, num_checks), None, caps, checks, watches))

    def _kept(self, choice: Choice) -> Choice:
        self.choices.append(choice)
        return choice

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)

    def failed(self, route: int) -> None:
        pass

    def forget(self, number: int) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


def make_restless(engine: Engine, seed: int = 0, **shares: float) -> Restless:
    """Puts one in the place of the engine's controller, which must be of control: goodput."""
    control = Restless(engine._recorder.control.routes, seed, **shares)
    engine._recorder.use_controller(control)
    return control
