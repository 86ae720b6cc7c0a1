"""What a controller is told of rounds."""

from __future__ import annotations

import math
import random
import struct

import pytest
import torch

from hispec.config import PLAIN, Plan
from hispec.control.choice import Choice
from hispec.runner.round_output import RowOutcome, make_observation, unpack


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


@pytest.mark.parametrize("plan", [PLAIN, Plan(3, None, 4, 1), Plan(4, 15, 2, 4)], ids=str)
@pytest.mark.parametrize("num_watched", [0, 2])
def test_rows_are_read_as_they_were_packed(plan: Plan, num_watched: int) -> None:
    """Against reading each row by itself; cycles that a row had no part in come last, as -1."""
    draws, checks = random.Random(0), plan.num_checks
    packed, expected = [], []
    for evidence in (0.0, -3.25, math.inf, math.nan, 1e-30, -0.0):
        cycles, count = draws.randint(0, checks), draws.randint(0, plan.window)
        tokens = [draws.randrange(1000) for _ in range(plan.window)]
        drafted, kept = ([draws.randrange(5) for _ in range(cycles)] for _ in range(2))
        source = [draws.randrange(2) for _ in range(cycles)]
        shadows = [draws.randrange(9) for _ in range(4 * num_watched)]
        (bits,) = struct.unpack("i", struct.pack("f", evidence))
        unused = checks - cycles
        packed.append(
            [
                *(count, 7, 5, bits, *drafted, *([-1] * unused), *kept, *([0] * unused)),
                *(*source, *([0] * unused), *tokens, *shadows),
            ]
        )
        (rounded,) = struct.unpack("f", struct.pack("f", evidence))
        expected.append(RowOutcome(tokens[:count], 7, 5, drafted, kept, source, shadows, rounded))
    found = unpack(torch.tensor(packed), plan)
    assert repr(found) == repr(expected), "and nan equals nan"
    by_source = [
        sum(one for one, who in zip([4, 2, 1], [0, 1, 1], strict=True) if who == each) for each in (0, 1)
    ]
    assert RowOutcome([], 0, 0, [], [], [0, 1, 1]).sum_by_source([4, 2, 1]) == by_source == [4, 3]
    assert RowOutcome([], 0, 0, [], [], [0, 0]).sum_by_source([4, 2]) == [6, 0]
