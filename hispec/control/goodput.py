"""What plans promise: tokens and milliseconds of a round, of all candidates at once [SmartSpec §4; HiSpec's
three tiers by its own rule]."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..config import PLAIN, Plan
from ..latency.model import LatencyModel
from .acceptance_model import MOST_CHECKS, MOST_TENTATIVE, Estimates
from .choice import Ints, Route
from .hazards import Floats, survival
from .route_costs import (
    BARE_SLOT,
    CHECK_SLOT,
    COLD_SLOT,
    DRAFT_SLOT,
    FEED_SLOT,
    FILL_SLOT,
    LOOKUP_SLOT,
    SLOTS,
    VERIFY_SLOT,
    Passes,
    PlanCosts,
    stages_by_slot,
    static_passes,
)

_DRAFTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_FEW_DRAFTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
Bools = NDArray[np.bool_]
_CHECKS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Widths:
    """How far rows get, by place from 0 (sure) on; one entry per route, the last of which is plain
    decoding's.

    computed, looked   [entries, drafts + 1]: drafts offered in a cycle, by who drafts
    found              [entries]: share of cycles that prompt lookup serves
    kept               [entries, drafts + 1]: drafts kept in a cycle
    accepted           [entries, MOST_TENTATIVE + 1]: tentative tokens accepted by verify
    cycles             [entries, MOST_CHECKS]: further cycles, if there is room for them
    """

    computed: Floats
    looked: Floats
    found: Floats
    kept: Floats
    accepted: Floats
    cycles: Floats

    def of(self, entry: int) -> Widths:
        """Of one route alone."""
        at = slice(entry, entry + 1)
        return Widths(*(each[at] for each in vars(self).values()))


@dataclass(frozen=True)
class Sizes:
    """Plans, by the entry of their widths, the index of their route (the last = plain), K, R, and whether
    there is a check."""

    entry: Ints
    route: Ints
    drafts: Ints
    checks: Ints
    has_check: Bools

    @cached_property
    def checked(self) -> Ints:
        """Which have a check."""
        return np.flatnonzero(self.has_check)

    @cached_property
    def checked_cycles(self) -> tuple[Ints, Ints, list[tuple[int, Ints, Ints]]]:
        """Of those with a check: entry and K of each kind of cycle; and by R, which of the plans, and the
        cycles of each."""
        kinds = np.stack([self.entry[self.checked], self.drafts[self.checked]])
        cycles, kind = np.unique(kinds, axis=1, return_inverse=True)
        checks = self.checks[self.checked]
        by_checks = [
            (int(count), at, kind.reshape(-1)[at])
            for count in np.unique(checks)
            for at in [np.flatnonzero(checks == count)]
        ]
        return cycles[0], cycles[1], by_checks


class PlanGrid:
    """The plans that `routes` allow; plain decoding is the first of them.

    Raises ConfigError if the latency model lacks a stage that one of them runs.
    """

    def __init__(
        self, routes: Sequence[Route], latency: LatencyModel, along: Collection[int] = frozenset()
    ) -> None:
        self.routes, self._latency = tuple(routes), latency
        self.num_drafts = max((route.most_drafts for route in routes), default=1)
        kinds = [*routes, None]
        self._slots = [stages_by_slot(route, along) for route in kinds]
        self._looks_up = np.array([route is not None and not route.traits.computes for route in kinds])
        self._in_trunk = np.array([route is not None and route.traits.in_trunk for route in kinds])
        self._computed = np.array([route.most_computed if route else 0 for route in kinds], np.int64)
        self._has_check = np.array(
            [route is not None and route.check_layer is not None for route in kinds], bool
        )
        plans = [(len(routes), 0, 1)]
        for index, route in enumerate(routes):
            plans += [
                (index, drafts, checks)
                for drafts in self._sizes(route.most_drafts)
                for checks in _checks_of(route, drafts)
            ]
        route_of, drafts, checks = np.array(plans, np.int64).T
        self.sizes = Sizes(route_of, route_of, drafts, checks, self._has_check[route_of])
        self._costs, self._one = (
            PlanCosts(self._slots, latency, route_of),
            [PlanCosts([each], latency, np.zeros(1, np.int64)) for each in self._slots],
        )

    def __len__(self) -> int:
        return len(self.sizes.route)

    def _sizes(self, most: int) -> list[int]:
        """K of candidates. Each is a shape of its own where shapes are static."""
        return sorted(
            {size for size in (_FEW_DRAFTS if self._latency.is_static else _DRAFTS) if size < most} | {most}
        )

    def route(self, index: int) -> int | None:
        """The route of a candidate; None = plain decoding."""
        return int(self.sizes.route[index]) if index else None

    def plan(self, index: int) -> Plan:
        route = self.route(index)
        return (
            PLAIN
            if route is None
            else self.routes[route].plan(int(self.sizes.drafts[index]), int(self.sizes.checks[index]))
        )

    def telling(self, index: int, least: int) -> int:
        """The same candidate with so many drafts at least, if the route allows."""
        same = (self.sizes.route == self.sizes.route[index]) & (self.sizes.checks == self.sizes.checks[index])
        fits = np.flatnonzero(same & (self.sizes.drafts >= max(least, self.sizes.drafts[index])))
        return int(fits[0]) if len(fits) else index

    def round_up(self, route: int, num_drafts: int) -> int:
        """The least K among the route's candidates that is no less."""
        most = self.routes[route].most_drafts
        return next((size for size in self._sizes(most) if size >= num_drafts), most)

    def name(self, route: int | None, plan: Plan) -> str:
        if route is None:
            return "plain"
        checks = f" R={plan.num_checks}" if plan.check_layer is not None else ""
        return f"{self.routes[route]} K={plan.num_draft_tokens}{checks}"

    def one(self, route: int | None, plan: Plan, num: int = 1) -> Sizes:
        """A plan, with `num` entries of widths of its own."""
        at = len(self.routes) if route is None else route
        routes, drafts, checks = (np.full(num, each) for each in (at, plan.num_draft_tokens, plan.num_checks))
        return Sizes(np.arange(num), routes, drafts, checks, self._has_check[routes])

    def widths(self, estimates: Estimates) -> Widths:
        """With an entry for plain decoding, which nothing is drafted in."""
        none = np.zeros((1, self.num_drafts))
        computed, looked, kept = (
            survival(np.concatenate([each, none]))
            for each in (estimates.computed, estimates.looked, estimates.kept)
        )
        computed = np.where(np.arange(self.num_drafts + 1) <= self._computed[:, None], computed, 0.0)
        accepted = survival(np.concatenate([estimates.accepted, np.zeros((1, MOST_TENTATIVE))]))
        found = np.concatenate([estimates.found, [0.0]]) + self._looks_up
        cycles = survival(np.concatenate([estimates.goes_on, np.ones((1, MOST_CHECKS - 1))]))
        return Widths(computed, looked, found, kept, accepted, cycles)

    def tokens(self, widths: Widths, sizes: Sizes | None = None) -> Floats:
        """[plans]: tokens that a row is expected to commit in a round: 1 + sum over j of P(j drafts kept);
        with a check, as `_checked_tokens`."""
        sizes = sizes or self.sizes
        kept = np.cumsum(widths.kept, axis=1)[sizes.entry, sizes.drafts]
        if len(sizes.checked):
            kept[sizes.checked] = _checked_tokens(widths, sizes)
        return kept

    def milliseconds(
        self, widths: Widths, rows: int, context_tokens: float, sizes: Sizes | None = None
    ) -> Floats:
        """[plans]: a round over so many rows, which attend to so many positions in all; sizes: as from
        `one`."""
        costs = self._costs if sizes is None else self._one[int(sizes.route[0])]
        sizes = sizes or self.sizes
        passes = (
            self._static_passes(rows, sizes)
            if self._latency.is_static
            else self._packed_passes(widths, rows, sizes)
        )
        return costs.milliseconds(passes, rows, self._latency.rows(rows), context_tokens)

    def of_batch(self, route: int, plan: Plan, widths: Widths, context_tokens: float) -> tuple[float, float]:
        """A round of rows that differ, in packed shapes; widths: an entry of each -> (tokens of a row,
        milliseconds)."""
        rows = len(widths.found)
        sizes = self.one(route, plan, rows)
        passes = self._packed_passes(widths, None, sizes)
        # Each is run once for all of them.
        passes = np.stack([passes[0, :, :1], *passes[1:].sum(axis=2, keepdims=True)])
        (milliseconds,) = self._one[route].milliseconds(passes, rows, rows, context_tokens)
        return float(self.tokens(widths, sizes).mean()), float(milliseconds)

    def _packed_passes(self, widths: Widths, rows: int | None, sizes: Sizes) -> Passes:
        """[3, slots, plans]: passes of a round by slot, rows and positions in them: the live ones. A pass is
        run if a row is in it. rows: as `_any_row`; with None, [plans] are the rows."""
        num_rows = 1 if rows is None else rows
        entry, last, out = sizes.entry, sizes.checks - 1, np.zeros((3, len(SLOTS), len(sizes.route)))
        found, drafts = widths.found[entry], np.minimum(sizes.drafts, self._computed[sizes.route])
        of_rows = np.cumsum(widths.cycles, axis=1)[entry, last] * num_rows  # cycles of all of them
        alive = widths.computed * (1.0 - widths.found)[:, None]
        any_alive = _any_row(widths, rows, sizes, alive)
        before = np.maximum(drafts - 1, 0)
        has_drafts = drafts > 0
        out[0, DRAFT_SLOT] = np.where(has_drafts, np.cumsum(any_alive, axis=2)[entry, last, before], 0.0)
        out[1:, DRAFT_SLOT] = np.where(has_drafts, np.cumsum(alive, axis=1)[entry, before], 0.0) * of_rows
        out[0, FILL_SLOT] = any_alive[entry, last, drafts]
        out[1:, FILL_SLOT] = alive[entry, drafts] * of_rows
        looked = (
            np.cumsum(widths.looked, axis=1)[entry, sizes.drafts] * found
        )  # the place before them counted
        computed = np.cumsum(widths.computed, axis=1)[entry, drafts] * (1.0 - found)
        chances = np.stack([np.ones_like(widths.found), widths.found], axis=1)
        run, fed = _any_row(widths, rows, sizes, chances)[entry, last].T
        out[0, LOOKUP_SLOT], out[1:, LOOKUP_SLOT] = run, of_rows
        out[:, FEED_SLOT] = fed, found * of_rows, looked * of_rows
        has_check = sizes.has_check
        places = looked + computed
        tentative = np.where(has_check, np.cumsum(widths.kept, axis=1)[entry, sizes.drafts], places)
        # Without a draft in any row a single check is left out, and verify resumes where the drafter stopped.
        first = np.minimum(sizes.drafts, 1)
        offered = widths.looked[entry, first] * found + widths.computed[entry, first] * (1.0 - found)
        bare = np.where(has_check & (sizes.checks == 1), 1.0 - _any(offered, rows), 0.0)
        # The first pass over the first layers is an exit's, in every cycle; or else a check's: after a draft
        # model in every cycle, after prompt lookup in the first.
        cold = np.where(self._looks_up[sizes.route], has_check, run)
        cold *= np.where(self._in_trunk[sizes.route], 1.0, 1.0 - bare)
        out[:, COLD_SLOT] = cold * np.array([[1.0], [num_rows], [num_rows]])
        skipped = bare * num_rows
        out[:, CHECK_SLOT] = run * (1.0 - bare), of_rows * (1.0 - bare), of_rows * places - skipped
        out[:, BARE_SLOT] = bare, skipped, skipped
        judged = np.where(has_check, of_rows, num_rows) * tentative
        out[:, VERIFY_SLOT] = 1.0 - bare, num_rows - skipped, judged - skipped
        return out

    def _static_passes(self, rows: int, sizes: Sizes) -> Passes:
        """As `_packed_passes`: every pass takes its whole rectangle, and none is left out."""
        rows, out = self._latency.rows(rows), np.zeros((3, len(SLOTS), len(sizes.route)))
        computed = np.minimum(sizes.drafts, self._computed[sizes.route])
        computes = ~self._looks_up[sizes.route]
        passes = static_passes(sizes.drafts, computed, sizes.checks, sizes.has_check, computes)
        for slot, (num, places) in passes.items():
            out[0, slot], out[1, slot], out[2, slot] = num, num * rows, num * rows * places
        return out


