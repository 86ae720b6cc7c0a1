"""K and R of single requests, in proportion to their expected acceptance [SmartSpec §4.3]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import Plan
from .acceptance_model import MOST_CHECKS, MOST_TENTATIVE, Estimates, expected_kept
from .choice import Ints
from .goodput import PlanGrid, Widths
from .hazards import Floats

_LEAST_TRIES = 8.0  # below which a request has the batch's sizes: it is new, or was not drafted for a while
_MAX_TIMES = 2  # a request's K and R over the batch's
Shifts = tuple[tuple[Floats, Floats], tuple[Floats, Floats]]  # draft, verify: (shifts of log odds, tries) [n]


@dataclass(frozen=True)
class RequestSizes:
    """A batch's plan with K and R of its own for each request.

    plan                     with the largest K and R of any request
    usual                    with the batch's K and R, which requests have that join before the next decision
    most_drafts, most_checks {request number: K or R} where they differ from the usual ones
    own, uniform             how far each request gets with these sizes, by one entry of each; and if all had
                             the batch's
    """

    plan: Plan
    usual: Plan
    most_drafts: dict[int, int]
    most_checks: dict[int, int]
    own: Widths
    uniform: Widths


def size_requests(
    grid: PlanGrid,
    route: int,
    plan: Plan,
    estimates: Estimates,
    widths: Widths,
    shifts: Shifts,
    numbers: Sequence[int],
) -> RequestSizes | None:
    """Distributes a batch's plan over its requests; None if all get the same. A request whose K becomes 0 is
    decoded plainly, until its counts have decayed so far that it gets the batch's K again. widths: of all
    routes."""
    limits, num_drafts, num = grid.routes[route], plan.num_draft_tokens, len(numbers)
    (shift, tries), (verify_shift, verify_tries) = shifts
    kept = np.zeros((num, grid.num_drafts + 1))
    kept[:, : limits.most_drafts + 1] = expected_kept(estimates.kept[route], shift, limits.most_drafts)
    accepted = expected_kept(estimates.accepted[route], verify_shift, MOST_TENTATIVE)
    drafts = _in_proportion(num_drafts, kept[:, 1 : num_drafts + 1], tries, 0, limits.most_drafts)
    checks = np.full(num, plan.num_checks)
    if plan.num_checks > 1:
        reached = accepted[:, 1 : plan.window + 1]
        checks = _in_proportion(plan.num_checks, reached, verify_tries, 1, limits.most_checks)
    if (drafts == num_drafts).all() and (checks == plan.num_checks).all():
        return None
    most = limits.plan(grid.round_up(route, max(1, int(drafts.max()))), int(checks.max()))
    one = widths.of(route)

    def limited(drafts: Ints, checks: Ints) -> Widths:
        may = np.arange(kept.shape[1]) <= drafts[:, None]
        goes_on = np.arange(MOST_CHECKS) < np.where(drafts > 0, checks, 1)[:, None]
        return Widths(
            one.computed * may,
            one.looked * may,
            one.found * (drafts > 0),
            kept * may,
            accepted,
            one.cycles * goes_on,
        )

    return RequestSizes(
        most,
        plan,
        _different(numbers, drafts, num_drafts),
        _different(numbers, checks, plan.num_checks),
        limited(drafts, checks),
        limited(np.full(num, num_drafts), np.full(num, plan.num_checks)),
    )


def _different(numbers: Sequence[int], sizes: Ints, usual: int) -> dict[int, int]:
    return {number: size for number, size in zip(numbers, sizes.tolist(), strict=True) if size != usual}


def _in_proportion(size: int, reach: Floats, tries: Floats, least: int, most: int) -> Ints:
    """[n]: size * expected successes of the request / mean of the batch, rounded; reach [n, positions]:
    P(position reached)."""
    expected = reach.sum(axis=1)
    own = np.rint(size * expected / max(expected.mean(), 1e-9)).astype(np.int64)
    return np.where(tries < _LEAST_TRIES, size, np.clip(own, least, min(most, _MAX_TIMES * size)))
