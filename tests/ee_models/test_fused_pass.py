"""Passes in one call give, bit for bit, what their operations give one by one, on any number of threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models import fused_kernel, fused_pass
from ee_models.attention import numba_pages
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder, LayerWeights
from ee_models.exits import AdapterExit
from ee_models.fused_pass import FusedPasses, Rows
from ee_models.kernels import numba_gemm, numba_narrow
from ee_models.kernels import threads as threads_module
from tests.helpers.support import threads
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import FAMILIES, tiny_checkpoint

CPU = torch.device("cpu")
TABLES = torch.arange(40).flip(0).view(8, 5)
BLOCK_SIZE = 16


def slots_at(row: int, positions: Tensor) -> Tensor:
    return TABLES[row][positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def make_view(rows: list[tuple[int, int, int]]) -> BatchView:
    """A pass over (row, first position, tokens)."""
    positions = [torch.arange(start, start + count) for _, start, count in rows]
    slots = [slots_at(row, own) for (row, _, _), own in zip(rows, positions, strict=True)]
    counts = torch.tensor([0, *(count for _, _, count in rows)])
    tables = TABLES[[row for row, _, _ in rows]]
    longest = max(start + count for _, start, count in rows)
    return BatchView(
        torch.cat(positions), torch.cat(slots), tables, counts.cumsum(0), int(counts.max()), longest
    )


def path_to(node: int, parents: list[int]) -> list[int]:
    return [*(path_to(parents[node], parents) if parents[node] >= 0 else ()), node]


def make_tree_view(trees: list[tuple[int, int, list[int]]]) -> BatchView:
    """A pass over trees (row, first position, parent of each node or -1); node i lies where the row's token i
    would."""
    view = make_view([(row, start, len(parents)) for row, start, parents in trees])
    starts = torch.cat([torch.full((len(parents),), start) for _, start, parents in trees])
    paths, depths = torch.full((view.num_tokens, 8), -1), []
    for row, start, parents in trees:
        for node in range(len(parents)):
            path = path_to(node, parents)
            paths[len(depths), : len(path)] = slots_at(row, start + torch.tensor(path))
            depths.append(len(path))
    positions = starts + torch.tensor(depths) - 1
    return replace(view, positions=positions, paths=paths, path_starts=starts)


TREE = [-1, 0, 0, 1, 1, 2, 0, 3, 6, 5, 5, 9, 4, 4, 4, 12, 7, 2, 2]
# They follow each other. A product takes up to 12 tokens at a time, a unit of attention up to 16 of a row.
PASSES = [
    make_view([(0, 0, 20), (1, 0, 3)]),
    make_view([(0, 20, 1)]),
    make_view([(1, 3, 1), (0, 21, 7)]),
    make_view([(1, 4, 70)]),
    make_view([(2, 0, 1), (3, 0, 12), (4, 0, 13), (5, 0, 17), (6, 0, 2), (7, 0, 34)]),
    make_view([(7, 34, 1), (2, 1, 1), (3, 12, 1), (4, 13, 1), (5, 17, 1), (6, 2, 1), (0, 28, 1)]),
    make_view([(2, 2, 60), (3, 13, 61), (6, 3, 75)]),
    make_view([(0, 29, 0), (3, 74, 0)]),
    make_tree_view([(0, 29, TREE), (6, 78, [-1]), (1, 74, [-1, 0, 1]), (7, 35, [2, 2, -1, 0])]),
]
LONGEST, EMPTY, TREES = PASSES[-3:]
MOST_TOKENS = max(view.num_tokens for view in PASSES)


def make_kv(decoder: Decoder, num_layers: int) -> PagedKV:
    config = decoder.config
    return PagedKV(
        num_layers, TABLES.numel(), BLOCK_SIZE, config.num_kv_heads, config.head_dim, decoder.kv_dtype, CPU
    )


def run(
    decoder: Decoder, layers: list[LayerWeights], fused: bool, passes: Sequence[BatchView] = PASSES
) -> list[Tensor]:
    """Hidden states after each pass over `layers`, and the KV at the end."""
    kv, before = make_kv(decoder, len(layers)), decoder._fused
    decoder._fused, found = (before if fused else None), []
    assert not fused or before is not None
    try:
        for view in passes:
            hidden = decoder.embed(torch.arange(view.num_tokens) * 7 % 250)
            for lo, hi in ((0, 1), (1, len(layers))):
                hidden = decoder.run_weights(layers[lo:hi], hidden, kv, lo, view)
            found.append(hidden)
    finally:
        decoder._fused = before
    return [*found, kv.data]


# Products in float32, in bfloat16 or in float32 over weights of bfloat16, in int8 and in int4, with
# KV in bfloat16, in int8 or in float32.
NUMBERS: list[dict[str, Any]] = [
    {},
    {"weights_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16},
    {"quantization": "int8"},
    {"quantization": "int8", "kv_dtype": torch.bfloat16},
    {"quantization": "int4", "kv_dtype": torch.bfloat16},
    {"quantization": "int8", "kv_dtype": torch.int8},
]


def fits(numbers: dict[str, Any], family: str) -> bool:
    """Whether the family's heads are such as KV has a place for."""
    return numbers.get("kv_dtype") != torch.int8 or "head_dim" in FAMILIES[family]


