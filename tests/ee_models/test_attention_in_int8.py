"""Attention over keys and values in int8: near to that over the same numbers in float32, a token's bits its
own, and those of every CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cache import int8_kv
from cache.paged_kv import PagedKV
from ee_models.attention import numba_int8_products
from ee_models.attention.numba_pages import NumbaAttention
from ee_models.attention.sdpa import SdpaAttention
from ee_models.kernels import numba_int8, numba_vectors
from tests.helpers.vector_width import load_with_vectors_of

from .test_attention import (
    CPU,
    LAYER,
    TILE_EDGES,
    Pass,
    Row,
    check_bits_are_its_own,
    check_bits_of_units,
    naive,
)
from .test_attention_trees import by_chains, random_forest, tree_pass

INT8 = torch.int8
# Groups of 1 to 32, numbers that are mixed 64 and 16 at a time, a vector of dimensions and several.
HEADS = [(9, 3, 64), (4, 2, 16), (4, 1, 128), (32, 1, 32), (2, 1, 96), (2, 2, 80), (3, 3, 256)]


def attend(rows: list[Row], block_size: int = 16, seed: int = 0) -> Tensor:
    return Pass.of(rows, block_size, seed).over(INT8).attend(NumbaAttention())


@pytest.mark.parametrize("heads", HEADS)
def test_outputs_are_near_to_those_over_the_same_numbers_in_float32(heads: tuple[int, int, int]) -> None:
    for context_len in TILE_EDGES:
        for q_len in {1, min(3, context_len), min(50, context_len)}:
            batch = Pass.of([Row.random(context_len, q_len, heads), Row.random(70, 7, heads)])
            found, expected = batch.over(INT8).attend(NumbaAttention()), batch.rounded(INT8)
            wide = expected.attend(NumbaAttention())
            torch.testing.assert_close(found, wide, atol=0.06, rtol=0)
            assert (found - wide).abs().mean() < 0.004
            by_sdpa = batch.over(INT8).attend(SdpaAttention())
            torch.testing.assert_close(by_sdpa, expected.attend(SdpaAttention()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", HEADS)
def test_a_few_numbers_of_keys_that_are_much_larger_widen_no_steps(heads: tuple[int, int, int]) -> None:
    row = Row.random(150, 20, heads)
    row.keys[:, :, :2] += 8.0  # as models' keys have them, the same for all positions
    row.queries[:, :, :2] *= 0.25
    assert (attend([row]) - naive([row])).abs().mean() < 0.02


@pytest.mark.parametrize("heads", HEADS)
def test_a_tokens_bits_do_not_depend_on_the_rest_of_the_pass(heads: tuple[int, int, int]) -> None:
    check_bits_are_its_own(attend, heads)


@pytest.mark.parametrize("heads", HEADS)
def test_bits_do_not_depend_on_blocks_units_or_threads(
    heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits_of_units(attend, heads, (16, 48, 64), monkeypatch)


@pytest.mark.parametrize("heads", [(6, 2, 16), (9, 3, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_a_nodes_bits_are_those_of_its_path_as_a_chain(seed: int, heads: tuple[int, int, int]) -> None:
    trees, backend = random_forest(seed, heads), NumbaAttention()
    found = tree_pass(trees).over(INT8).attend(backend)
    assert torch.equal(found, by_chains(trees, backend, INT8))
    torch.testing.assert_close(found, tree_pass(trees).over(INT8).attend(SdpaAttention()), atol=0.06, rtol=0)


def test_what_lies_past_the_last_position_is_not_seen_whatever_it_is() -> None:
    """A request whose numbers were not finite may have left scales that are not."""
    batch = Pass.of([Row.random(70, 3, (4, 2, 16)), Row.random(33, 33, (4, 2, 16))])
    expected = batch.over(INT8).attend(NumbaAttention())
    used = torch.cat(
        [
            table[torch.arange(length) // 16] * 16 + torch.arange(length) % 16
            for table, length in zip(batch.view.block_tables, (70, 33), strict=True)
        ]
    )
    slots = torch.arange(batch.kv.data.shape[2])
    others = slots[~torch.isin(slots, used)]
    for number in (float("nan"), float("inf"), 1e38):
        left = batch.over(INT8)
        shape = len(others), 2, 16
        left.kv.write(LAYER, others, torch.full(shape, number), torch.full(shape, number))
        assert torch.equal(left.attend(NumbaAttention()), expected)


def ways() -> list[tuple[int, str]]:
    """(width of vectors, how whole numbers are multiplied) that numba compiles for."""
    needed = {(8, "pairs"): "avx2", (16, "pairs"): "avx512bw", (8, "vnni"): "avxvnni"}
    can_run = (way for way, feature in needed.items() if numba_vectors.compiles_for(feature))
    return [(8, "plain"), (16, "plain"), *can_run]


def quick(way: tuple[int, str]) -> bool:
    """Vectors of either width, and each kind of product, are among these and this CPU's own."""
    return way not in ((16, "plain"), (16, "pairs"))


