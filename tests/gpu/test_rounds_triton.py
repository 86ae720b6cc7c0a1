"""What is fused of a round on a GPU against the same in torch; in Triton's interpreter where there is no
GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hispec.decoding import acceptance, stages
from hispec.decoding.accept_triton import coupled_chain
from hispec.decoding.batch import STATIC, RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.sampling.sampler import Sampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("rows", "q_len", "block_size"), [(1, 1, 16), (3, 4, 7), (5, 9, 1), (40, 5, 16)])
def test_addresses_are_those_of_torch(
    rows: int, q_len: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(rows)
    window, longest = q_len + 3, 40
    live = torch.rand(rows, q_len, generator=generator) < 0.6
    first = torch.randint(0, 3, (rows,), generator=generator)
    starts = torch.randint(0, longest, (rows,), generator=generator)
    width = (longest + window) // block_size + 2
    wide = torch.randperm(rows * width * 2, generator=generator).view(rows, width * 2)
    batch = RoundBatch(
        torch.zeros(rows, window + 1, dtype=torch.int64, device=DEVICE),
        starts.to(DEVICE),
        torch.full((rows,), window, device=DEVICE),
        torch.full((rows,), window, device=DEVICE),
        wide[:, :width].to(DEVICE),  # rows of a table may lie apart
        block_size,
        64,
        Sampler([None] * rows, 50, DEVICE),
        STATIC,
    )
    nodes, row = torch.arange(q_len, device=DEVICE), torch.arange(rows * q_len, device=DEVICE) // q_len
    found = []
    for runs in (False, True):
        monkeypatch.setattr(stages, "runs_triton", lambda device, runs=runs: runs)
        found.append(stages._addresses(batch, first.to(DEVICE), nodes, live.to(DEVICE), row))
    for name, twin, fused in zip(("first", "column", "flat", "position", "slot"), *found, strict=True):
        assert torch.equal(twin, fused), name


@pytest.mark.parametrize(("rows", "num_drafts"), [(1, 1), (4, 2), (30, 7), (200, 3), (64, 16)])
@pytest.mark.parametrize("has_unsure", [False, True])
@pytest.mark.parametrize("extra", [0, 1])
def test_coupled_acceptance_is_that_of_torch(
    rows: int, num_drafts: int, has_unsure: bool, extra: int
) -> None:
    """extra: tokens after the last draft; verify has none after a check."""
    generator = torch.Generator().manual_seed(rows + num_drafts)
    own = torch.randint(0, 2, (rows, num_drafts + extra), generator=generator).to(DEVICE)
    proposed = torch.randint(0, 2, (rows, num_drafts), generator=generator).to(DEVICE)
    proposed[0] = own[0, :num_drafts]
    num_proposed = torch.randint(0, num_drafts + 1, (rows,), generator=generator).to(DEVICE)
    num_proposed[0] = num_drafts
    unsure = (
        (torch.rand(rows, num_drafts + extra, generator=generator) < 0.3).to(DEVICE) if has_unsure else None
    )
    num_accepted, last, token = acceptance.coupled(
        own, proposed, num_proposed, DraftTree.chain(num_drafts), unsure
    )
    found = coupled_chain(own, proposed, num_proposed, unsure)
    assert torch.equal(found[0], num_accepted) and torch.equal(found[0], last)
    assert torch.equal(found[1], token)
    assert found[0][0] == num_drafts
