"""The compiled steps of a round against the same in torch: Triton's, in its interpreter where there is no
GPU, and numba's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hispec.decoding import row_steps
from hispec.decoding.acceptance import Proposals, Verdict
from hispec.decoding.batch import PACKED, STATIC, Execution, RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.decoding.row_steps import Notes
from hispec.decoding.stages import Stages
from hispec.sampling.logits import Logits
from tests.helpers.row_cases import TREES, Case, Run, assert_same


@pytest.fixture(params=[STATIC, PACKED], ids=["triton", "numba"])
def twin(request: pytest.FixtureRequest) -> Execution:
    """Static rounds are Triton's, packed ones numba's."""
    execution: Execution = request.param
    pytest.importorskip("triton" if execution.is_static else "numba")
    return execution


def device_of(twin: Execution) -> torch.device:
    return Case(1, 1, execution=twin).device


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_values_are_put_where_torch_puts_them(
    num: int, shift: int, twin: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> tuple[RoundBatch, Run]:
        case = Case(7, 12, execution=twin)
        of_rows, nodes = case.batch(), torch.arange(2, device=device_of(twin))
        first, num_live, values = case.ints(0, 2), case.ints(0, 3), case.ints(0, 50, 14, num)

        def run(of_rows: RoundBatch) -> tuple[Tensor, ...]:
            span = Stages.select(of_rows, DraftTree.chain(1), first, nodes, num_live)
            apart = (span.columns * num).unsqueeze(-1) + torch.arange(num, device=device_of(twin))
            span.put(of_rows.tokens, apart, values[: span.num_tokens], shift)
            return ()

        return of_rows, run

    assert_same(make, monkeypatch)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_live_nodes_are_counted_as_by_torch(
    tree: DraftTree, rows: int, twin: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> tuple[RoundBatch, Run]:
        case = Case(rows, 9, execution=twin)
        of_rows, first = case.batch(), case.ints(0, 9)
        return of_rows, lambda rows: [row_steps.count_live(rows, first, tree, less) for less in (0, 1)]

    live, allowed, *_ = assert_same(make, monkeypatch)
    assert torch.equal(allowed, (live - 1).clamp(min=0))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("has_sources", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_drafts_are_cut_and_noted_as_by_torch(
    tree: DraftTree, has_sources: bool, rows: int, twin: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> tuple[RoundBatch, Run]:
        case = Case(rows, 9, execution=twin)
        of_rows, proposals = case.batch(), Proposals(tree, case.ints(0, 5), case.ints(-1, 8))
        notes, source = Notes.none(rows, 2, device_of(twin)), case.ints(0, 2) if has_sources else 1

        def run(of_rows: RoundBatch) -> tuple[Tensor, ...]:
            cut = row_steps.take_drafts(of_rows, proposals, source, notes, 1, case.vocab)
            return *cut, notes.drafted, notes.kept, notes.source

        return of_rows, run

    _, num_live, *_, tokens, limits = assert_same(make, monkeypatch)
    assert tokens.min() >= 0 and tokens.max() < 50 and (num_live <= limits).all()


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", [1, 150])
def test_a_check_ends_as_by_torch(
    is_gated: bool, rows: int, twin: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> tuple[RoundBatch, Run]:
        case = Case(rows, 8, execution=twin)
        of_rows, first, notes = case.batch(), case.ints(0, 6), Notes.none(rows, 3, device_of(twin))
        own, accepted = case.ints(0, 50), case.ints(0, 3)
        verdict = Verdict(accepted, accepted, own, case.flags() if is_gated else None)
        return of_rows, lambda rows: (row_steps.end_check(rows, first, verdict, notes, 1), notes.kept)

    assert_same(make, monkeypatch)


@pytest.mark.parametrize("tree", [*TREES, DraftTree.chain(0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_ends_as_by_torch(
    tree: DraftTree, dtype: torch.dtype, twin: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evidence is a sum of whole numbers here: only whether it is finite means something."""

    def make() -> tuple[RoundBatch, Run]:
        case, shape = Case(6, 8, execution=twin), tree.on(device_of(twin))
        of_rows, num_live = case.batch(), case.ints(0, tree.num_nodes + 1)
        of_rows.tokens.clamp_(0, 49)
        logits = case.ints(-9, 9, 6 * tree.num_nodes, 64).to(dtype)[:, :50]
        last = torch.minimum(case.ints(0, tree.num_nodes), (num_live - 1).clamp(min=0))
        accepted = torch.tensor(tree.depths, device=device_of(twin))[last]
        path = shape.nodes.expand(6, -1) if tree.is_chain else shape.paths[last]
        verdict, nodes = Verdict(accepted, last, case.ints(0, 50)), shape.nodes

        def run(of_rows: RoundBatch) -> tuple[Tensor, ...]:
            first = torch.zeros(6, dtype=torch.int64, device=device_of(twin))
            span = Stages.select(of_rows, tree, first, nodes, num_live)
            values = Logits(logits, 50)
            return row_steps.end_verify(values, of_rows, span, verdict, num_live, path, tree.is_chain)

        return of_rows, run

    counts, evidence, *_ = assert_same(make, monkeypatch)
    assert (counts > 0).any() and evidence.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_round_tells_of_logits_that_are_no_numbers(bad: float, twin: Execution) -> None:
    device = device_of(twin)
    if twin.is_static:
        from hispec.decoding.row_steps_triton import end_verify
    else:
        from hispec.decoding.row_steps_numba import end_verify
    logits, tokens = torch.zeros(6, 50, device=device), torch.zeros(2, 4, dtype=torch.int64, device=device)
    logits[1, 0], logits[5, 0] = bad, bad  # of what is committed in row 0, and of what is not in row 1
    accepted, own, num_live = torch.tensor([[1, 1], [7, 7], [3, 2]], device=device)
    logits[1, 7], logits[5, 7] = bad, bad
    begins = torch.tensor([0, 3, 6], device=device)
    counts, evidence = end_verify(logits, tokens, accepted, own, num_live, None, begins, 3)
    assert counts.tolist() == [2, 2] and tokens[:, 2].tolist() == [7, 7]
    assert torch.isfinite(evidence).tolist() == [False, True]
