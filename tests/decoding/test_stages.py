"""Packing of live tokens says what a walk row by row says, and `spread` puts values back where they came
from."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.pass_steps import Kind
from hispec.config import Plan
from hispec.decoding import stages
from hispec.decoding.batch import RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.decoding.stages import PassCounts, Stages
from hispec.sampling.sampler import Sampler
from tests.helpers.adapters import loaded, make_exits
from tests.helpers.support import make_engine, random_prompts, run

WINDOW = 6


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("has_numba", [False, True])
def test_packing_agrees_with_a_walk(
    rows: int, q_len: int, block_size: int, share: float, has_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "runs_numba", lambda device: has_numba)
    generator = torch.Generator().manual_seed(rows * 100 + q_len * 10 + block_size)
    first, nodes = torch.randint(0, WINDOW - q_len + 1, (rows,), generator=generator), torch.arange(q_len)
    num_live = (torch.rand(rows, generator=generator) * (q_len + 2) * share).long()
    live = nodes < num_live.unsqueeze(-1)
    index = first.unsqueeze(-1) + nodes
    starts = torch.randint(0, 40, (rows,), generator=generator)
    tables = torch.randperm(rows * 64, generator=generator).view(rows, 64)
    limits = torch.full((rows,), WINDOW)
    sampler = Sampler([None] * rows, 50, torch.device("cpu"))
    batch = RoundBatch(
        torch.zeros(rows, WINDOW + 1, dtype=torch.int64),
        starts,
        limits,
        limits,
        limits,
        tables,
        block_size,
        64,
        sampler,
    )
    walked, ends = [], [0]
    for row in range(rows):
        for j in range(q_len):
            if live[row, j]:
                column = int(index[row, j])
                position = int(starts[row]) + column
                slot = int(tables[row, position // block_size]) * block_size + position % block_size
                flat, cell = row * WINDOW + column, row * q_len + j
                walked.append((row, column, flat, cell, position, slot, j, int(first[row])))
        ends.append(len(walked))
    span = Stages.select(batch, DraftTree.chain(q_len), first, nodes, num_live)
    addresses = (span.rows, span.columns, span.flat, span.cell, span.view.positions, span.view.slots)
    found = (*addresses, span.node, span.first)
    assert list(zip(*(values.tolist() for values in found), strict=True)) == walked
    assert span.view.cu_q_lens.tolist() == ends
    assert torch.equal(span.spread(torch.ones(span.num_tokens)).bool(), live)
    assert torch.equal(span.spread(span.columns + 1), torch.where(live, index + 1, 0))


@pytest.mark.parametrize("plan", [Plan(), Plan(3, None, 2, 1), Plan(3, 6, 2, 2)], ids=str)
def test_each_pass_is_timed_as_its_tiers(
    tiny_decoder: Decoder, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by one whenever somebody looks: the seconds of a tier are its passes."""
    monkeypatch.setattr(stages, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    engine = make_engine(tiny_decoder, plan, max_run_ms=0.0)
    run(engine, random_prompts((7, 9)))
    stats = engine.stats()
    steps, cycles = stats["steps"], stats["steps"] * plan.num_checks
    assert stats["verify_pass_s"] == steps > 0
    if plan.is_plain:
        assert stats["draft_pass_s"] == 0
    else:
        assert steps < stats["draft_pass_s"] <= cycles * (plan.num_draft_tokens + 1)
    if plan.check_layer is None:
        assert stats["check_pass_s"] == 0
    else:
        assert steps < stats["check_pass_s"] <= cycles


@pytest.mark.parametrize(
    "numbers", [{}, {"weights_dtype": torch.bfloat16}, {"quantization": "int8"}], ids=str
)
def test_prompts_in_one_call_leave_the_kv_of_single_operations(
    numbers: dict[str, Any], tiny_path: Path, tmp_path: Path
) -> None:
    """Bit for bit, that of the model and of exits of one, no and two blocks."""
    checkpoint, cpu = open_checkpoint(tiny_path), torch.device("cpu")
    decoder = Decoder.load(checkpoint, torch.float32, cpu, **numbers)
    infos = [ExitInfo(layer=2), ExitInfo(layer=5, num_blocks=0), ExitInfo(layer=7, num_blocks=2)]
    exits = loaded(make_exits(tmp_path, checkpoint, infos), decoder, checkpoint)
    config, token_ids = decoder.config, torch.arange(50, 61)
    positions = torch.cat([torch.arange(7), torch.arange(4)])
    slots = positions + 16 * (torch.arange(11) >= 7)
    cu_q_lens, tables = torch.tensor([0, 7, 11]), torch.arange(4).view(2, 2)
    view, found = BatchView(positions, slots, tables, cu_q_lens, 7, 7), []
    for is_one_call in (True, False):
        kv = PagedKV(12, 4, 8, config.num_kv_heads, config.head_dim, decoder.kv_dtype, cpu)
        kv.data.zero_()
        counts = PassCounts()
        of_prompts = Stages(decoder, 9, kv, None, counts, exits, written=())
        program = of_prompts._program_of(0, 9, False, is_prompt=True)
        assert (program is not None) == is_one_call
        assert program is None or program.steps[-1].kind is Kind.FILL, "nobody reads what comes after"
        of_prompts.prefill(token_ids, view)
        assert bool(kv.data.flatten(3)[:, :, slots].any(-1).all()), "every layer has keys and values"
        found.append((kv.data, counts))
        decoder._fused = None
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert (found[0][1].prefill_layer_passes, found[0][1].layer_positions) == (9, 99)
