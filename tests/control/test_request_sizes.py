"""K and R of single requests, and what a batch is expected to do with them, beside rounds that are drawn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from hispec.config import Plan
from hispec.control.choice import Choice, Route
from hispec.control.goodput import PlanGrid
from hispec.control.request_sizes import RequestSizes, size_requests
from tests.control.test_goodput import estimates_of
from tests.helpers.scripted_control import Law, Machine, cpu_like

LAW, CONTEXT = Law(0.7, 0.9), 300
CHECKED, UNCHECKED = Route("exit", 4, 15, 4, 4), Route("exit", 4, None, 8)


def sizes_of(
    route: Route, plan: Plan, drafts: Sequence[float], verify: Sequence[float]
) -> RequestSizes | None:
    """Of requests whose log odds differ by so much."""
    grid, estimates = PlanGrid([route], cpu_like()), estimates_of((route,), [LAW])
    tries = np.full(len(drafts), 100.0)
    shifts = (np.array(drafts), tries), (np.array(verify), tries)
    return size_requests(grid, 0, plan, estimates, grid.widths(estimates), shifts, range(len(drafts)))


def drawn(
    route: Route, choice: Choice, drafts: Sequence[float], verify: Sequence[float]
) -> tuple[float, float]:
    """-> (tokens of a row, milliseconds) of an average round."""
    machine = Machine([route], cpu_like(), [LAW], 1, 0.0, lambda i: drafts[i], lambda i: verify[i], CONTEXT)
    for _ in range(1500):
        machine.round(choice, range(len(drafts)))
    tokens = statistics.fmean(tokens for _, tokens, _, _ in machine.history) / len(drafts)
    return tokens, 1e3 * statistics.fmean(seconds for _, _, seconds, _ in machine.history)


@pytest.mark.parametrize(
    ("route", "plan", "drafts", "verify", "own_drafts", "own_checks"),
    [
        (CHECKED, Plan(4, 15, 2, 3), (1.5, 1.5, -6, -6), (0, 0, 0, 0), {0: 4, 1: 4, 2: 0, 3: 0}, {}),
        (CHECKED, Plan(4, 15, 2, 2), (0, 0, 0, 0), (2, 2, -3, -3), {}, {0: 4, 1: 4, 2: 1, 3: 1}),
        (UNCHECKED, Plan(4, None, 4, 1), (2, -1, -6), (0, 0, 0), {0: 8, 1: 2, 2: 0}, {}),
    ],
    ids=["some without drafts", "checks", "two tiers"],
)
def test_a_batch_does_what_is_expected_of_it(
    route: Route,
    plan: Plan,
    drafts: Sequence[float],
    verify: Sequence[float],
    own_drafts: dict[int, int],
    own_checks: dict[int, int],
) -> None:
    sizes = sizes_of(route, plan, drafts, verify)
    assert sizes is not None and (sizes.usual, sizes.most_checks) == (plan, own_checks)
    assert sizes.most_drafts == own_drafts
    grid = PlanGrid([route], cpu_like())
    own = Choice(0, sizes.plan, sizes.usual, sizes.most_drafts, sizes.most_checks)
    for choice, widths in ((own, sizes.own), (Choice(0, plan), sizes.uniform)):
        expected = grid.of_batch(0, choice.plan, widths, float(len(drafts) * CONTEXT))
        assert expected == pytest.approx(drawn(route, choice, drafts, verify), rel=0.015)


def test_requests_that_are_alike_share_the_batchs_sizes() -> None:
    assert sizes_of(CHECKED, Plan(4, 15, 2, 2), (0.1, 0.1), (0.2, 0.2)) is None
