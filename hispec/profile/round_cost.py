"""What a round costs by the latency model, with any number of rows, from what was counted row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import SpeculativeConfig
from ..control.candidates import route_of
from ..control.route_costs import (
    BARE_SLOT,
    CHECK_SLOT,
    COLD_SLOT,
    DRAFT_SLOT,
    FEED_SLOT,
    FILL_SLOT,
    LOOKUP_SLOT,
    VERIFY_SLOT,
    slots_of,
)
from ..decoding.draft_tree import DraftTree
from ..latency.drift import STEADY, Drift
from ..latency.model import LatencyModel
from .recording import Ints
from .replay import Rounds

Floats = NDArray[np.float64]
_EXACT_ROWS = 8  # batches up to this size have the distribution of their widths; larger ones only the mean


class RoundCost(NamedTuple):
    """Milliseconds of an average round, and the model's layers that it runs (without a draft model's own)."""

    ms: float
    layers: float


class _Passes(NamedTuple):
    """Passes of one kind.

    stages   names of the stages that each of them runs
    counts   [positions]: passes that were counted, row by row
    chances  cycles or rounds of a row in which there might have been one
    takes    of a round: (how often there are so many of these, the share of rows that take part)
    layers   of the model, in a pass
    """

    stages: Sequence[str]
    counts: Ints
    chances: int
    takes: Sequence[tuple[float, float]]
    layers: int


class PassTimes:
    """Milliseconds of passes by the latency model, with rows that attend to context_len positions each, at a
    speed of the machine that has drifted so far since."""

    def __init__(self, latency: LatencyModel, context_len: int, drift: Drift = STEADY) -> None:
        self._latency, self._context_len, self._drift = latency, context_len, drift
        self._tables: dict[tuple[tuple[str, ...], int], Floats] = {}

    @property
    def is_static(self) -> bool:
        """Whether rounds have static shapes."""
        return self._latency.is_static

    def rows(self, num_rows: int) -> int:
        """Rows that a round of `num_rows` is run with, and costs."""
        return self._latency.rows(num_rows)

    def during(self, drift: Drift) -> PassTimes:
        """The same at another speed of the machine."""
        return PassTimes(self._latency, self._context_len, drift)

    def table(self, stages: Sequence[str], rows: int, most: int) -> Floats:
        """[most + 1]: of passes that run these stages over 0 to `most` positions of at most `rows` rows; none
        is run over 0. Raises ConfigError if the latency model lacks a stage."""
        key = tuple(stages), rows
        if key not in self._tables or len(self._tables[key]) <= most:
            widths = np.arange(most + 1.0)
            live = np.minimum(widths, float(rows))
            ms = sum(self._latency[name](live, widths, live * self._context_len) for name in stages)
            self._tables[key] = np.where(widths > 0, ms * self._drift(widths), 0.0)
        return self._tables[key][: most + 1]

    def one_each(self, stages: Sequence[str], rows: int) -> float:
        """Milliseconds of a pass over one position of each row."""
        return float(self.table(stages, rows, rows)[rows])


def round_costs(
    plan: SpeculativeConfig | None, rounds: Rounds, rows: Iterable[int], times: PassTimes, num_layers: int
) -> dict[int, RoundCost]:
    """{rows: cost of a round of so many rows}.

    In static shapes all rounds of a plan are alike. Else rows differ within a round: a pass is run if any row
    needs it, over the positions of all that do. What each of them needs is taken as an independent draw from
    what was counted; the cost of one row is the sum over the passes that were counted, exactly.
    """
    if plan is None:
        return {num: RoundCost(times.one_each(["plain"], times.rows(num)), num_layers) for num in rows}
    slots = slots_of(route_of(plan), ())
    if times.is_static:
        return {num: _static_cost(plan, slots, times.rows(num), times, num_layers) for num in rows}
    passes = list(_passes(plan, slots, rounds, num_layers))
    found = {}
    for num in rows:
        ms = layers = 0.0
        for each in passes:
            for count, share in each.takes:
                shares = _shares_of_batch(share * each.counts / each.chances, num)
                ms += count * float(shares @ times.table(each.stages, num, len(shares) - 1))
                layers += count * float(shares[1:].sum()) * each.layers
        if rounds.unchecked:  # verify from the draft's layer on, where no row has drafts, replaces two passes
            bare, check, verify = (
                times.one_each(slots[slot], num) for slot in (BARE_SLOT, CHECK_SLOT, VERIFY_SLOT)
            )
            if plan.draft.layer is None:  # a check's layers are the first
                check += times.one_each(slots[COLD_SLOT], num)
            ms += (rounds.unchecked / rounds.rounds) ** num * (bare - check - verify)
        if LOOKUP_SLOT in slots:
            ms += times.one_each(slots[LOOKUP_SLOT], num) * rounds.cycles / rounds.rounds
        found[num] = RoundCost(ms, layers)
    return found


def _static_cost(
    plan: SpeculativeConfig, slots: dict[int, list[str]], rows: int, times: PassTimes, num_layers: int
) -> RoundCost:
    """Of a round of static shapes: every pass takes its whole rectangle, and none is left out."""
    tree, draft = DraftTree.branches(plan.num_draft_tokens, plan.num_branches), plan.draft
    low = top = draft.layer or 0
    cycles, places = 1, tree.num_nodes
    ms, layers = 0.0, 0

    def add(slot: int, positions: int, of_layers: int) -> None:
        """A pass over so many positions of each row."""
        nonlocal ms, layers
        if slot in slots:
            ms += float(times.table(slots[slot], rows, rows * positions)[rows * positions])
            layers += of_layers

    if plan.check is not None:
        cycles, top = plan.num_checks, plan.check.layer
    for cycle in range(cycles):
        if DRAFT_SLOT in slots or cycle == 0:
            add(COLD_SLOT, 1, 0)
        add(LOOKUP_SLOT, 1, 0)
        add(FEED_SLOT, places, low)
        if DRAFT_SLOT in slots:
            depth = min(draft.num_exit_tokens or tree.depth, tree.depth)
            for level in range(depth):
                if level > 0 and plan.num_branches > 1:
                    over = rows * plan.num_branches
                    ms += float(times.table(_wide_draft(plan, slots), rows, over)[over])
                    layers += low
                else:
                    add(DRAFT_SLOT, 1, low)
            add(FILL_SLOT, plan.num_branches, low)
        add(CHECK_SLOT, places, top - low)
    # What a check has kept of a tree is a chain.
    tentative = places if plan.check is None else cycles * (plan.num_draft_tokens + 1)
    add(VERIFY_SLOT, tentative, num_layers - top)
    return RoundCost(ms, layers)


def _wide_draft(plan: SpeculativeConfig, slots: dict[int, list[str]]) -> Sequence[str]:
    """The stages of a draft pass over a level of a tree. Draft passes are measured with one position of each
    row; those of an exit over several cost what their parts do: the layers, then the exit's logits."""
    low = plan.draft.layer
    return slots[DRAFT_SLOT] if low is None else [f"fill/{low}", f"shadow/{low}"]


