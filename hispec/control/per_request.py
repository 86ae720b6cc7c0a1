"""K and R of single requests, in proportion to what they make of them [SmartSpec §4.3]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import Plan
from .acceptance_model import Estimates, expected_kept
from .choice import Ints
from .goodput import PlanGrid, Widths
from .hazards import Floats

_LEAST_TRIES = 8.0  # below which a request has the batch's sizes: it is new, or was not drafted for a while
_MOST_TIMES = 2  # the batch's sizes


@dataclass(frozen=True)
class Caps:
    """A plan for a batch: K and R of its requests, by number, where they differ from the plan's.

    widths   how far rows get with them, of one entry; alike: if all had the same, as far as these requests
             get
    cycles   mean R
    """

    plan: Plan
    most_drafts: dict[int, int]
    most_checks: dict[int, int]
    widths: Widths
    alike: Widths
    cycles: float


def make_caps(
    grid: PlanGrid,
    route: int,
    plan: Plan,
    estimates: Estimates,
    widths: Widths,
    shifts: tuple[tuple[Floats, Floats], tuple[Floats, Floats]],
    numbers: Sequence[int],
) -> Caps | None:
    """The plan of a batch, shared out; None if all requests get the same. A request whose own K is 0 is
    decoded plainly, until so little is known of it that it has the batch's again. widths: of all routes;
    shifts: of the requests' log odds, and the tries that these stand on, by tier.
    """
    kind = grid.routes[route]
    (shift, tries), (verify_shift, verify_tries) = shifts
    reach = expected_kept(estimates.kept[route], shift, kind.most_drafts)
    drafts = _shared(
        plan.num_draft_tokens, reach[:, 1 : plan.num_draft_tokens + 1], tries, 0, kind.most_drafts
    )
    checks = np.full(len(numbers), plan.num_checks)
    if plan.num_checks > 1:
        accepted = expected_kept(estimates.accepted[route], verify_shift, plan.window)[:, 1:]
        checks = _shared(plan.num_checks, accepted, verify_tries, 1, kind.most_checks)
    if (drafts == plan.num_draft_tokens).all() and (checks == plan.num_checks).all():
        return None
    most, most_checks = grid.round_up(route, max(1, int(drafts.max()))), int(checks.max())
    places = np.arange(grid.num_drafts + 1)
    may = places <= drafts[:, None]
    kept = np.zeros((len(numbers), len(places)))
    kept[:, : kind.most_drafts + 1] = reach
    one, share = widths.of(route), may.mean(axis=0)[None]
    alike = np.where(places <= plan.num_draft_tokens, kept, 0.0).mean(axis=0)[None]
    return Caps(
        plan=kind.plan(most, most_checks),
        most_drafts={
            number: value for number, value in zip(numbers, drafts.tolist(), strict=True) if value != most
        },
        most_checks={
            number: value
            for number, value in zip(numbers, checks.tolist(), strict=True)
            if value != most_checks
        },
        widths=Widths(
            one.computed * share,
            one.looked * share,
            one.found,
            np.where(may, kept, 0.0).mean(axis=0)[None],
            one.accepted,
        ),
        alike=Widths(one.computed, one.looked, one.found, alike, one.accepted),
        cycles=float(checks.mean()),
    )


def _shared(size: int, reach: Floats, tries: Floats, least: int, most: int) -> Ints:
    """size * own expected successes / the batch's, rounded; reach [n, places]: the chance to get so far."""
    expected = reach.sum(axis=1)
    own = np.rint(size * expected / max(expected.mean(), 1e-9)).astype(np.int64)
    return np.where(tries < _LEAST_TRIES, size, np.clip(own, least, min(most, _MOST_TIMES * size)))
