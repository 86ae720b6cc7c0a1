"""The kernel of coupled acceptance on a CPU says what the operations of torch say."""

from __future__ import annotations

import pytest
import torch

from hispec.decoding import acceptance
from hispec.decoding.accept_numba import coupled_chain
from hispec.decoding.draft_tree import DraftTree

WINDOW = 12


@pytest.mark.parametrize(("rows", "num_drafts"), [(1, 0), (1, 1), (5, 2), (40, 7)])
@pytest.mark.parametrize("has_unsure", [False, True])
@pytest.mark.parametrize("extra", [0, 1])
def test_packed_chains_are_accepted_as_by_torch(
    rows: int, num_drafts: int, has_unsure: bool, extra: int
) -> None:
    """extra: tokens fed after the last draft; verify has none after a check."""
    generator = torch.Generator().manual_seed(rows + num_drafts)
    most = num_drafts + extra
    counts = torch.randint(0, num_drafts + 1, (rows,), generator=generator)
    counts[0] = num_drafts
    own = torch.randint(0, 2, (rows, most), generator=generator)
    tokens = torch.randint(0, 2, (rows, WINDOW + 1), generator=generator)
    first = torch.randint(0, WINDOW - num_drafts, (rows,), generator=generator)
    unsure = torch.rand(rows, most, generator=generator) < 0.3 if has_unsure else None
    columns = first.unsqueeze(-1) + torch.arange(1, num_drafts + 1)
    tokens[0, columns[0]] = own[0, :num_drafts]  # all of them are right
    fed = counts + extra
    live = torch.arange(most) < fed.unsqueeze(-1)
    cu_q_lens = torch.nn.functional.pad(fed.cumsum(0), (1, 0))
    num_accepted, token = coupled_chain(
        own[live], cu_q_lens, tokens, first, counts, None if unsure is None else unsure[live]
    )
    if most == 0:
        assert num_accepted.tolist() == [0] * rows
        return
    expected = acceptance.coupled(own, tokens.gather(1, columns), counts, DraftTree.chain(num_drafts), unsure)
    assert torch.equal(num_accepted, expected[0]) and torch.equal(num_accepted, expected[1])
    assert num_accepted[0] == num_drafts
    # Where all that was fed is accepted there is no token of the tier's own.
    has_own = num_accepted < fed
    assert torch.equal(token[has_own], expected[2][has_own])


def test_a_row_that_was_not_fed_takes_nothing_of_the_row_beside_it() -> None:
    own = torch.tensor([7, 8])
    tokens = torch.tensor([[1, 5, 0], [2, 7, 8], [3, 7, 8]])
    cu_q_lens, first = torch.tensor([0, 0, 2, 2]), torch.tensor([0, 0, 0])
    num_accepted, _ = coupled_chain(own, cu_q_lens, tokens, first, torch.tensor([2, 1, 2]), None)
    assert num_accepted.tolist() == [0, 1, 0]
