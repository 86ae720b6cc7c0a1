"""What is fused of a round on a GPU against the same in torch; in Triton's interpreter where there is no
GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hispec.decoding import acceptance
from hispec.decoding.accept_triton import coupled_chain
from hispec.decoding.acceptance import Proposals
from hispec.decoding.batch import RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.decoding.stages import Stages
from hispec.runner import round_inputs
from tests.helpers.row_cases import Case, Run, assert_same

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("rows", "q_len", "block_size"), [(1, 1, 16), (3, 4, 7), (5, 9, 1), (40, 5, 16)])
def test_a_pass_has_the_tokens_and_addresses_of_torch(
    rows: int, q_len: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> tuple[RoundBatch, Run]:
        case = Case(rows, q_len + 3)
        of_rows, nodes = case.batch(block_size), torch.arange(q_len, device=DEVICE)
        first, num_live = case.ints(0, 3), case.ints(0, q_len + 2)

        def run(of_rows: RoundBatch) -> tuple[Tensor, ...]:
            span = Stages.select(of_rows, DraftTree.chain(q_len - 1), first, nodes, num_live)
            assert span.token_ids is not None and span.live is not None
            places = (span.rows, span.columns, span.flat, span.first, span.node, span.cell)
            return *places, span.live, span.token_ids, span.view.positions, span.view.slots

        return of_rows, run

    assert_same(make, monkeypatch)


@pytest.mark.parametrize("rows", [1, 3, 130])
def test_inputs_of_rows_are_taken_and_advanced_as_by_torch(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for runs in (False, True):
        monkeypatch.setattr(round_inputs, "runs_triton", lambda device, runs=runs: runs)
        case = Case(rows, 6)
        inputs, tokens = case.ints(0, 9, 6, rows + 7), case.ints(0, 50, rows, 7)
        counts, limits = case.ints(0, 7), case.ints(0, 9)
        round_inputs.advance(inputs, tokens, counts)
        advanced = tokens.clone()
        round_inputs.begin(inputs, tokens, limits)
        found.append((inputs, advanced, tokens, limits))
    for by_torch, by_triton in zip(*found, strict=True):
        assert torch.equal(by_torch, by_triton)
    assert (found[1][0][round_inputs.Input.ROOM, :rows] < 0).any() or rows == 1


@pytest.mark.parametrize(("rows", "num_drafts"), [(1, 1), (4, 2), (30, 7), (64, 16)])
@pytest.mark.parametrize("has_unsure", [False, True])
@pytest.mark.parametrize("extra", [0, 1])
def test_coupled_acceptance_is_that_of_torch(
    rows: int, num_drafts: int, has_unsure: bool, extra: int
) -> None:
    """extra: tokens after the last draft; verify has none after a check."""
    case, q_len = Case(rows, num_drafts + 3, num_drafts), num_drafts + extra
    of_rows, first = case.batch(), case.ints(0, 3)
    of_rows.tokens.copy_(case.ints(0, 2, *of_rows.tokens.shape))
    own, counts = case.ints(0, 2, rows, q_len), case.ints(0, num_drafts + 1)
    live = torch.arange(q_len, device=DEVICE) <= counts.unsqueeze(-1)
    live[-1] = rows == 1
    unsure = case.ints(0, 4, rows, q_len) == 0 if has_unsure else None
    proposals = Proposals(DraftTree.chain(num_drafts), first, counts)
    own[0, :num_drafts], counts[0], live[0] = proposals.tokens(of_rows)[0], num_drafts, True
    counts[-1] = counts[-1] * (rows == 1)
    num_accepted, last, token = acceptance.coupled(
        own.masked_fill(~live, 0), proposals.tokens(of_rows), counts, proposals.tree, unsure
    )
    flat = None if unsure is None else unsure.view(-1)
    found = coupled_chain(own.view(-1), live.view(-1), of_rows.tokens, first, counts, num_drafts, flat)
    assert torch.equal(found[0], num_accepted) and torch.equal(found[0], last)
    assert torch.equal(found[1], token)
    assert found[0][0] == num_drafts
