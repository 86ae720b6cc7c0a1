"""Prompt lookup while the host is a round behind: texts that are extended on the device, and written again
once the host knows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hispec.drafters.lookup import Lookup
from tests.drafters.test_lookup import MAKERS

ROWS, MAX_LEN, WINDOW = 4, 60, 5
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def proposals(lookup: Lookup, last: list[int]) -> list[list[int]]:
    tokens = torch.zeros(ROWS, WINDOW + 1, dtype=torch.int64)
    tokens[:, 0] = torch.tensor(last)
    counts = lookup.propose(
        torch.arange(ROWS), tokens, torch.zeros(ROWS, dtype=torch.int64), torch.full((ROWS,), WINDOW)
    )
    return [row[1 : count + 1] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]


def window_of(token_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """A round's tokens, of which the first `counts` after column 0 are committed; what follows them is
    not."""
    tokens = torch.full((len(token_ids), WINDOW + 1), 9)
    for row, ids in enumerate(token_ids):
        tokens[row, 1 : len(ids) + 1] = torch.tensor(ids, dtype=torch.int64)
    return tokens, torch.tensor([len(ids) for ids in token_ids])


@both
@pytest.mark.parametrize("seed", range(10))
def test_extending_is_appending_that_the_host_does_not_know_of(make: Any, seed: int) -> None:
    generator = random.Random(seed)
    behind, level = make(ROWS, MAX_LEN, 1, 3), make(ROWS, MAX_LEN, 1, 3)
    texts = [[generator.randrange(4) for _ in range(generator.randrange(1, 9))] for _ in range(ROWS)]
    for row, text in enumerate(texts):
        behind.reset(row, text)
        level.reset(row, text)
    order = generator.sample(range(ROWS), ROWS)  # rows of the index, by row of the batch
    for _ in range(6):
        new = [[generator.randrange(4) for _ in range(generator.randrange(WINDOW + 1))] for _ in range(ROWS)]
        tokens, counts = window_of(new)
        behind.extend(torch.tensor(order), tokens, counts)
        for index_row, ids in zip(order, new, strict=True):
            level.append(index_row, ids)
            texts[index_row] += ids
        assert proposals(behind, [text[-1] for text in texts]) == proposals(
            level, [text[-1] for text in texts]
        )
        if generator.random() < 0.4:  # the host has read all that was committed
            for row, text in enumerate(texts):
                behind.reset(row, text)
            assert proposals(behind, [text[-1] for text in texts]) == proposals(
                level, [text[-1] for text in texts]
            )


@both
def test_a_row_that_is_reset_forgets_what_it_was_extended_by(make: Any) -> None:
    lookup = make(ROWS, MAX_LEN, 1, 3)
    for row in range(ROWS):
        lookup.reset(row, [1, 2, 3])
    lookup.extend(torch.arange(ROWS), *window_of([[1, 2, 3], [5], [], [4]]))
    lookup.reset(1, [7, 8, 7])
    assert lookup.length(1) == 3
    assert proposals(lookup, [3, 7, 3, 4])[1] == [8, 7, 8, 7, 8]
    lookup.append(1, [9, 7])
    assert lookup.length(1) == 5 and proposals(lookup, [3, 7, 3, 4])[1][:2] == [9, 7]


@both
def test_a_text_that_is_extended_beyond_its_end_stops_there(make: Any) -> None:
    """A round that was launched for a request that has ended may commit more than it could ever have had."""
    lookup = make(ROWS, 8, 1, 3)
    for row in range(ROWS):
        lookup.reset(row, [1, 2, 1, 2, 1, 2])
    lookup.extend(torch.arange(ROWS), *window_of([[1, 2, 1, 2, 1], [1], [], [1, 2]]))
    lookup.extend(torch.arange(ROWS), *window_of([[1, 2, 1, 2, 1], [2], [], [1, 2]]))
    assert proposals(lookup, [2] * ROWS) == [[1, 2, 1, 2, 1]] * ROWS


@both
def test_rows_of_padding_share_a_place_and_change_nothing(make: Any) -> None:
    lookup = make(ROWS, MAX_LEN, 1, 3)
    for row in range(ROWS):
        lookup.reset(row, [1, 2, 1])
    before = proposals(lookup, [1] * ROWS)
    lookup.extend(torch.tensor([0, 0, 0, 2]), *window_of([[2, 1], [], [], [3]]))
    after = proposals(lookup, [1, 1, 3, 1])
    assert (after[1], after[3]) == (before[1], before[3])
    assert after[0] == [2, 1, 2, 1, 2] and after[2] == []


@both
def test_a_text_longer_than_what_is_searched_within_is_left_alone(make: Any) -> None:
    """A row that is still computing its prompt may be longer than any that takes part; others see all of
    theirs."""
    lookup = make(ROWS, MAX_LEN, 1, 3)
    for row, length in enumerate((8, 50, 3, 11)):
        lookup.reset(row, [step % 4 for step in range(length)])
    tokens = torch.zeros(ROWS, WINDOW + 1, dtype=torch.int64)
    tokens[:, 0] = torch.tensor([3, 1, 2, 2])
    most = torch.tensor([WINDOW, 0, WINDOW, WINDOW])
    counts = lookup.propose(torch.arange(ROWS), tokens, torch.zeros(ROWS, dtype=torch.int64), most, 12)
    assert counts.tolist() == [WINDOW, 0, 0, WINDOW]
    assert tokens[0].tolist() == [3, 0, 1, 2, 3, 0] and tokens[3].tolist() == [2, 3, 0, 1, 2, 3]