# Each with products in bfloat16 and without, where the CPU has them and they matter.
WAYS = [
    (numbers, has_products)
    for numbers in NUMBERS
    for has_products in {numba_narrow.multiplies_bfloat16(), False}
    if not has_products or "kv_dtype" in numbers
]


@sweep(
    "numbers, has_products, family, num_threads",
    [
        (*way, family, num_threads)
        for way in WAYS
        for family in FAMILIES
        for num_threads in (1, 2, 3)
        if fits(way[0], family)
    ],
    lambda case: (
        case[2] == "qwen3" or (case[3] == 2 and (case[0] is NUMBERS[0] or case[2] == "biased_llama"))
    ),
    ids=str,
)
def test_bits_are_those_of_single_operations(
    numbers: dict[str, Any],
    has_products: bool,
    family: str,
    num_threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_pass, "_PARALLEL_FROM", 0)
    monkeypatch.setattr(numba_narrow, "multiplies_bfloat16", lambda: has_products)
    tiny_checkpoint(tmp_path / "model", family, num_layers=3)
    with threads(num_threads):
        checkpoint = open_checkpoint(tmp_path / "model")
        decoder = Decoder.load(checkpoint, torch.float32, CPU, **numbers)
        layers = decoder._layers
        # As the blocks of exits are, too: without attention, or without MLP, wherever it stands.
        halves = [replace(layers[0], attention=None), replace(layers[1], mlp=None), layers[2]]
        for each in (layers, halves, halves[::-1]):
            one_by_one, fused = run(decoder, each, False), run(decoder, each, True)
            for a, b in zip(one_by_one, fused, strict=True):
                assert torch.equal(a, b)


def test_norms_of_large_heads_have_the_bits_of_single_operations(tmp_path: Path) -> None:
    """Of 256 numbers LLVM unrolls the sum of squares within a pass, and begins it elsewhere."""
    tiny_checkpoint(tmp_path / "model", "qwen3", num_layers=2, head_dim=256)
    decoder = Decoder.load(open_checkpoint(tmp_path / "model"), torch.float32, CPU)
    for a, b in zip(run(decoder, decoder._layers, False), run(decoder, decoder._layers, True), strict=True):
        assert torch.equal(a, b)


def test_small_passes_stay_on_one_thread_and_large_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path / "model", "llama", num_layers=3)
    used: list[int] = []
    passes = [view for view in PASSES if view is not EMPTY]  # whose work is never worth another thread
    with threads(3):
        decoder = Decoder.load(open_checkpoint(tmp_path / "model"), torch.float32, CPU)
        pool = decoder.make_linear.threads
        monkeypatch.setattr(type(pool), "run", lambda self, kernel, data, count: used.append(count))
        for limit, count in ((0, 3), (1 << 60, 1)):
            monkeypatch.setattr(fused_pass, "_PARALLEL_FROM", limit)
            run(decoder, decoder._layers, True, passes)
            assert set(used) == {count}
            used.clear()