def _passes(
    plan: SpeculativeConfig, slots: dict[int, list[str]], rounds: Rounds, num_layers: int
) -> Iterator[_Passes]:
    """The kinds of passes of a plan's rounds. A check that was left out counts as one over one position."""
    cycles = rounds.cycles, [(rounds.cycles / rounds.rounds, 1.0)]
    if plan.check is not None and plan.check.continue_confidence is not None:
        # Rows of a batch stop in cycles of their own: a later one runs for as long as any row goes on.
        cycles = rounds.cycles, [(1.0, float(share)) for share in rounds.reached / rounds.rounds]
    low = top = plan.draft.layer or 0
    if COLD_SLOT in slots:  # of exits in each cycle, of checks of what was looked up once a round
        each = cycles if DRAFT_SLOT in slots else (rounds.rounds, [(1.0, 1.0)])
        yield _Passes(slots[COLD_SLOT], np.array([0, each[0]]), *each, 0)
    if FEED_SLOT in slots:
        yield _Passes(slots[FEED_SLOT], rounds.looked_up, *cycles, low)
    if DRAFT_SLOT in slots:
        *drafts, last = rounds.levels
        for level, counts in enumerate(drafts):
            is_wide = level > 0 and plan.num_branches > 1
            stages = _wide_draft(plan, slots) if is_wide else slots[DRAFT_SLOT]
            yield _Passes(stages, counts, *cycles, low)
        yield _Passes(slots[FILL_SLOT], last, *cycles, low)
    unchecked = np.zeros_like(rounds.verifies)
    unchecked[1] = rounds.unchecked
    if plan.check is not None:
        top = plan.check.layer
        yield _Passes(slots[CHECK_SLOT], rounds.checks + unchecked, *cycles, top - low)
    yield _Passes(
        slots[VERIFY_SLOT], rounds.verifies + unchecked, rounds.rounds, [(1.0, 1.0)], num_layers - top
    )


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
