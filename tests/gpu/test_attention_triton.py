"""Triton's attention over pages against the sdpa twin and a softmax in float64; in its invariant mode bit for
bit against itself.

On a CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, set by tests/conftest.py), on a CUDA
device as they are.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of
from ee_models.attention import triton_pages
from ee_models.attention.triton_pages import TritonAttention
from tests.helpers.sweeps import sweep
from tests.helpers.triton_passes import (
    DEVICE,
    LAYER,
    Heads,
    Pass,
    Row,
    assert_close,
    forest,
    random_parents,
    relative_error,
)

SPLIT_LENS = [None, 64]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter's time goes by operations, not by their size."""
    monkeypatch.setattr(triton_pages, "_COMBINED_PAIRS", 64)


RAGGED = [Row(1, 1), Row(70, 5, 1), Row(131, 10, 2), Row(33, 0, 3), Row(64, 3, 4)]


@sweep(
    "heads",
    [(1, 1, 16), (4, 2, 16), (6, 2, 40), (9, 3, 64), (4, 1, 128), (6, 1, 80), (2, 2, 96), (12, 2, 8)],
    lambda heads: heads[0] in (1, 6, 12),
)
def test_all_groups_and_head_sizes_agree_with_sdpa(heads: Heads) -> None:
    batch = Pass.of(RAGGED, heads)
    for backend in (TritonAttention(split_len=64), TritonAttention(invariant=True)):
        assert_close(batch.attend(backend), batch)
    torch.testing.assert_close(
        batch.attend(TritonAttention()).cpu().double(), batch.exact(), atol=5e-6, rtol=0
    )


@pytest.mark.parametrize(("block_size", "split_len"), [(1, 64), (5, None), (8, 32), (16, None)])
def test_all_query_lengths_agree_with_sdpa_in_all_blocks(block_size: int, split_len: int | None) -> None:
    batch = Pass.of([Row(58 + 2 * q_len, q_len, q_len) for q_len in range(1, 11)], block_size=block_size)
    assert_close(batch.attend(TritonAttention(split_len=split_len)), batch)


@pytest.mark.parametrize("split_len", [None, 32, 96])
def test_decoding_agrees_with_sdpa_around_the_edges_of_tiles_and_splits(split_len: int | None) -> None:
    batch = Pass.of(
        [Row(context_len, 1, context_len) for context_len in (1, 31, 32, 33, 64, 65, 95, 96, 97, 128, 129)]
    )
    assert_close(batch.attend(TritonAttention(split_len=split_len)), batch)


def test_the_sizes_of_the_merging_kernel_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, found = Pass.of(RAGGED), []
    for pairs, at_once in ((64, 4), (4, 4), (16, 1)):
        monkeypatch.setattr(triton_pages, "_COMBINED_PAIRS", pairs)
        monkeypatch.setattr(triton_pages, "_COMBINED_AT_ONCE", at_once)
        found.append(batch.attend(TritonAttention(split_len=32)))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("split_len", SPLIT_LENS)
def test_chunks_of_several_prompts_agree_with_sdpa(split_len: int | None) -> None:
    batch = Pass.of([Row(110, 40, 1), Row(20, 20, 2), Row(97, 23, 3), Row(130, 1, 4)], (3, 1, 16))
    assert_close(batch.attend(TritonAttention(split_len=split_len)), batch)


@sweep(
    "rows, heads, dtype, limit",
    [
        (rows, heads, *limits)
        for rows in (RAGGED, [Row(131, 40, 1), Row(20, 20, 2)])
        for heads in ((4, 2, 64), (3, 1, 128))
        for limits in ((torch.bfloat16, 1e-2), (torch.float16, 1e-3))
    ],
    3,
)
def test_half_precision_is_near_the_exact_result(
    rows: list[Row], heads: Heads, dtype: torch.dtype, limit: float
) -> None:
    batch = Pass.of(rows, heads, dtype=dtype)
    for backend in (TritonAttention(split_len=64), TritonAttention(invariant=True)):
        found = batch.attend(backend)
        assert found.dtype == dtype
        assert relative_error(found, batch) < limit


