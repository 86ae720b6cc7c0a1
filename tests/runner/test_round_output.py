"""What a controller is told of rounds."""

from __future__ import annotations

import math
import random
import struct
from typing import Any, cast

import pytest
import torch

from hispec.config import PLAIN, Plan
from hispec.control.choice import Choice
from hispec.decoding.batch import RoundResult, Watch
from hispec.runner.round_output import RowOutcome, make_observation, pack, read_rows, unpack
from hispec.stats import RowRound


def test_cycles_that_did_not_run_were_not_tried() -> None:
    """Four requests of up to four cycles: one whose second check was unsure, one that took all, one without
    room for a third, and one whose first was unsure."""
    outcomes = [
        RowOutcome([1, 2], [RowRound(2, 5, 1, (2, 2), (2, 1), (False, True))]),
        RowOutcome([1], [RowRound(1, 4, 0, (2, 2, 2, 0), (0, 0, 0, 0), (False,) * 4)]),
        RowOutcome([1, 2, 3, 4], [RowRound(4, 4, 4, (2, 0), (2, 0), (False, False))]),
        RowOutcome([1], [RowRound(1, 1, 0, (2,), (0,), (False,))]),
    ]
    seen = make_observation(
        Choice(0, Plan(4, 15, 2, 4)),
        list(enumerate(outcomes)),
        caps=[12, 12, 12, 12],
        rooms=[50, 12, 4, 13],
        most_drafts=[2, 2, 2, 2],
        most_checks=[4, 4, 4, 4],
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
    assert seen.looked_up.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert seen.went_on.tolist() == [1, 3, 1, 0] and seen.asked.tolist() == [2, 3, 1, 1]


def test_each_of_several_rounds_could_draft_what_the_one_before_it_left_room_for() -> None:
    """Three rounds of a request that may still get eleven tokens, and three of one with room for many."""
    rounds = [
        RowRound(4, 4, 3, (4,), (3,), (False,)),
        RowRound(5, 4, 4, (4,), (4,), (True,)),
        RowRound(2, 1, 1, (1,), (1,), (False,)),
    ]
    tokens = list(range(11))
    seen = make_observation(
        Choice(0, Plan(4, None, 4)),
        [(7, RowOutcome(tokens, rounds)), (8, RowOutcome(tokens, rounds))],
        caps=[5, 5],
        rooms=[11, 50],
        most_drafts=[4, 4],
        most_checks=[1, 1],
        watched=(),
        context_tokens=400,
        seconds=0.1,
    )
    assert seen.numbers.tolist() == [7] * 3 + [8] * 3
    assert seen.caps.tolist() == [4, 4, 1, 4, 4, 4] and seen.drafted.tolist() == [4, 4, 1] * 2
    assert (seen.rounds, seen.tokens, seen.num_rows) == (3, 22, 2)
    assert seen.accepted.tolist() == [3, 4, 1] * 2 and seen.rows.tolist() == [7] * 3 + [8] * 3
    # Before the rounds each row has 0, 4 and 9 tokens more than at first.
    assert seen.context_tokens == pytest.approx(400 + 2 * (0 + 4 + 9) / 3)


@pytest.mark.parametrize("plan", [PLAIN, Plan(3, None, 4, 1), Plan(4, 15, 2, 4)], ids=str)
@pytest.mark.parametrize("num_watched", [0, 2])
def test_rows_are_read_as_they_were_packed(plan: Plan, num_watched: int) -> None:
    """Against reading each row by itself; cycles that a row had no part in come last, as -1, and plain
    decoding has none."""
    draws, checks = random.Random(0), plan.num_checks
    packed, expected = [], []
    for evidence in (0.0, -3.25, math.inf, math.nan, 1e-30, -0.0):
        cycles = 0 if plan.is_plain else draws.randint(0, checks)
        count = draws.randint(0, plan.window)
        tokens = [draws.randrange(1000) for _ in range(plan.window)]
        drafted, kept = ([draws.randrange(5) for _ in range(cycles)] for _ in range(2))
        source = [draws.randrange(2) for _ in range(cycles)]
        shadows = [draws.randrange(9) for _ in range(4 * num_watched)]
        (bits,) = struct.unpack("i", struct.pack("f", evidence))
        unused = checks - cycles
        packed.append(
            [
                *(count, 7, 5, *drafted, *([-1] * unused), *kept, *([0] * unused)),
                *(*source, *([0] * unused), bits, *tokens, *shadows),
            ]
        )
        (rounded,) = struct.unpack("f", struct.pack("f", evidence))
        of_row = RowRound(
            *(count, 7, 5, tuple(drafted), tuple(kept), tuple(each == 1 for each in source)),
            has_check=plan.check_layer is not None,
        )
        expected.append(RowOutcome(tokens[:count], (of_row,), shadows or (), rounded))
    found = unpack(torch.tensor(packed), plan)
    assert repr(found) == repr(expected), "and nan equals nan"


@pytest.mark.parametrize("plan", [PLAIN, Plan(3, None, 4, 1), Plan(4, 15, 2, 4)], ids=str)
@pytest.mark.parametrize("watched", [(), (3, 15)])
def test_a_round_on_a_cpu_is_read_as_if_it_were_packed(plan: Plan, watched: tuple[int, ...]) -> None:
    draws, rows, checks = torch.Generator().manual_seed(3), 7, plan.num_checks

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=draws)

    took_part = torch.arange(checks) < (0 if plan.is_plain else ints(checks + 1, rows, 1))
    watch = Watch(watched, rows, plan.window, torch.device("cpu")) if watched else None
    if watch is not None:
        watch.tokens.copy_(ints(3, *watch.tokens.shape))
        watch.drafts.copy_(ints(4, *watch.drafts.shape) - 1)
    result = RoundResult(
        tokens=ints(3, rows, plan.window + 1),
        counts=ints(plan.window + 1, rows),
        drafted=torch.where(took_part, ints(5, rows, checks), -1),
        kept=ints(5, rows, checks),
        source=ints(2, rows, checks),
        tentative=ints(9, rows),
        accepted=ints(9, rows),
        evidence=torch.tensor([0.0, -3.25, math.inf, math.nan, 1e-30, -0.0, 7.0]),
        logits=None,
        span=cast(Any, None),
        nodes=ints(2, rows, 1),
    )
    assert repr(read_rows(result, watch, plan)) == repr(unpack(pack(result, watch), plan))


@pytest.mark.parametrize("plan", [PLAIN, Plan(4, 15, 2, 2)], ids=str)
def test_rows_that_are_alike_share_their_counts(plan: Plan) -> None:
    """And no tokens: those of a row are its own."""
    width = 3 + 3 * plan.num_checks + 1 + plan.window
    packed = torch.ones(3, width, dtype=torch.int64)
    packed[2, 0] = 0
    first, second, third = unpack(packed, plan)
    assert first.rounds[0] is second.rounds[0] and third.rounds[0] is not first.rounds[0]
    assert first.token_ids == second.token_ids == [1] and third.token_ids == []
    assert first.token_ids is not second.token_ids
