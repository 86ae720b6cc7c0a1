"""A machine that a controller can be tried on without a model: drafts are right by a known law, rounds take
what a known cost model says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from hispec.config import Plan
from hispec.control.choice import Choice, Control, Observation, Route
from hispec.latency.model import LatencyModel, Linear

ROUTES = (
    Route("exit", 4, None, 8),
    Route("adapter", 4, None, 8),
    Route("ngram", 0, None, 8),
    Route("hybrid", 4, None, 8, num_exit_tokens=4),
    Route("model", 0, None, 8),
    Route("exit", 4, 15, 4, 4),
    Route("adapter", 4, 15, 4, 4),
    Route("ngram", 0, 15, 8, 3),
    Route("hybrid", 4, 15, 8, 3, num_exit_tokens=4),
)
GATED = (
    Route("exit", 4, 15, 4, 4, is_gated=True),
    Route("hybrid", 4, 15, 8, 6, num_exit_tokens=4, is_gated=True),
)


def cpu_like(scale: Mapping[str, float] | None = None, is_static: bool = False) -> LatencyModel:
    """Stages of a model of 30 layers with exits at 4 and 15, whose passes cost by layer; `scale` multiplies
    some."""
    scale, stages = scale or {}, {}

    def put(name: str, layers: float, head: float) -> None:
        factor = scale.get(name, 1.0)
        stages[name] = Linear(
            factor * (1.0 * layers + 3.0 * head),
            0.0,
            factor * (0.12 * layers + 1.0 * head),
            factor * 2e-4 * layers,
        )

    put("plain", 30, 1)
    put("draft/4", 4, 1)
    put("fill/4", 4, 0)
    put("draft_model", 6, 1)
    put("fill_model", 6, 0)
    for low in (0, 4):
        put(f"check/{low}-15", 15 - low, 1)
        put(f"verify/{low}", 30 - low, 1)
    put("verify/15", 15, 1)
    stages["lookup"], stages["round"] = Linear(0.05, 0.02), Linear(1.0, 0.1)
    stages["cold/4"], stages["cold/15"] = Linear(0.7, 0.01), Linear(1.9, 0.02)
    stages["along/4"] = stages["along/15"] = Linear(0.1, 0.0, 0.01)
    return LatencyModel(stages, is_static, tuple(1 << bit for bit in range(9)) if is_static else ())


@dataclass
class Law:
    """Of one route: the chance that a draft is kept, that one is offered by lookup, that a tentative token is
    accepted, that a further cycle follows."""

    kept: float
    accepted: float = 1.0
    found: float = 0.0
    goes_on: float = 1.0


def _better(chance: float, log_odds: float) -> float:
    odds = float(np.exp(log_odds))
    return chance * odds / (1 - chance + chance * odds)


@cache
def _ms(cost: Linear, rows: int, tokens: int, context_tokens: int) -> float:
    """Few passes of thousands of rounds differ."""
    return float(cost(rows, tokens, context_tokens))


@dataclass
class Machine:
    """Draws what rounds do. laws: by route, which may change; request, verify: by how much the log odds of a
    request's drafts and of its tentative tokens are better."""

    routes: Sequence[Route]
    latency: LatencyModel
    laws: list[Law]
    seed: int = 0
    noise: float = 0.03
    request: Callable[[int], float] = lambda number: 0.0
    verify: Callable[[int], float] = lambda number: 0.0
    context_per_row: int = 300
    tokens: int = 0
    seconds: float = 0.0
    history: list[tuple[Choice, int, float, int]] = field(
        default_factory=list
    )  # choice, tokens, seconds, rows

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def round(self, choice: Choice, numbers: Sequence[int]) -> Observation:
        rows = len(numbers)
        cycles: list[tuple[int, int, int, int, int]] = []
        verified: list[tuple[int, int, int, int, int]] = []
        tokens = rows if choice.route is None else 0
        if choice.route is not None:
            route, law = self.routes[choice.route], self.laws[choice.route]
            for number in numbers:
                kept_chance = _better(law.kept, self.request(number))
                passes = _better(law.accepted, self.verify(number))
                cap, checks = (
                    choice.num_drafts(number),
                    choice.num_checks(number),
                )
                tentative, went_on, asked = 0, -1, 0
                for cycle in range(checks):
                    if cap <= 0:
                        break
                    looked = route.kind == "ngram" or (
                        route.kind == "hybrid" and self.random.random() < law.found
                    )
                    drafted = cap
                    if route.kind == "ngram" and self.random.random() >= law.found:
                        drafted = 0
                    elif route.kind == "hybrid" and not looked:
                        drafted = min(cap, route.num_exit_tokens or cap)
                    kept = min(drafted, int(self.random.geometric(1 - kept_chance)) - 1)
                    cycles.append((number, cap, drafted, kept, int(looked)))
                    tentative, went_on = tentative + kept + 1, went_on + 1
                    if cycle + 1 < checks and law.goes_on < 1 and self.random.random() >= law.goes_on:
                        asked = 1
                        break
                if cap <= 0:
                    tokens += 1
                elif route.check_layer is None:
                    tokens += cycles[-1][3] + 1
                else:
                    accepted = min(tentative, int(self.random.geometric(max(1 - passes, 1e-9))) - 1)
                    verified.append((number, tentative, accepted, went_on, went_on + asked))
                    tokens += min(accepted + 1, tentative)
        seconds = (
            self.cost_ms(choice, rows, cycles, verified)
            / 1e3
            * float(np.exp(self.noise * self.random.standard_normal()))
        )
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.history.append((choice, tokens, seconds, rows))
        by_cycle, by_row = (
            np.array(cycles, np.int64).reshape(-1, 5).T,
            np.array(verified, np.int64).reshape(-1, 5).T,
        )
        return Observation(choice, rows, rows * self.context_per_row, seconds, tokens, 1, *by_cycle, *by_row)

    def cost_ms(
        self,
        choice: Choice,
        rows: int,
        cycles: Sequence[tuple[int, ...]],
        verified: Sequence[tuple[int, ...]],
    ) -> float:
        """As rounds are run, pass by pass, over the places that are live."""
        latency, each = self.latency, self.context_per_row

        def cost(name: str, rows: int, tokens: int) -> float:
            return _ms(latency[name], rows, tokens, rows * each) if rows else 0.0

        total = cost("round", rows, rows)
        if choice.route is None:
            return total + cost("plain", rows, rows)
        route = self.routes[choice.route]
        low, high, plan = route.draft_layer, route.check_layer, choice.plan
        per_row: dict[int, list[tuple[int, ...]]] = {}
        for cycle in cycles:
            per_row.setdefault(cycle[0], []).append(cycle)
        idle = rows - len(per_row)  # rows of K = 0 take one place
        for at in range(plan.num_checks):
            here = [of_row[at] for of_row in per_row.values() if at < len(of_row)]
            here += [(-1, 0, 0, 0, int(route.kind == "ngram"))] * (idle if at == 0 else 0)
            if route.kind in ("ngram", "hybrid"):
                total += cost("lookup", len(here), len(here))
            if route.kind != "ngram":
                tail = "_model" if route.kind == "model" else f"/{low}"
                most = min(plan.num_draft_tokens, route.num_exit_tokens or 99)
                computed = [cycle for cycle in here if not cycle[4]]
                for step in range(most + 1):
                    alive = sum(cycle[2] >= step for cycle in computed)
                    total += cost(("fill" if step == most else "draft") + tail, alive, alive)
                looked = [cycle for cycle in here if cycle[4]]
                total += (
                    cost(f"fill/{low}", len(looked), sum(cycle[2] + 1 for cycle in looked)) if looked else 0.0
                )
            drafts = sum(cycle[2] for cycle in here)
            by_exit = route.kind not in ("ngram", "model")
            if by_exit:
                total += cost(f"cold/{low}", len(here), len(here))
            if high is None or (plan.num_checks == 1 and not drafts):
                return total + cost(f"verify/{low}", len(here), drafts + len(here))
            if not by_exit and (at == 0 or route.kind == "model"):
                total += cost(f"cold/{high}", len(here), len(here))
            total += cost(f"check/{low}-{high}", len(here), drafts + len(here))
        return total + cost(f"verify/{high}", rows, sum(row[1] for row in verified) + idle)

    def run(self, control: Control, numbers: Sequence[int], rounds: int) -> float:
        """So many rounds under a controller -> tokens per second in them."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(rounds):
            control.observe(self.round(control.choose(numbers, len(numbers) * self.context_per_row), numbers))
        return (self.tokens - tokens) / (self.seconds - seconds)

    def fixed(self, route: int | None, plan: Plan, numbers: Sequence[int], rounds: int = 400) -> float:
        """Tokens per second of a plan that is kept, on a machine like this."""
        twin = Machine(
            self.routes,
            self.latency,
            self.laws,
            self.seed + 1,
            self.noise,
            self.request,
            self.verify,
            self.context_per_row,
        )
        for _ in range(rounds):
            twin.round(Choice(route, plan), numbers)
        return twin.tokens / twin.seconds
