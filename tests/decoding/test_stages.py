"""Packing of live tokens says what a walk row by row says, and `spread` puts values back where they came
from."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.decoding import stages
from hispec.decoding.batch import RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.decoding.stages import Stages
from hispec.sampling.sampler import Sampler
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