def test_where_threads_cannot_wait_operations_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path / "model", "llama", num_layers=3)
    with threads(2):
        with_gnu = Decoder.load(open_checkpoint(tmp_path / "model"), torch.float32, CPU)
        monkeypatch.setattr(threads_module, "_find_gomp", lambda: (None, 0))
        without = Decoder.load(open_checkpoint(tmp_path / "model"), torch.float32, CPU)
        assert isinstance(with_gnu.passes, FusedPasses)
        assert without.passes is None
        found = [run(each, each._layers, each.passes is not None) for each in (with_gnu, without)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_passes_are_of_the_sizes_that_matter() -> None:
    """Six rows and more, of one token and of many; more than a tile of a product and than a unit of
    attention take; enough for three threads to have their own; none at all."""
    q_lens = [view.cu_q_lens.diff() for view in PASSES]
    assert any(len(each) >= 6 and int(each.max()) == 1 for each in q_lens)
    assert any(len(each) >= 6 and int(each.max()) > 2 * numba_pages._TOKENS_PER_UNIT for each in q_lens)
    assert all(view.num_tokens % numba_gemm.TOKENS > 1 for view in (PASSES[3], TREES))
    assert all((view.num_tokens >= 3 * fused_kernel._OWN_TOKENS) == (view is LONGEST) for view in PASSES)
    assert EMPTY.num_tokens == 0


def test_a_narrower_token_that_takes_more_bytes_has_its_place(tmp_path: Path) -> None:
    narrower, wider = 1472, 1536  # 23 blocks with a scale each; 24 with one for four
    tiny_checkpoint(tmp_path, num_layers=1, hidden=narrower, intermediate_size=wider)
    decoder = Decoder.load(open_checkpoint(tmp_path), torch.float32, CPU, quantization="int8")
    assert decoder.passes is not None
    most = numba_narrow.bytes_per_token(8, narrower)
    assert most > numba_narrow.bytes_per_token(8, wider)
    assert 4 * decoder.passes.program(decoder.layer_steps(0, 1)).sizes["terms"] == most


# Blocks of an adapter from layers of the trunk.
BLOCKS: dict[str, Callable[[list[LayerWeights]], list[LayerWeights]]] = {
    "a norm alone": lambda layers: [],
    "attention alone": lambda layers: [replace(layers[1], mlp=None)],
    "MLP alone": lambda layers: [replace(layers[1], attention=None)],
    "a layer": lambda layers: [layers[2]],
    "two": lambda layers: [replace(layers[1], mlp=None), layers[0]],
}


# With biases, norms of heads, both kinds of groups: all that a layer's weights may have.
@sweep(
    "numbers, family, num_threads",
    [
        case
        for case in itertools.product(
            [NUMBERS[i] for i in (0, 1, 2, 4, 5)],
            ["llama", "biased_llama", "smollm2", "qwen2", "qwen3"],
            [1, 3],
        )
        if fits(*case[:2])
    ],
    lambda case: case[2] == 3 and (case[0] is NUMBERS[0] or case[1] == "qwen3"),
    ids=str,
)
def test_exits_on_the_way_and_at_the_end_have_the_bits_of_single_operations(
    numbers: dict[str, Any],
    family: str,
    num_threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers [1, 3), an exit filled on the way, one read or filled at the end; from rows of a buffer, left in
    others."""
    monkeypatch.setattr(fused_pass, "_PARALLEL_FROM", 0)
    tiny_checkpoint(tmp_path / "model", family, num_layers=3)
    with threads(num_threads):
        checkpoint = open_checkpoint(tmp_path / "model")
        decoder = Decoder.load(checkpoint, torch.float32, CPU, **numbers)
        layers, passes = decoder._layers, decoder.passes
        assert passes is not None
        vocabulary = torch.randperm(decoder.config.vocab_size)[:40]
        head = decoder.make_linear.head(decoder.embedding[vocabulary])
        for number, blocks in enumerate(BLOCKS.values()):
            of_head = (head, vocabulary) if number % 2 else (None, None)
            on_the_way = AdapterExit(decoder, 2, blocks(layers), layers[0].mlp.norm, None, None)
            at_the_end = AdapterExit(decoder, 3, blocks(layers[::-1]), layers[1].mlp.norm, *of_head)
            compare_with_steps_one_by_one(decoder, passes, on_the_way, at_the_end)


def compare_with_steps_one_by_one(
    decoder: Decoder, passes: FusedPasses, on_the_way: AdapterExit, at_the_end: AdapterExit
) -> None:
    steps = [*decoder.layer_steps(1, 2), *on_the_way.fill_steps(3), *decoder.layer_steps(2, 3)]
    generator = torch.Generator().manual_seed(0)
    for reads in (True, False):
        last = at_the_end.logit_steps(5) if reads else at_the_end.fill_steps(5)
        program = passes.program([*steps, *last])
        kvs = make_kv(decoder, 7), make_kv(decoder, 7)
        for view in PASSES:
            states = torch.randn(MOST_TOKENS + 5, decoder.config.hidden_size, generator=generator)
            index, others = (
                torch.randperm(len(states), generator=generator)[: view.num_tokens] for _ in range(2)
            )
            left = torch.zeros_like(states)
            before = states.clone()
            out = passes.run(program, Rows(states, index), kvs[0], view, Rows(left, others), True, True)
            assert torch.equal(states, before)
            decoder._fused = None
            hidden = decoder.run_layers(states[index], 1, 2, kvs[1], view)
            on_the_way.fill(hidden, kvs[1], 3, view)
            hidden = decoder.run_layers(hidden, 2, 3, kvs[1], view)
            logits = None
            if reads:
                logits = at_the_end.logits(hidden, kvs[1], 5, view)
            else:
                at_the_end.fill(hidden, kvs[1], 5, view)
            decoder._fused = passes
            assert torch.equal(out.hidden, hidden) and torch.equal(left[others], hidden)
            assert int((left != 0).any(1).sum()) == view.num_tokens
            assert torch.equal(kvs[0].data, kvs[1].data)
            if logits is None:
                assert out.logits is out.best is out.sums is None
                continue
            assert out.logits is not None and out.best is not None and out.sums is not None
            assert torch.equal(out.logits, logits)
            best, vocabulary = logits.argmax(-1), at_the_end.vocabulary
            assert torch.equal(out.best, best if vocabulary is None else vocabulary[best])
            torch.testing.assert_close(1 / out.sums, logits.softmax(-1).amax(-1))


@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_nodes_of_a_tree_have_the_bits_of_their_paths_as_chains(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes in one call alone: nothing that a row's other nodes hold reaches a node."""
    monkeypatch.setattr(fused_pass, "_PARALLEL_FROM", 0)
    tiny_checkpoint(tmp_path / "model", family, num_layers=3)
    with threads(2):
        decoder = Decoder.load(open_checkpoint(tmp_path / "model"), torch.float32, CPU)
        assert decoder.passes is not None
        kv, tokens = make_kv(decoder, 3), torch.arange(len(TREE)) * 7 % 250
        decoder.run_layers(decoder.embed(torch.arange(29)), 0, 3, kv, make_view([(0, 0, 29)]))
        committed = kv.data.clone()
        nodes = decoder.run_layers(decoder.embed(tokens), 0, 3, kv, make_tree_view([(0, 29, TREE)]))
        for node in range(len(TREE)):
            path = path_to(node, TREE)
            kv.data.copy_(committed)
            chain = decoder.run_layers(decoder.embed(tokens[path]), 0, 3, kv, make_view([(0, 29, len(path))]))
            assert torch.equal(nodes[path], chain)
