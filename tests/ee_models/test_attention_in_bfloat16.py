"""Attention by products in bfloat16, where a CPU has them: near to that in float32, a token's bits its
own."""

from __future__ import annotations

import pytest
import torch

from ee_models.attention import numba_pages, select_backend
from ee_models.attention.numba_pages import NumbaAttention
from ee_models.linear_factory import LinearMaker
from tests.helpers.bfloat16 import needs_bfloat16

from .test_attention import CPU, INVARIANT_HEADS, TILE_EDGES, Pass, Row, use_threads
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
    row = Row.random(200, 40, heads)
    whole = attend([row])
    for q_len in (1, 2, 3, 8, 17):
        assert torch.equal(attend([row.last(q_len)]), whole[-q_len:])
        mixed = attend([Row.random(66, 5, heads, seed=1), row.last(q_len), Row.random(130, 1, heads)])
        assert torch.equal(mixed[5:-1], whole[-q_len:])
    for context_len in (161, 170, 191, 192, 193):  # a chunk of a prompt, or a token alone
        part = attend([row.last(1, context_len)])
        assert torch.equal(part[0], whole[context_len - 161])


@pytest.mark.parametrize("heads", HEADS)
def test_bits_do_not_depend_on_blocks_units_or_threads(
    heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row.random(150, 33, heads), Row.random(64, 64, heads), Row.random(3, 1, heads)]
    expected = attend(rows)
    for num_threads, tokens, block_size in ((3, 16, 1), (1, 5, 7), (3, 1, 64)):
        use_threads(num_threads, monkeypatch)
        monkeypatch.setattr(numba_pages, "_TOKENS_PER_UNIT", tokens)
        assert torch.equal(attend(rows, block_size, seed=block_size), expected)


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
