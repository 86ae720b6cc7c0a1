"""Costs of rounds by what was counted row by row, beside those of whole rounds that are drawn and paid for
pass by pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hispec.config import CheckConfig, DraftConfig, NgramConfig, Plan, SpeculativeConfig
from hispec.control.choice import Choice, Observation, Route
from hispec.control.goodput import PlanGrid
from hispec.latency.model import LatencyModel, Linear
from hispec.profile.replay import Rounds
from hispec.profile.round_cost import PassTimes, round_costs
from tests.control.test_goodput import estimates_of
from tests.helpers.scripted_control import GATED, ROUTES, Law, Machine, cpu_like

NUM_LAYERS, CONTEXT = 30, 300
GATED_LOOKUP = Route("ngram", 0, 15, 8, 4, is_gated=True)
CASES = [
    (route, route.plan(4, num_checks))
    for route in (*ROUTES, *GATED, GATED_LOOKUP)
    for num_checks in ((1, 3) if route.check_layer is not None else (1,))
]


def law_of(route: Route) -> Law:
    return Law(0.7, 0.9, 0.4, goes_on=0.5 if route.is_gated else 1.0)


def with_costs(latency: LatencyModel, **stages: Linear) -> LatencyModel:
    return LatencyModel({**latency.stages, **stages}, latency.is_static, latency.row_buckets)


def speculative(route: Route, plan: Plan) -> SpeculativeConfig:
    draft: dict[str, Any] = {"kind": route.kind, "num_exit_tokens": route.num_exit_tokens}
    if route.traits.in_trunk:
        draft["layer"] = route.draft_layer
    if route.traits.looks_up:
        draft["ngram"] = NgramConfig()
    if route.traits.has_model:
        draft["path"] = "any"
    gate = {"continue_confidence": 0.5} if route.is_gated and plan.num_checks > 1 else {}
    return SpeculativeConfig(
        draft=DraftConfig(**{name: value for name, value in draft.items() if value is not None}),
        check=None if plan.check_layer is None else CheckConfig(layer=plan.check_layer, **gate),
        num_draft_tokens=plan.num_draft_tokens,
        num_checks=plan.num_checks,
    )


def counted(route: Route, plan: Plan, seen: Sequence[Observation]) -> Rounds:
    """What `hispec profile` would have counted of each row by itself."""
    most = plan.num_checks * (plan.num_draft_tokens + 1) + 2
    num_levels = 1 + min(plan.num_draft_tokens, route.most_computed)
    looked, checks, verifies = (np.zeros(most, np.int64) for _ in range(3))
    levels, reached = np.zeros((num_levels, most), np.int64), np.zeros(plan.num_checks, np.int64)
    rounds = tokens = unchecked = 0
    for each in seen:
        rounds, tokens = rounds + each.num_rows, tokens + each.tokens
        tentative = dict(zip(each.rows.tolist(), each.tentative.tolist(), strict=True))
        of_row: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, drafted, by_lookup in zip(each.numbers, each.drafted, each.looked_up, strict=True):
            of_row[int(number)].append((int(drafted), int(by_lookup)))
        for number, cycles in of_row.items():
            reached[: len(cycles)] += 1
            is_unchecked = plan.check_layer is not None and plan.num_checks == 1 and not cycles[0][0]
            unchecked += is_unchecked
            for drafted, by_lookup in cycles:
                if not by_lookup and route.traits.computes:
                    levels[: drafted + 1, 1] += 1
                elif drafted:
                    looked[drafted + 1] += 1
                if plan.check_layer is None:
                    verifies[drafted + 1] += 1
                elif not is_unchecked:
                    checks[drafted + 1] += 1
            if plan.check_layer is not None and not is_unchecked:
                verifies[tentative[number]] += 1
    return Rounds(np.array([rounds]), rounds, tokens, reached, unchecked, looked, levels, checks, verifies)


def drawn(
    route: Route, plan: Plan, latency: LatencyModel, rows: int, rounds: int
) -> tuple[float, list[Observation]]:
    """-> (milliseconds of an average round but for what is beside its passes, what was seen)."""
    machine = Machine([route], latency, [law_of(route)], noise=0.0, seed=3, context_per_row=CONTEXT)
    seen = [machine.round(Choice(0, plan), range(rows)) for _ in range(rounds)]
    beside = float(latency["round"](float(rows), float(rows), float(rows * CONTEXT)))
    return 1e3 * machine.seconds / rounds - beside, seen


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("route", "plan"), CASES, ids=str)
def test_rounds_cost_what_they_take_pass_by_pass(route: Route, plan: Plan, rows: int) -> None:
    latency = with_costs(cpu_like(), lookup=Linear(20.0, 0.02))  # a lookup too many is seen
    exact, seen = drawn(route, plan, latency, rows, 400)
    times = PassTimes(latency, CONTEXT)
    cost = round_costs(speculative(route, plan), counted(route, plan, seen), [rows], times, NUM_LAYERS)
    assert cost[rows].ms == pytest.approx(exact, rel=1e-9 if rows == 1 else 0.012)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize(("route", "plan"), CASES, ids=str)
def test_static_rounds_cost_a_profile_what_they_cost_a_controller(
    route: Route, plan: Plan, rows: int
) -> None:
    latency, nothing = cpu_like(is_static=True), counted(route, plan, [])
    cost = round_costs(speculative(route, plan), nothing, [rows], PassTimes(latency, CONTEXT), NUM_LAYERS)
    grid = PlanGrid([route], latency)
    widths = grid.widths(estimates_of((route,), [law_of(route)]))
    context = float(rows * CONTEXT)
    (ms,) = grid.milliseconds(widths, rows, context, grid.one(0, plan))
    assert cost[rows].ms == pytest.approx(ms - float(latency["round"](float(rows), float(rows), context)))


def test_rows_that_stand_for_none_attend_to_nothing() -> None:
    """Three rows are run as four."""
    latency = cpu_like(is_static=True)
    plain, context = latency["plain"], 3.0 * CONTEXT
    (cost,) = round_costs(
        None, counted(ROUTES[0], Plan(4, None, 4), []), [3], PassTimes(latency, CONTEXT), 30
    ).values()
    assert cost.ms == pytest.approx(float(plain(4.0, 4.0, context)))
    grid = PlanGrid(ROUTES, latency)
    ms = grid.milliseconds(grid.widths(estimates_of(ROUTES, [law_of(each) for each in ROUTES])), 3, context)
    assert ms[0] == pytest.approx(
        float(plain(4.0, 4.0, context)) + float(latency["round"](3.0, 3.0, context))
    )
