"""Attention by products in bfloat16, where a CPU has them: near to that in float32, a token's bits its
own."""

from __future__ import annotations

import pytest
import torch

from ee_models.attention import select_backend
from ee_models.attention.numba_pages import NumbaAttention
from ee_models.linear_factory import LinearMaker
from tests.helpers.bfloat16 import needs_bfloat16

from .test_attention import (
    CPU,
    INVARIANT_HEADS,
    TILE_EDGES,
    Pass,
    Row,
    check_bits_are_its_own,
    check_bits_of_units,
)
from .test_attention_trees import by_chains, random_forest, tree_pass

HEADS = [*INVARIANT_HEADS, (32, 1, 32), (6, 6, 1), (2, 1, 96)]
pytestmark = needs_bfloat16


def attend(rows: list[Row], block_size: int = 16, seed: int = 0) -> torch.Tensor:
    return Pass.of(rows, block_size, seed).over(torch.bfloat16).attend(NumbaAttention(in_bfloat16=True))


@pytest.mark.parametrize("heads", HEADS)
def test_outputs_are_near_to_those_in_float32(heads: tuple[int, int, int]) -> None:
    for context_len in TILE_EDGES:
        for q_len in {1, min(3, context_len), min(50, context_len)}:
            rows = [Row.random(context_len, q_len, heads), Row.random(70, 7, heads)]
            batch = Pass.of(rows).over(torch.bfloat16)
            narrow, wide = batch.attend(NumbaAttention(True)), batch.attend(NumbaAttention())
            torch.testing.assert_close(narrow, wide, atol=0.04, rtol=0)
            assert (narrow - wide).abs().mean() < 0.004


def test_float32_is_multiplied_where_kv_is_in_it() -> None:
    batch = Pass.of([Row.random(100, 20, (4, 2, 16))])
    assert torch.equal(batch.attend(NumbaAttention(True)), batch.attend(NumbaAttention()))


@pytest.mark.parametrize("heads", HEADS)
def test_a_tokens_bits_do_not_depend_on_the_rest_of_the_pass(heads: tuple[int, int, int]) -> None:
    check_bits_are_its_own(attend, heads)


@pytest.mark.parametrize("heads", HEADS)
def test_bits_do_not_depend_on_blocks_units_or_threads(
    heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits_of_units(attend, heads, (1, 7, 64), monkeypatch)


@pytest.mark.parametrize("heads", [(6, 2, 16), (3, 1, 34), (9, 3, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_a_nodes_bits_are_those_of_its_path_as_a_chain(seed: int, heads: tuple[int, int, int]) -> None:
    trees, backend = random_forest(seed, heads), NumbaAttention(True)
    batch = tree_pass(trees).over(torch.bfloat16)
    assert torch.equal(batch.attend(backend), by_chains(trees, backend, torch.bfloat16))


def test_which_models_attend_in_bfloat16() -> None:
    float32 = torch.float32
    assert LinearMaker(CPU, float32, weights_dtype=torch.bfloat16).attends_in_bfloat16
    assert LinearMaker(CPU, float32, "int8").attends_in_bfloat16
    assert not LinearMaker(CPU, float32).attends_in_bfloat16
    backend = select_backend("auto", CPU, float32, in_bfloat16=True)
    assert isinstance(backend, NumbaAttention) and backend.in_bfloat16
