"""What a plan's round costs, of any number of rows, from what was counted row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import SpeculativeConfig
from .costs import StageCosts
from .recording import Ints
from .replay import Rounds

Floats = NDArray[np.float64]
_EXACT_ROWS = (
    8  # up to which the widths of a batch are worked out as a distribution; beyond, the mean tells as much
)


class RoundCost(NamedTuple):
    """Of an average round: milliseconds, and layers of the model that are run (a draft model's own are none
    of them)."""

    ms: float
    layers: float


class _Kind(NamedTuple):
    """Passes of one kind.

    passes   [positions]: how many there are, row by row; out of how many chances (cycles or rounds) of a row
    times    chances in a round
    ms       [positions]: of one pass
    """

    passes: Ints
    chances: int
    times: float
    ms: Floats
    layers: int


def round_costs(
    plan: SpeculativeConfig | None, rounds: Rounds, rows: Iterable[int], costs: StageCosts, num_layers: int
) -> dict[int, RoundCost]:
    """{rows: cost of a round of so many rows}. Of one row it is the sum over the passes that were counted,
    exactly.

    Rows differ within a round: a pass is run if any row needs it, over the positions of all that do. What
    each of them needs is taken as an independent draw from what was counted. Raises ValueError for passes
    wider than what was measured.
    """
    if plan is None:
        return {num: RoundCost(costs.plain(num), num_layers) for num in rows}
    kinds = list(_kinds(plan, rounds, costs, num_layers))
    lookup = costs.lookup if plan.draft.traits.looks_up else None
    found = {}
    for num in rows:
        ms = layers = 0.0
        for kind in kinds:
            shares = _shares_of_batch(kind.passes / kind.chances, num)
            if len(shares) > len(kind.ms):
                raise ValueError(
                    f"a pass over {len(shares) - 1} positions was not measured; measured were up to"
                    f" {len(kind.ms) - 1}"
                )
            ms += kind.times * float(shares[1:] @ kind.ms[1 : len(shares)])
            layers += kind.times * float(shares[1:].sum()) * kind.layers
        if rounds.unchecked:
            ms, layers = _without_check(plan, rounds, num, costs, RoundCost(ms, layers))
        if lookup is not None:
            ms += lookup(num) * rounds.cycles / rounds.rounds
        found[num] = RoundCost(ms, layers)
    return found


def _kinds(plan: SpeculativeConfig, rounds: Rounds, costs: StageCosts, num_layers: int) -> Iterator[_Kind]:
    """Rounds that are not checked count as if they were, with one position."""
    cycles = rounds.cycles, rounds.cycles / rounds.rounds
    layer, drafts = plan.draft.layer or 0, len(rounds.levels) - 1
    if rounds.looked_up.any() and layer:
        yield _Kind(rounds.looked_up, *cycles, costs.fill[layer].table, layer)
    if rounds.levels.any():
        draft, fill = (
            (costs.draft_model, costs.fill_model)
            if plan.draft.layer is None
            else (costs.draft[layer], costs.fill[layer])
        )
        assert draft is not None and fill is not None
        extra = (
            _padded(costs.probability.table, draft.table)
            if costs.probability is not None and plan.draft_confidence is not None
            else 0.0
        )
        for level, passes in enumerate(rounds.levels):
            ms = fill.table if level == drafts else draft.table + extra
            if level == 0 and plan.num_branches > 1 and costs.ranks is not None:
                ms = ms + _padded(costs.ranks.table, ms)
            yield _Kind(passes, *cycles, ms, layer)
    unchecked = np.zeros_like(rounds.verifies)
    unchecked[1] = rounds.unchecked
    top = layer
    if plan.check is not None:
        top = plan.check.layer
        ms = costs.check[layer, top].table
        if plan.check.confidence is not None and costs.probability is not None:
            ms = ms + _padded(costs.probability.table, ms)
        yield _Kind(rounds.checks + unchecked, *cycles, ms, top - layer)
    yield _Kind(rounds.verifies + unchecked, rounds.rounds, 1.0, costs.verify[top].table, num_layers - top)


def _padded(values: Floats, like: Floats) -> Floats:
    """`values`, of the length of `like`; what is added at its end is wider than any pass that needs it."""
    return np.pad(values, (0, max(0, len(like) - len(values))), mode="edge")[: len(like)]


def _without_check(
    plan: SpeculativeConfig, rounds: Rounds, rows: int, costs: StageCosts, checked: RoundCost
) -> RoundCost:
    """Where no row has drafts, check and verify over one position of each are replaced by verify from the
    draft's layer on."""
    assert plan.check is not None
    share = (rounds.unchecked / rounds.rounds) ** rows
    layer, top = plan.draft.layer or 0, plan.check.layer
    check = costs.check[layer, top](rows)
    if plan.check.confidence is not None and costs.probability is not None:
        check += costs.probability(rows)
    return RoundCost(
        checked.ms + share * (costs.verify[layer](rows) - check - costs.verify[top](rows)), checked.layers
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
