"""Passes over prompts: padded to few shapes, and from captured graphs, as on a GPU."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from ee_models.decoder import Decoder
from hispec.config import DraftConfig, EngineConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.runner.buckets import prompt_bucket, prompt_rows_bucket
from hispec.runner.prefill import PackedPrompts, StaticPrompts
from hispec.sampling_params import SamplingParams
from tests.helpers.recorded_graphs import RecordedGraphs
from tests.helpers.support import make_engine, run

BLOCK_SIZE, BLOCKS_OF_ROW = 4, 6


def test_shapes_are_few_and_hold_what_they_are_for() -> None:
    tokens = [prompt_bucket(num) for num in range(1, 2049)]
    assert all(num <= bucket <= max(16, 2 * num) for num, bucket in enumerate(tokens, start=1))
    assert all(bucket <= 1.5 * num for num, bucket in enumerate(tokens, start=1) if num > 256)
    assert sorted(set(tokens)) == [16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048]
    assert [prompt_rows_bucket(num) for num in (0, 1, 2, 4, 5, 16, 17, 64, 65)] == [
        1,
        1,
        4,
        4,
        16,
        16,
        64,
        64,
        256,
    ]


def prompts_engine(decoder: Decoder, **config: Any) -> Engine:
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": 40,
        "max_num_seqs": 5,
        "max_model_len": 24,
    }
    return make_engine(decoder, is_static=True, **{**settings, **config})


def tables() -> torch.Tensor:
    """Of five rows, in an order of their own."""
    blocks = torch.randperm(40, generator=torch.Generator().manual_seed(3))[: 5 * BLOCKS_OF_ROW]
    return blocks.view(5, BLOCKS_OF_ROW)


@pytest.mark.parametrize("seed", range(4))
def test_padded_passes_write_what_passes_without_padding_write_and_nothing_else(
    tiny_decoder: Decoder, seed: int
) -> None:
    rng, engines = random.Random(seed), [prompts_engine(tiny_decoder) for _ in range(2)]
    passes = PackedPrompts(BLOCK_SIZE), StaticPrompts(BLOCK_SIZE, 24, 5, None)
    done = dict.fromkeys(range(5), 0)
    for _ in range(6):  # chunks of prompts, those of one row in order
        rows = sorted(rng.sample(range(5), rng.randint(1, 5)))
        parts = []
        for row in rows:
            num = min(rng.randint(1, 8), 24 - done[row])
            if num:
                parts.append((row, done[row], [rng.randrange(3, 90) for _ in range(num)]))
                done[row] += num
        if not parts:
            continue
        with torch.inference_mode():
            for engine, how in zip(engines, passes, strict=True):
                token_ids, view = how.run(engine._runtime, parts, tables())
                assert token_ids.shape == view.positions.shape == view.slots.shape
                assert int(view.cu_q_lens[-1]) == len(token_ids) and view.max_context_len <= 24
                assert int(view.cu_q_lens.diff().max()) <= view.max_q_len
                assert int(view.positions.max()) < view.max_context_len
    packed, static = (engine._runtime.kv.data[..., : 40 * BLOCK_SIZE, :, :] for engine in engines)
    assert packed.abs().sum() > 0
    torch.testing.assert_close(static, packed, rtol=1e-4, atol=1e-5)
    assert torch.equal(static == 0, packed == 0)
    for engine in engines:
        engine.close()


def test_prompts_come_from_graphs_that_share_no_memory_with_those_of_rounds(
    torch_decoder: Decoder, no_numba: None
) -> None:
    graphs = RecordedGraphs()
    graphs.bytes_of_a_graph = 1000
    engine = prompts_engine(torch_decoder, graph_device=graphs)
    expected = prompts_engine(torch_decoder, graphs=False)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 90) for _ in range(rng.randint(2, 15))] for _ in range(30)]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    assert run(engine, prompts, params) == run(expected, prompts, params)
    (of_prompts,) = graphs.others
    stats = engine.stats()
    assert 0 < of_prompts.num_captured == stats["prompt_graph_captures"] == stats["prompt_graphs"]
    assert stats["prompt_graph_replays"] > of_prompts.num_captured
    assert stats["graph_captures"] == graphs.num_captured > 0
    assert (
        engine.memory()["graph_bytes"]
        == graphs.num_bytes() + of_prompts.num_bytes()
        == 1000 * (graphs.num_captured + of_prompts.num_captured)
    )
    engine._rounds.drop_graphs()
    assert engine.stats()["prompt_graphs"] == engine.stats()["graphs"] == 0
    assert run(engine, prompts, params) == run(expected, prompts, params)
    assert "prompt_graphs" not in expected.stats()


def test_a_prompt_that_cannot_be_captured_is_computed_all_the_same(
    torch_decoder: Decoder, no_numba: None, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = RecordedGraphs()
    engine = prompts_engine(torch_decoder, graph_device=graphs)
    graphs.others[0].failure = lambda: RuntimeError("not here")
    params = SamplingParams(temperature=0.0, max_tokens=4)
    outputs = [run(engine, [[5, 6, 7, 8]], params) for _ in range(4)]
    assert outputs == [outputs[0]] * 4 and graphs.others[0].num_tried == 1
    assert engine.stats()["prompt_graphs"] == 0 < engine.stats()["graph_replays"]
    assert "could not be captured" in caplog.text


def test_a_shape_is_captured_when_it_comes_again(torch_decoder: Decoder, no_numba: None) -> None:
    graphs = RecordedGraphs()
    engine = prompts_engine(torch_decoder, graph_device=graphs, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    captures = []
    for _ in range(4):
        run(engine, [[5, 6, 7, 8]], params)
        captures.append(engine.stats()["prompt_graph_captures"])
    assert captures == [0, 1, 1, 1] and engine.stats()["prompt_graph_replays"] == 2


def test_the_time_of_a_round_is_not_told_where_a_prompt_was_captured_behind_it(
    torch_decoder: Decoder, no_numba: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = prompts_engine(torch_decoder, graph_device=RecordedGraphs(), enable_prefix_caching=False)
    timed: list[bool] = []
    record = engine._recorder.record_round

    def recorded(flight: Any, choice: Any, rows: Any, seconds: float) -> None:
        timed.append(not math.isnan(seconds))
        record(flight, choice, rows, seconds)

    monkeypatch.setattr(engine._recorder, "record_round", recorded)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    engine.add_request([5, 6, 7, 8], params)
    for step in range(24):
        if step in (4, 8, 12):
            engine.add_request([9 + step, 6, 7, 8], params)
        before, known = engine.stats()["prompt_graph_captures"], len(timed)
        engine.step()
        if engine.stats()["prompt_graph_captures"] > before and len(timed) > known:
            assert not timed[known]
            return
    raise AssertionError("no prompt was captured behind a round")


def test_a_plan_without_graphs_has_none_of_prompts(torch_decoder: Decoder, no_numba: None) -> None:
    graphs = RecordedGraphs()
    speculative = SpeculativeConfig(draft=DraftConfig(layer=1), graphs=False)
    config = EngineConfig(max_num_seqs=2, max_model_len=24, block_size=BLOCK_SIZE, num_kv_blocks=12)
    engine = Engine(torch_decoder, config, speculative, is_static=True, graph_device=graphs)
    run(engine, [[5, 6, 7, 8]], SamplingParams(temperature=0.0, max_tokens=4))
    assert engine.stats()["prompt_graph_captures"] == engine.stats()["graph_captures"] == 0