def test_scores_may_be_far_apart() -> None:
    """Most weights underflow, and the largest score comes first, in between, or last: in another split than
    the rest."""
    for peak in (0, 65, 199):
        batch = Pass.of([Row(200, 3)], (4, 2, 16))
        slot = slots_of(batch.view.block_tables, torch.tensor([[peak]], device=DEVICE), 8)[0, 0]
        batch.kv.keys(LAYER)[slot] = batch.queries[-1, ::2] * 60
        for split_len in SPLIT_LENS:
            assert_close(batch.attend(TritonAttention(split_len=split_len)), batch)


def test_queries_may_be_a_part_of_a_larger_tensor() -> None:
    batch = Pass.of(RAGGED, (4, 2, 16))
    fused = torch.full((batch.queries.shape[0], 11, 16), float("nan"), device=DEVICE)
    fused[:, 2:10:2] = batch.queries
    apart = replace(batch, queries=fused[:, 2:10:2])
    assert not apart.queries.is_contiguous()
    assert torch.equal(apart.attend(TritonAttention()), batch.attend(TritonAttention()))
    turned = replace(batch, queries=batch.queries.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    assert turned.queries.stride(2) != 1
    assert torch.equal(turned.attend(TritonAttention()), batch.attend(TritonAttention()))


def test_a_pass_without_tokens_gives_nothing() -> None:
    assert Pass.of([Row(5, 0), Row(9, 0)]).attend(TritonAttention()).shape == (0, 32)


def static(batch: Pass, q_len: int) -> tuple[Pass, Tensor]:
    """The same rows as a rectangle of q_len places a row, with a row more, and which of its places are live.
    A place of padding has slot -1 and position 0; in a tree its path holds -1."""
    view, rows = batch.view, batch.view.num_rows + 1
    live = torch.zeros(rows, q_len, dtype=torch.bool, device=DEVICE)
    live[:-1] = torch.arange(q_len, device=DEVICE) < view.cu_q_lens.diff().unsqueeze(1)
    live = live.flatten()

    def spread(values: Tensor, padding: float) -> Tensor:
        out = values.new_full((rows * q_len, *values.shape[1:]), padding)
        out[live] = values
        return out

    wide = BatchView(
        positions=spread(view.positions, 0),
        slots=spread(view.slots, -1),
        block_tables=torch.cat((view.block_tables, view.block_tables[:1])),
        cu_q_lens=torch.arange(rows + 1, device=DEVICE) * q_len,
        max_q_len=q_len,
        max_context_len=view.max_context_len,
        paths=None if view.paths is None else spread(view.paths, -1),
        path_starts=None if view.path_starts is None else spread(view.path_starts, 0),
    )
    return Pass(spread(batch.queries, 1.0), batch.kv, wide), live


@sweep(
    "invariant, rows",
    itertools.product([False, True], [RAGGED, forest(3)]),
    lambda case: case[0] == (case[1] is RAGGED),
)
def test_places_of_padding_are_finite_and_change_nothing(invariant: bool, rows: list[Row]) -> None:
    backend, batch = TritonAttention(invariant, 64), Pass.of(rows)
    batch.kv.data[LAYER].nan_to_num_(
        nan=1.0
    )  # padding reads slots that nobody wrote; a pool begins with zeros
    nan = torch.full((1, *batch.kv.keys(LAYER).shape[1:]), float("nan"), device=DEVICE)
    for layer in (LAYER - 1, LAYER):  # what would be read for slot -1
        batch.kv.write(layer, torch.tensor([-1], device=DEVICE), nan, nan)
    wide, live = static(batch, 11)
    found = wide.attend(backend)
    assert found.isfinite().all()
    assert_close(found[live], batch)
    if invariant:
        assert torch.equal(found[live], batch.attend(backend))


@pytest.mark.parametrize(
    ("seed", "block_size", "split_len"), [(0, 1, None), (1, 5, 32), (2, 16, 64), (6, 8, 96)]
)
def test_trees_agree_with_sdpa(seed: int, block_size: int, split_len: int | None) -> None:
    batch = Pass.of(forest(seed), (3, 1, 16), block_size, seed=seed)
    assert_close(batch.attend(TritonAttention(split_len=split_len)), batch)


@pytest.mark.parametrize("heads", [(1, 1, 16), (6, 2, 40), (8, 2, 64)])
def test_trees_agree_with_sdpa_for_all_groups(heads: Heads) -> None:
    batch = Pass.of(forest(4)[-3:], heads)
    for invariant in (False, True):
        assert_close(batch.attend(TritonAttention(invariant)), batch)


def test_trees_in_half_precision_are_near_the_exact_result() -> None:
    batch = Pass.of(forest(5), (4, 1, 64), dtype=torch.bfloat16)
    for backend in (TritonAttention(split_len=64), TritonAttention(invariant=True)):
        assert relative_error(batch.attend(backend), batch) < 1e-2


@pytest.mark.parametrize("invariant", [False, True])
def test_a_node_sees_its_ancestors_and_itself_and_nothing_else_of_the_tree(invariant: bool) -> None:
    row = Row.tree(61, random_parents(6, random.Random(4)))
    batch, backend = Pass.of([row]), TritonAttention(invariant)
    before = batch.attend(backend)
    for other in range(6):
        slot = batch.view.slots[other]
        old = batch.kv.data[LAYER, :, slot].clone()
        batch.kv.data[LAYER, :, slot] = 1 - old
        after = batch.attend(backend)
        changed = [node for node in range(6) if not torch.equal(before[node], after[node])]
        assert changed == [node for node in range(6) if other in row.path(node)], f"node {other}"
        batch.kv.data[LAYER, :, slot] = old


@pytest.mark.parametrize("invariant", [False, True])
def test_a_chain_may_be_told_by_paths_or_by_its_table_alone(invariant: bool) -> None:
    """All of it, its last three positions, or nothing; in the invariant mode with the same bits."""
    backend, batch = (
        TritonAttention(invariant, 64),
        Pass.of([Row(70, 5, 1), Row(64, 1, 2), Row(80, 3, 3)], block_size=5),
    )
    expected, positions = batch.attend(backend), batch.view.positions
    none = replace(batch.view, paths=torch.full((9, 4), -1, device=DEVICE), path_starts=positions + 1)
    no_depth = replace(none, paths=none.paths[:, :0])
    views = [none, no_depth]
    for starts in ((positions - 2).clamp(min=0), torch.zeros_like(positions)):
        depth = int((positions - starts).max()) + 1
        seen = torch.minimum(starts.unsqueeze(1) + torch.arange(depth, device=DEVICE), positions.unsqueeze(1))
        views.append(
            replace(
                batch.view,
                paths=slots_of(batch.view.block_tables[batch.view.row_ids()], seen, 5),
                path_starts=starts,
            )
        )
    for view in views:
        found = replace(batch, view=view).attend(backend)
        assert torch.equal(found, expected) if invariant else torch.allclose(found, expected, atol=5e-6)


def differing(
    backend: TritonAttention, heads: Heads, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Passes in which tokens of a row have other bits than with all the row's tokens in one pass."""
    row, others, found = (
        Row(150, 24, seed=1),
        [Row(1, 1, 2), Row(64, 7, 3), Row(200, 2, 4), Row(90, 12, 5)],
        [],
    )

    def attend(rows: Sequence[Row], **layout: Any) -> Tensor:
        return Pass.of(rows, heads, dtype=dtype, **layout).attend(backend)

    def compare(attended: Tensor, expected: Tensor, name: str) -> None:
        if not torch.equal(attended, expected):
            found.append(name)

    together = attend([row])
    for q_len in (1, 7, 17):
        compare(attend([replace(row, q_len=q_len)]), together[-q_len:], f"q_len {q_len}")
    among = attend([*others[:2], replace(row, q_len=5), *others[2:]], seed=1, block_size=5)
    compare(among[8:13], together[-5:], "in a batch")
    for position in (127, 128, 148):
        alone = attend([Row(position + 1, 1, 1)])[0]  # and with nothing after it
        compare(alone, together[position - 126], f"position {position}")
    for bucket in (256, 1000):
        compare(attend([row], bucket=bucket), together, f"up to {bucket} positions")
    monkeypatch.setattr(triton_pages, "_num_sms", lambda device: 0)
    compare(attend([row]), together, "all splits in one program")
    among = attend([*others, replace(row, q_len=3)], block_size=16)
    compare(among[-3:], together[-3:], "all splits in one program, in a batch")
    return found


@pytest.mark.parametrize(("heads", "dtype"), [((3, 1, 40), torch.float32), ((4, 2, 64), torch.bfloat16)])
def test_bits_do_not_depend_on_the_rest_of_the_pass(
    heads: Heads, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TritonAttention(invariant=True, split_len=64)
    assert backend.row_invariant
    assert not differing(backend, heads, dtype, monkeypatch)


class SplitByBatch(TritonAttention):
    """Cuts contexts by the number of rows, as the mode that is not invariant does."""

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: Any) -> Tensor:
        self._split_len = 64 if prepared.num_rows == 1 else 32
        return super().attend(q, kv, layer, prepared)


def test_an_order_of_sums_that_varies_with_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = differing(SplitByBatch(), (3, 1, 40), torch.float32, monkeypatch)
    assert {"in a batch", "all splits in one program, in a batch"} <= set(found)
    assert not {"q_len 7", "up to 256 positions"} & set(found)


@pytest.mark.parametrize("context_len", [0, 28, 60])
def test_a_nodes_bits_are_those_of_its_path_as_a_chain(
    context_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two branches, which part at once and cross tiles and splits. The chain has the data of the branch's
    nodes at its last positions."""
    parents = [-1, 0, 1, 2, 3, 4, 0, 6, 7, 8, 9]
    backend, tree = (
        TritonAttention(invariant=True, split_len=64),
        Row.tree(context_len, parents, seed=7, early=2),
    )
    for sms in (132, 0):
        monkeypatch.setattr(triton_pages, "_num_sms", lambda device, sms=sms: sms)
        batch = Pass.of([Row(90, 2, 3), tree], (3, 1, 16))
        found = batch.attend(backend)[2:]
        for branch in (tree.path(5), tree.path(10)):
            slots = batch.view.slots[2:][branch]
            places = torch.arange(context_len, context_len + len(branch), device=DEVICE)
            chain = Pass.of([Row(context_len + len(branch), len(branch), seed=7)], (3, 1, 16))
            targets = slots_of(chain.view.block_tables, places.unsqueeze(0), 8)[0]
            chain.kv.data[LAYER, :, targets] = batch.kv.data[LAYER, :, slots]
            chain = replace(chain, queries=batch.queries[2:][branch])
            assert torch.equal(chain.attend(backend), found[branch])


def test_bits_of_trees_do_not_depend_on_how_tokens_are_dealt_to_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, batch = TritonAttention(invariant=True, split_len=64), Pass.of(forest(2), (3, 1, 16))
    expected, config = batch.attend(backend), triton_pages._launch_config
    for pairs in (3, 7):
        monkeypatch.setattr(
            triton_pages, "_launch_config", lambda *args, pairs=pairs: replace(config(*args), pairs=pairs)
        )
        assert torch.equal(batch.attend(backend), expected)


def test_only_the_invariant_mode_claims_row_invariance() -> None:
    assert not TritonAttention().row_invariant
    assert TritonAttention(invariant=True).row_invariant
    assert TritonAttention(invariant=True)._split_len == triton_pages._INVARIANT_SPLIT
    for padded_dim in (16, 64, 128, 256):
        for item_size in (2, 4):
            configs = {
                replace(triton_pages._launch_config(max_pairs, padded_dim, item_size, paths, True), pairs=0)
                for max_pairs in (1, 16, 17, 64, 4000)
                for paths in (False, True)
            }
            assert len(configs) == 1
            only = configs.pop()
            assert triton_pages._INVARIANT_SPLIT % only.tile == 0
            assert only.turn_tile == only.tile  # a turn's tile is a chain's
