"""What is fused of a round on a GPU against the same in torch; in Triton's interpreter where there is no
GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hispec.decoding import acceptance, batch, row_steps, stages
from hispec.decoding.accept_triton import coupled_chain
from hispec.decoding.acceptance import Proposals, Verdict
from hispec.decoding.batch import STATIC, RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.decoding.row_steps import Notes
from hispec.decoding.stages import Stages
from hispec.runner import round_inputs
from hispec.sampling.logits import Logits
from hispec.sampling.sampler import Sampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TREES = [DraftTree.chain(4), DraftTree.chain(1), DraftTree.branches(2, 3)]
Run = Callable[[RoundBatch], Any]


class Case:
    """Rows of random numbers; the same again for the same seed."""

    def __init__(self, rows: int, window: int, seed: int = 0, vocab: int = 50) -> None:
        self.rows, self.window, self.vocab = rows, window, vocab
        self._generator = torch.Generator().manual_seed(seed * 1000 + rows)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape or (self.rows,), generator=self._generator).to(DEVICE)

    def flags(self, *shape: int) -> Tensor:
        return self.ints(0, 2, *shape).bool()

    def batch(self, block_size: int = 16) -> RoundBatch:
        width = (40 + self.window) // block_size + 2
        wide = torch.randperm(self.rows * width * 2, generator=self._generator).view(self.rows, width * 2)
        return RoundBatch(
            self.ints(-3, self.vocab + 3, self.rows, self.window + 1),
            self.ints(0, 40),
            self.ints(0, self.window + 1),
            self.ints(0, 4),
            wide[:, :width].to(DEVICE),  # rows of a table may lie apart
            block_size,
            64,
            Sampler([None] * self.rows, self.vocab, DEVICE),
            STATIC,
        )


def assert_same(make: Callable[[], tuple[RoundBatch, Run]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """That torch and Triton give the same bits, and leave the same tokens and limits -> what they give."""
    found = []
    for runs in (False, True):
        for module in (batch, stages):
            monkeypatch.setattr(module, "runs_triton", lambda device, runs=runs: runs)
        of_rows, run = make()
        result = run(of_rows)
        found.append((*result, of_rows.tokens, of_rows.limits))
    for number, (by_torch, by_triton) in enumerate(zip(*found, strict=True)):
        assert torch.equal(by_torch, by_triton) and by_torch.dtype == by_triton.dtype, number
    return found[1]


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


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_values_are_put_where_torch_puts_them(num: int, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> tuple[RoundBatch, Run]:
        case = Case(7, 12)
        of_rows, nodes = case.batch(), torch.arange(2, device=DEVICE)
        first, num_live, values = case.ints(0, 2), case.ints(0, 3), case.ints(0, 50, 14, num)

        def run(of_rows: RoundBatch) -> tuple[Tensor, ...]:
            span = Stages.select(of_rows, DraftTree.chain(1), first, nodes, num_live)
            apart = (span.columns * num).unsqueeze(-1) + torch.arange(num, device=DEVICE)
            span.put(of_rows.tokens, apart, values, shift)
            return ()

        return of_rows, run

    assert_same(make, monkeypatch)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_live_nodes_are_counted_as_by_torch(
    tree: DraftTree, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> tuple[RoundBatch, Run]:
        case = Case(rows, 9)
        of_rows, first = case.batch(), case.ints(0, 9)
        return of_rows, lambda rows: [row_steps.count_live(rows, first, tree, less) for less in (0, 1)]

    live, allowed, *_ = assert_same(make, monkeypatch)
    assert torch.equal(allowed, (live - 1).clamp(min=0))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("has_sources", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_drafts_are_cut_and_noted_as_by_torch(
    tree: DraftTree, has_sources: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> tuple[RoundBatch, Run]:
        case = Case(rows, 9)
        of_rows, proposals = case.batch(), Proposals(tree, case.ints(0, 5), case.ints(-1, 8))
        notes, source = Notes.none(rows, 2, DEVICE), case.ints(0, 2) if has_sources else 1

        def run(of_rows: RoundBatch) -> tuple[Tensor, ...]:
            cut = row_steps.take_drafts(of_rows, proposals, source, notes, 1, case.vocab)
            return *cut, notes.drafted, notes.kept, notes.source

        return of_rows, run

    _, num_live, *_, tokens, limits = assert_same(make, monkeypatch)
    assert tokens.min() >= 0 and tokens.max() < 50 and (num_live <= limits).all()


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", [1, 150])
def test_a_check_ends_as_by_torch(is_gated: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> tuple[RoundBatch, Run]:
        case = Case(rows, 8)
        of_rows, first, notes = case.batch(), case.ints(0, 6), Notes.none(rows, 3, DEVICE)
        own, accepted = case.ints(0, 50), case.ints(0, 3)
        verdict = Verdict(accepted, accepted, own, case.flags() if is_gated else None)
        return of_rows, lambda rows: (row_steps.end_check(rows, first, verdict, notes, 1), notes.kept)

    assert_same(make, monkeypatch)


@pytest.mark.parametrize("tree", [*TREES, DraftTree.chain(0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_ends_as_by_torch(
    tree: DraftTree, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evidence is a sum of whole numbers here: only whether it is finite means something."""

    def make() -> tuple[RoundBatch, Run]:
        case, shape = Case(6, 8), tree.on(DEVICE)
        of_rows, num_live = case.batch(), case.ints(0, tree.num_nodes + 1)
        of_rows.tokens.clamp_(0, 49)
        logits = case.ints(-9, 9, 6 * tree.num_nodes, 64).to(dtype)[:, :50]
        last = case.ints(0, tree.num_nodes)
        accepted = torch.tensor(tree.depths, device=DEVICE)[last]
        path = shape.nodes.expand(6, -1) if tree.is_chain else shape.paths[last]
        verdict, nodes = Verdict(accepted, last, case.ints(0, 50)), shape.nodes

        def run(of_rows: RoundBatch) -> tuple[Tensor, ...]:
            first = torch.zeros(6, dtype=torch.int64, device=DEVICE)
            span = Stages.select(of_rows, tree, first, nodes, num_live)
            values = Logits(logits, 50)
            return row_steps.end_verify(values, of_rows, span, verdict, num_live, path, tree.is_chain)

        return of_rows, run

    counts, evidence, *_ = assert_same(make, monkeypatch)
    assert (counts > 0).any() and evidence.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_round_tells_of_logits_that_are_no_numbers(bad: float) -> None:
    from hispec.decoding.row_steps_triton import end_verify

    logits, tokens = torch.zeros(6, 50, device=DEVICE), torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    logits[1, 0], logits[5, 0] = bad, bad  # of what is committed in row 0, and of what is not in row 1
    accepted, own, num_live = torch.tensor([[1, 1], [7, 7], [3, 2]], device=DEVICE)
    logits[1, 7], logits[5, 7] = bad, bad
    counts, evidence = end_verify(logits, tokens, accepted, own, num_live, None, 3, 3)
    assert counts.tolist() == [2, 2] and tokens[:, 2].tolist() == [7, 7]
    assert torch.isfinite(evidence).tolist() == [False, True]


@pytest.mark.parametrize("rows", [1, 3, 130])
def test_inputs_of_rows_are_taken_and_advanced_as_by_torch(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for runs in (False, True):
        monkeypatch.setattr(round_inputs, "runs_triton", lambda device, runs=runs: runs)
        case = Case(rows, 6)
        inputs, tokens = case.ints(0, 9, 5, rows + 7), case.ints(0, 50, rows, 7)
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
