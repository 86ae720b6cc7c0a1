"""What a round costs by the latency model, with any number of rows, from what was counted row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import SpeculativeConfig
from ..control.candidates import route_of
from ..control.choice import Route
from ..control.route_costs import (
    BARE_SLOT,
    CHECK_SLOT,
    COLD_SLOT,
    DRAFT_SLOT,
    FEED_SLOT,
    FILL_SLOT,
    LOOKUP_SLOT,
    SLOTS,
    VERIFY_SLOT,
    layers_of,
    stages_by_slot,
    static_passes,
)
from ..latency.drift import STEADY, Drift
from ..latency.model import LatencyModel
from .recording import Ints
from .replay import Rounds

Floats = NDArray[np.float64]
_WIDE_SLOT = len(SLOTS)  # draft passes over a level of a tree
_EXACT_ROWS = 8  # batches up to this size have the distribution of their widths; larger ones only the mean


class RoundCost(NamedTuple):
    """Milliseconds of an average round, and the model's layers that it runs (without a draft model's own)."""

    ms: float
    layers: float


class _Passes(NamedTuple):
    """Passes of one kind.

    slot     by which stages and layers are known
    counts   [positions]: passes that were counted, row by row
    chances  cycles or rounds of a row in which there might have been one
    takes    of a round: (how often there are so many of these, the share of rows that take part)
    """

    slot: int
    counts: Ints
    chances: int
    takes: Sequence[tuple[float, float]]

    def rows_in(self, num: int) -> Floats:
        """[num]: rows in passes over 0 to `num` - 1 positions, each having as many as all on average."""
        with_any = self.counts[1:].sum()
        each = float(self.counts @ np.arange(len(self.counts))) / with_any if with_any else 1.0
        return np.arange(num) / each


class PassTimes:
    """Milliseconds of passes by the latency model, with rows that attend to context_len positions each, at a
    speed of the machine that has drifted so far since."""

    def __init__(self, latency: LatencyModel, context_len: int, drift: Drift = STEADY) -> None:
        self._latency, self._context_len, self._drift = latency, context_len, drift
        self._tables: dict[tuple[str, ...], tuple[Floats, Floats]] = {}

    @property
    def is_static(self) -> bool:
        """Whether rounds have static shapes."""
        return self._latency.is_static

    def during(self, drift: Drift) -> PassTimes:
        """The same at another speed of the machine."""
        return PassTimes(self._latency, self._context_len, drift)

    def table(self, stages: Sequence[str], most: int) -> tuple[Floats, Floats]:
        """[most + 1] each, of passes that run these stages over 0 to `most` positions, none being run over 0:
        what they take but for their rows, and what each row adds. Raises ConfigError if the latency model
        lacks a stage."""
        key = tuple(stages)
        if key not in self._tables or len(self._tables[key][0]) <= most:
            widths, each = np.arange(most + 1.0), float(self._context_len)
            costs, factors = [self._latency[name] for name in stages], self._drift(widths) * (widths > 0)
            one_more = sum(cost.row_ms + cost.context_ms * each for cost in costs)
            of_one = sum(cost(np.ones(most + 1), widths, np.full(most + 1, each)) for cost in costs)
            self._tables[key] = (of_one - one_more) * factors, one_more * factors
        fixed, of_row = self._tables[key]
        return fixed[: most + 1], of_row[: most + 1]

    def of_pass(self, stages: Sequence[str], rows: int, places: int = 1) -> float:
        """Milliseconds of a pass over so many positions of each row; in static shapes of the bucket's rows,
        of which those that stand for none attend to nothing. Raises ConfigError as `table`."""
        paid = float(self._latency.rows(rows))
        tokens, context_tokens = paid * places, float(rows * self._context_len)
        ms = sum(self._latency[name](paid, tokens, context_tokens) for name in stages)
        return float(ms * self._drift(tokens))


def round_costs(
    plan: SpeculativeConfig | None, rounds: Rounds, rows: Iterable[int], times: PassTimes, num_layers: int
) -> dict[int, RoundCost]:
    """{rows: cost of a round of so many rows}.

    In static shapes all rounds of a plan are alike. Else rows differ within a round: a pass is run if any row
    needs it, over the positions of all that do. What each of them needs is taken as an independent draw from
    what was counted; the cost of one row is the sum over the passes that were counted, exactly.
    """
    if plan is None:
        return {num: RoundCost(times.of_pass(["plain"], num), num_layers) for num in rows}
    route = route_of(plan)
    slots, layers_in = stages_by_slot(route, ()), np.append(layers_of(route, num_layers), route.draft_layer)
    # Draft passes are measured with one position of each row; those of an exit over several cost what their
    # parts do: the layers, then the exit's logits.
    slots[_WIDE_SLOT] = (
        [f"fill/{route.draft_layer}", f"shadow/{route.draft_layer}"]
        if route.traits.in_trunk
        else slots.get(DRAFT_SLOT, [])
    )
    if times.is_static:
        passes = [(slot, *each) for slot, each in _static_passes(plan, route).items() if slot in slots]
        in_all = float(sum(count * layers_in[slot] for slot, count, _ in passes))
        return {
            num: RoundCost(
                float(sum(count * times.of_pass(slots[slot], num, each) for slot, count, each in passes)),
                in_all,
            )
            for num in rows
        }
    kinds = [each for each in _passes(plan, rounds) if each.slot in slots]
    found = {}
    for num in rows:
        ms = layers = 0.0
        for each in kinds:
            for count, share in each.takes:
                shares = _shares_of_batch(share * each.counts / each.chances, num)
                fixed, of_row = times.table(slots[each.slot], len(shares) - 1)
                of_rows = each.rows_in(len(shares)) * of_row
                ms += count * float(shares @ (fixed + of_rows))
                layers += count * float(shares[1:].sum()) * layers_in[each.slot]
        if rounds.unchecked:  # verify from the draft's layer on, where no row has drafts, replaces two passes
            bare, check, verify = (
                times.of_pass(slots[slot], num) for slot in (BARE_SLOT, CHECK_SLOT, VERIFY_SLOT)
            )
            if not route.traits.in_trunk:  # a check's layers are the first
                check += times.of_pass(slots[COLD_SLOT], num)
            ms += (rounds.unchecked / rounds.rounds) ** num * (bare - check - verify)
        found[num] = RoundCost(ms, layers)
    return found


def _static_passes(plan: SpeculativeConfig, route: Route) -> dict[int, tuple[Any, Any]]:
    """As `static_passes`, with those of a tree's further levels."""
    checks, computed = route.most_checks, route.most_computed
    has_check, computes = plan.check is not None, route.traits.computes
    passes = static_passes(plan.num_draft_tokens, computed, checks, has_check, computes, plan.num_branches)
    if plan.num_branches > 1:
        passes[DRAFT_SLOT] = checks, 1
        passes[_WIDE_SLOT] = checks * (computed - 1), plan.num_branches
    return passes


