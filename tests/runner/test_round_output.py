"""What a controller is told of rounds."""

from __future__ import annotations

from hispec.config import Plan
from hispec.control.choice import Choice
from hispec.runner.round_output import RowOutcome, make_observation


def test_cycles_that_did_not_run_were_not_tried() -> None:
    """Four requests of up to four cycles: one whose second check was unsure, one that took all, one without
    room for a third, and one whose first was unsure."""
    outcomes = [
        RowOutcome([1, 2], 5, 1, [2, 2], [2, 1], [0, 1]),
        RowOutcome([1], 4, 0, [2, 2, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        RowOutcome([1, 2, 3, 4], 4, 4, [2, 0], [2, 0], [0, 0]),
        RowOutcome([1], 1, 0, [2], [0], [0]),
    ]
    seen = make_observation(
        Choice(0, Plan(4, 15, 2, 4)),
        list(enumerate(outcomes)),
        limits=[12, 12, 4, 12],
        most_drafts=[2, 2, 2, 2],
        watched=(),
        context_tokens=400,
        seconds=0.1,
    )
    assert list(zip(seen.numbers.tolist(), seen.caps.tolist(), seen.drafted.tolist(), strict=True)) == [
        *[(0, 2, 2), (0, 2, 2)],
        *[(1, 2, 2), (1, 2, 2), (1, 2, 2), (1, 2, 0)],
        (2, 2, 2),  # in its last cycle it had room for no draft
        (3, 2, 2),
    ]
    assert seen.rows.tolist() == [0, 1, 2, 3] and seen.tentative.tolist() == [5, 4, 4, 1]
    assert seen.went_on.tolist() == [1, 3, 1, 0] and seen.asked.tolist() == [2, 3, 1, 1]