@pytest.fixture(
    params=[pytest.param(way, id=str(way), marks=() if quick(way) else pytest.mark.slow) for way in ways()],
    scope="module",
)
def products(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """numba_int8_products of another CPU."""
    width, dot = request.param
    names = [
        "ee_models.kernels.numba_rounding",
        numba_int8.__name__,
        "ee_models.attention.numba_products",
        numba_int8_products.__name__,
    ]
    with pytest.MonkeyPatch.context() as patch:
        constants = {numba_int8.__name__: {"DOT": dot}}
        yield load_with_vectors_of(width, names, patch, constants)[-1]


def tile(module: Any, count: int, heads: tuple[int, int], num: int) -> tuple[Any, ...]:
    """What a module makes of a tile: queries and their scales, scores, rounded weights and sums."""
    num_heads, head_dim = heads
    kv = PagedKV(1, 5, 16, num_heads, head_dim, INT8, CPU)
    generator = torch.Generator().manual_seed(count)
    numbers = [torch.randn(80, num_heads, head_dim, generator=generator) for _ in range(2)]
    kv.write(0, torch.arange(80), *numbers)
    of_head = int8_kv.bytes_per_group(head_dim) * (num_heads - 1)
    groups, values = (
        each.data_ptr() + np.array([3, 0, 4, 1]) * each.stride(0) for each in (kv.keys(0), kv.values(0))
    )
    queries = torch.randn(7, head_dim, generator=generator).numpy()
    whole, scales, begins = np.empty((7, head_dim), np.int8), np.empty(7, np.float32), np.empty(7, np.int32)
    module.round_queries(queries, whole, scales, begins)
    scores = np.zeros((module.QUERIES, 64), np.float32)
    nowhere = groups.ctypes.data, of_head
    module.score(whole, begins, scales, 1, num, groups, of_head, count, scores, nowhere)
    weights = np.exp(scores - scores[:num, :count].max())
    seen = np.full(module.QUERIES, count)
    rounded, of_weights = np.zeros((module.QUERIES, 64), np.uint8), np.zeros(module.QUERIES, np.float32)
    sums, factors = np.ones((8, head_dim), np.float32), np.full(8, 0.5, np.float32)
    module.accumulate(
        *(weights, rounded, of_weights, values, of_head, count, seen, factors, sums, 1, num, nowhere)
    )
    return whole, scales, begins, scores[:num, :count], rounded, of_weights, sums


@pytest.mark.parametrize(("heads", "num"), [((3, 64), 3), ((1, 80), 6), ((2, 16), 1)])
def test_bits_are_those_of_every_cpu(products: ModuleType, heads: tuple[int, int], num: int) -> None:
    for count in (1, 4, 15, 16, 17, 33, 64):
        found, expected = (tile(module, count, heads, num) for module in (products, numba_int8_products))
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