def _passes(plan: SpeculativeConfig, rounds: Rounds) -> Iterator[_Passes]:
    """The kinds of passes of a plan's rounds, and some that its route has not. A check that was left out
    counts as one over one position."""
    cycles = rounds.cycles, [(rounds.cycles / rounds.rounds, 1.0)]
    if plan.check is not None and plan.check.continue_confidence is not None:
        # Rows of a batch stop in cycles of their own: a later one runs for as long as any row goes on.
        cycles = rounds.cycles, [(1.0, float(share)) for share in rounds.reached / rounds.rounds]
    once, every = (rounds.rounds, [(1.0, 1.0)]), np.array([0, rounds.cycles])
    yield _Passes(LOOKUP_SLOT, every, *cycles)
    if plan.draft.traits.computes:
        yield _Passes(COLD_SLOT, every, *cycles)
    else:  # of checks of what was looked up once a round
        yield _Passes(COLD_SLOT, np.array([0, rounds.rounds]), *once)
    yield _Passes(FEED_SLOT, rounds.looked_up, *cycles)
    *drafts, last = rounds.levels
    for level, counts in enumerate(drafts):
        yield _Passes(_WIDE_SLOT if level > 0 and plan.num_branches > 1 else DRAFT_SLOT, counts, *cycles)
    yield _Passes(FILL_SLOT, last, *cycles)
    unchecked = np.zeros_like(rounds.verifies)
    unchecked[1] = rounds.unchecked
    yield _Passes(CHECK_SLOT, rounds.checks + unchecked, *cycles)
    yield _Passes(VERIFY_SLOT, rounds.verifies + unchecked, *once)


def _shares_of_batch(of_row: Floats, rows: int) -> Floats:
    """[positions]: how often `rows` rows have so many in all, if each has as many as `of_row` [positions]
    says; 0 where none takes part."""
    most = int(of_row.nonzero()[0].max(initial=0))
    of_row = of_row[: most + 1].copy()
    of_row[0] = 1.0 - of_row[1:].sum()
    if rows == 1 or most == 0:
        return of_row
    size = rows * most + 1
    if of_row[most] == 1.0 or rows > _EXACT_ROWS:
        shares = np.zeros(size)
        shares[0] = max(0.0, of_row[0]) ** rows
        some = 1.0 - shares[0]
        mean = rows * float(of_row @ np.arange(most + 1)) / some
        below = min(int(mean), size - 1)
        shares[below] += some * (1.0 - (mean - below))
        if mean > below:
            shares[below + 1] += some * (mean - below)
        return shares
    return np.clip(np.fft.irfft(np.fft.rfft(of_row, size) ** rows, size), 0.0, None)