def _any(chances: Floats, rows: int | None) -> Floats:
    """[entries, ...]: that some row does what each of so many rows does with these chances, by entry; None:
    each entry is one row, all of one batch."""
    if rows is None:
        return np.broadcast_to(1.0 - np.prod(1.0 - chances, axis=0), chances.shape)
    return 1.0 - (1.0 - chances) ** rows


def _any_row(widths: Widths, rows: int | None, sizes: Sizes, chances: Floats) -> Floats:
    """[entries, R, n]: in how many of the first 1 to R cycles some row does what a row that takes the cycle
    does with these chances [entries, n]."""
    takes = widths.cycles[:, : int(sizes.checks.max()), None] * chances[:, None]
    return np.cumsum(_any(takes, rows), axis=1)


def _checks_of(route: Route, num_drafts: int) -> list[int]:
    """R of candidates."""
    if route.check_layer is None:
        return [1]
    sizes = sorted({size for size in _CHECKS if size < route.most_checks} | {route.most_checks})
    return [size for size in sizes if size == 1 or size * (num_drafts + 1) <= MOST_TENTATIVE]


def _checked_tokens(widths: Widths, sizes: Sizes) -> Floats:
    """Of the plans with a check.

    A cycle puts 1 + m tokens before verify, of which m were drafted and kept; N is the sum of R of them; a
    row commits min(A + 1, N), where A of them are accepted: E = sum over i >= 1 of P(N >= i) P(A >= i - 1), N
    and A taken for independent. So E is the mean over N of V(N) = sum over i <= N of P(A >= i - 1), by
    Parseval's theorem a sum over the spectra of V and of N's distribution, and that one is of R cycles the
    Rth power. Where a further cycle follows only at times, each adds its share of what it would add.
    """
    entry, drafts, by_checks = sizes.checked_cycles
    size = 1 << int((sizes.checks * (sizes.drafts + 1))[sizes.checked].max()).bit_length()
    lengths = np.arange(widths.kept.shape[1])
    chance = np.zeros((len(entry), max(size, len(lengths)) + 1))
    reach = chance[:, 1 : len(lengths) + 1]
    reach[:] = np.where(lengths <= drafts[:, None], widths.kept[entry], 0.0)
    reach[:, :-1] -= reach[:, 1:].copy()
    spectrum = np.fft.rfft(chance[:, :size], axis=1)
    value = np.zeros((len(widths.accepted), size))
    known = min(size - 1, widths.accepted.shape[1])
    value[:, 1 : known + 1] = np.cumsum(widths.accepted[:, :known], axis=1)
    value[:, known + 1 :] = value[:, [known]]
    twice = np.full(size // 2 + 1, 2.0 / size)
    twice[0] = twice[-1] = 1.0 / size
    values = (np.conj(np.fft.rfft(value, axis=1)) * twice)[entry]
    out, power, done = np.zeros(len(sizes.checked)), np.ones_like(spectrum), 0
    reach, mean, last = widths.cycles[entry], np.zeros(len(entry)), np.zeros(len(entry))
    for count, at, kind in by_checks:
        for cycle in range(done, count):
            power = power * spectrum
            tokens = (power * values).real.sum(axis=1)
            mean, last = mean + reach[:, cycle] * (tokens - last), tokens
        done = count
        out[at] = mean[kind]
    return out
