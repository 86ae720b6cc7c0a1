"""Passes in one call give, bit for bit, what their operations give one by one, on any number of threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models import fused_pass
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder, LayerWeights
from ee_models.exits import AdapterExit
from ee_models.fused_pass import FusedPasses, Rows
from ee_models.kernels import threads as threads_module
from ee_models.quantized import Quantization
from tests.helpers.support import threads
from tests.helpers.tiny import FAMILIES, tiny_checkpoint

CPU = torch.device("cpu")
# (row, first position, tokens) of passes that follow each other: prompts, single tokens, both, a long one.
PASSES = [[(0, 0, 20), (1, 0, 3)], [(0, 20, 1)], [(1, 3, 1), (0, 21, 7)], [(1, 4, 75)]]
TABLES = torch.arange(40).flip(0).view(2, 20)
BLOCK_SIZE = 4


def make_view(rows: list[tuple[int, int, int]]) -> BatchView:
    positions = [torch.arange(start, start + count) for _, start, count in rows]
    slots = [
        TABLES[row][own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE
        for (row, _, _), own in zip(rows, positions, strict=True)
    ]
    counts = torch.tensor([0, *(count for _, _, count in rows)])
    tables = TABLES[[row for row, _, _ in rows]]
    longest = max(start + count for _, start, count in rows)
    return BatchView(
        torch.cat(positions), torch.cat(slots), tables, counts.cumsum(0), int(counts.max()), longest
    )


def run(decoder: Decoder, layers: list[LayerWeights], fused: bool) -> list[Tensor]:
    """Hidden states after each pass over `layers`, and the KV at the end."""
    config, before = decoder.config, decoder._fused
    kv = PagedKV(
        len(layers), TABLES.numel(), BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32, CPU
    )
    decoder._fused, found = (before if fused else None), []
    assert not fused or before is not None
    try:
        for rows in PASSES:
            view = make_view(rows)
            hidden = decoder.embed(view.positions + 5)
            for lo, hi in ((0, 1), (1, len(layers))):
                hidden = decoder.run_weights(layers[lo:hi], hidden, kv, lo, view)
            found.append(hidden)
    finally:
        decoder._fused = before
    return [*found, kv.data]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_those_of_single_operations(
    family: str,
    num_threads: int,
    quantization: Quantization | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_pass, "_PARALLEL_FROM", 0)
    tiny_checkpoint(tmp_path / "model", family, num_layers=3)
    with threads(num_threads):
        checkpoint = open_checkpoint(tmp_path / "model")
        decoder = Decoder.load(checkpoint, torch.float32, CPU, quantization=quantization)
        layers = decoder._layers
        # As the blocks of exits are, too: without attention, or without MLP, wherever it stands.
        halves = [replace(layers[0], attention=None), replace(layers[1], mlp=None), layers[2]]
        for each in (layers, halves, halves[::-1]):
            one_by_one, fused = run(decoder, each, False), run(decoder, each, True)
            for a, b in zip(one_by_one, fused, strict=True):
                assert torch.equal(a, b)


def test_small_passes_stay_on_one_thread_and_large_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path / "model", "llama", num_layers=3)
    used: list[int] = []
    with threads(3):
        decoder = Decoder.load(open_checkpoint(tmp_path / "model"), torch.float32, CPU)
        pool = decoder.make_linear.threads
        monkeypatch.setattr(type(pool), "run", lambda self, kernel, data, count: used.append(count))
        for limit, count in ((0, 3), (1 << 60, 1)):
            monkeypatch.setattr(fused_pass, "_PARALLEL_FROM", limit)
            run(decoder, decoder._layers, True)
            assert set(used) == {count}
            used.clear()


def test_where_threads_cannot_wait_operations_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path / "model", "llama", num_layers=3)
    with threads(2):
        with_gnu = Decoder.load(open_checkpoint(tmp_path / "model"), torch.float32, CPU)
        monkeypatch.setattr(threads_module, "_find_gomp", lambda: (None, 0, 0))
        without = Decoder.load(open_checkpoint(tmp_path / "model"), torch.float32, CPU)
        assert isinstance(with_gnu.passes, FusedPasses)
        assert without.passes is None
        found = [run(each, each._layers, each.passes is not None) for each in (with_gnu, without)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_exits_on_the_way_and_at_the_end_have_the_bits_of_single_operations(
    num_threads: int, quantization: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers [1, 3), an exit of two blocks filled on the way, one read at the end; from rows of a buffer,
    left in others."""
    monkeypatch.setattr(fused_pass, "_PARALLEL_FROM", 0)
    tiny_checkpoint(tmp_path / "model", "llama", num_layers=3)
    with threads(num_threads):
        checkpoint = open_checkpoint(tmp_path / "model")
        decoder = Decoder.load(checkpoint, torch.float32, CPU, quantization=quantization)
        layers, passes = decoder._layers, decoder.passes
        assert passes is not None
        halves = [replace(layers[1], mlp=None), layers[0]]
        vocabulary = torch.randperm(decoder.config.vocab_size)[:40]
        head = decoder.make_linear(decoder.embedding[vocabulary], None)
        on_the_way = AdapterExit(decoder, 2, halves, layers[0].mlp.norm, None, None)
        at_the_end = AdapterExit(decoder, 3, [layers[2]], layers[1].mlp.norm, head, vocabulary)
        steps = [*decoder.layer_steps(1, 2), *on_the_way.fill_steps(3), *decoder.layer_steps(2, 3)]
        program = passes.program([*steps, *at_the_end.logit_steps(5)])
        kvs = [
            PagedKV(
                6,
                TABLES.numel(),
                BLOCK_SIZE,
                decoder.config.num_kv_heads,
                decoder.config.head_dim,
                torch.float32,
                CPU,
            )
            for _ in range(2)
        ]
        for rows in PASSES:
            view = make_view(rows)
            states = torch.randn(90, decoder.config.hidden_size)
            index = torch.randperm(90)[: view.num_tokens]
            left, others = torch.zeros_like(states), torch.randperm(90)[: view.num_tokens]
            before = states.clone()
            out = passes.run(program, Rows(states, index), kvs[0], view, Rows(left, others), True, True)
            assert torch.equal(states, before)
            decoder._fused = None
            hidden = decoder.run_layers(states[index], 1, 2, kvs[1], view)
            on_the_way.fill(hidden, kvs[1], 3, view)
            hidden = decoder.run_layers(hidden, 2, 3, kvs[1], view)
            logits = at_the_end.logits(hidden, kvs[1], 5, view)
            decoder._fused = passes
            assert torch.equal(out.hidden, hidden) and torch.equal(left[others], hidden)
            assert int((left != 0).any(1).sum()) == view.num_tokens
            assert out.logits is not None and torch.equal(out.logits, logits)
            assert out.best is not None and torch.equal(out.best, vocabulary[logits.argmax(-1)])
            assert out.sums is not None
            torch.testing.assert_close(1 / out.sums, logits.softmax(-1).amax(-1))
            assert torch.equal(kvs[0].data, kvs[1].data)
