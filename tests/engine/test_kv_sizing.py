"""How many KV blocks fit on a GPU, and what an engine does when memory runs out all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.view import BatchView
from ee_models.decoder import Decoder
from hispec.config import EngineConfig, Plan, SpeculativeConfig
from hispec.decoding import round, rounds_together
from hispec.decoding.batch import RoundBatch
from hispec.decoding.stages import Stages
from hispec.engine import Engine
from hispec.engine.kv_sizing import num_blocks_beside, try_largest_passes
from hispec.errors import ConfigError, build
from hispec.runner import launchers
from hispec.runner.buckets import prompt_bucket
from hispec.runner.plan_spec import Models, PlanSpec
from hispec.sampling_params import SamplingParams
from hispec.utils.memory import is_out_of_memory
from tests.helpers.drafters import ALL, draft_decoder, drafter_engine
from tests.helpers.support import make_engine, random_prompts, run, run_through_interrupts
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint

PROMPTS = random_prompts((1, 2, 7, 8, 9, 31, 33, 70))
MB = 1 << 20


def blocks(
    free: int, peak: int = 100 * MB, bytes_per_block: int = MB, model_len: int = 1600, **config: Any
) -> int:
    fields = {"max_num_seqs": 4, "block_size": 16, "max_graph_bytes": 100 * MB, **config}
    return num_blocks_beside(EngineConfig(**fields), free, peak, bytes_per_block, model_len)


def test_blocks_take_what_passes_and_graphs_leave() -> None:
    assert blocks(1000 * MB, gpu_memory_utilization=0.5) == 300
    assert blocks(1000 * MB, gpu_memory_utilization=0.5, graphs=False) == 400, "no graphs, no memory for them"
    assert blocks(1000 * MB, peak=399 * MB, gpu_memory_utilization=0.5) == 1
    assert blocks(100_000 * MB) == 4 * 100, "never more than all rows of full length need"


def test_probabilities_of_rejection_that_have_no_room_are_refused(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build(SpeculativeConfig, {"draft": {"layer": 3}, "acceptance": "rejection"})
    monkeypatch.setattr("hispec.runner.plan_runtime.free_memory_bytes", lambda: MB // 4)
    fits = EngineConfig(max_num_seqs=4, max_model_len=64, num_kv_blocks=16)
    assert Engine(tiny_decoder, fits, plan).memory()["probability_bytes"] < MB // 4
    more = fits.model_copy(update={"max_num_seqs": 64})
    with pytest.raises(
        ConfigError,
        match=r"max_num_seqs=64.*acceptance='rejection' keeps .* of probabilities, 0 MB are free",
    ):
        Engine(tiny_decoder, more, plan)


def test_no_room_for_a_block_is_an_error_that_names_what_to_lower() -> None:
    limits = (
        r"utilization=0\.5 allows 500 MB.*max_num_seqs=4.*max_prefill_tokens=2048 take 400 MB.*not one KV"
        r" block of 1 MB"
    )
    with pytest.raises(ConfigError, match=limits):
        blocks(1000 * MB, peak=400 * MB, gpu_memory_utilization=0.5)


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60)
    assert is_out_of_memory(failed.value)
    assert not is_out_of_memory(RuntimeError("something else")) and not is_out_of_memory(KeyboardInterrupt())


@sweep("name", ALL, 3)
def test_the_largest_passes_can_be_tried_over_a_single_block(
    tiny_decoder: Decoder, tmp_path: Any, expected: list[list[int]], name: str
) -> None:
    """As is done on a GPU to see what they need; nothing that they leave disturbs what comes after."""
    draft_model = (
        draft_decoder(tiny_checkpoint(tmp_path, hidden=32, num_layers=2)) if "model" in name else None
    )
    engine = drafter_engine(tiny_decoder, ALL[name], draft_model, is_static=True)
    models = Models(tiny_decoder, draft_model=draft_model, tables=engine._runtime.models.tables)
    trial = engine._plans.make(1, PlanSpec(models, build(SpeculativeConfig, ALL[name])))
    before = engine.stats()["layer_passes"]
    # A prompt's chunk; prompts of several requests, as long as they may be, and a part of one.
    for runtime, prefill_tokens, length in ((trial, 40, 256), (engine._runtime, 70, 16)):
        config = EngineConfig(max_num_seqs=8, block_size=8, max_prefill_tokens=prefill_tokens)
        counted = engine._counters[0].layer_positions
        try_largest_passes(config, tiny_decoder, length, runtime)
        padded = prompt_bucket(prefill_tokens)
        assert padded > prefill_tokens, "as passes over prompts are"
        assert engine._counters[0].layer_positions >= counted + padded * runtime.stages.num_layers
    assert engine.stats()["layer_passes"] > before + 9
    assert run(engine, PROMPTS) == expected


class Memory:
    """Lets passes fail that are too large."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefill_tokens: int = 1000, rows: int = 1000) -> None:
        self.num_failures = 0
        prefill = Stages.prefill

        def limited_prefill(stages: Stages, token_ids: Tensor, view: BatchView) -> None:
            self._check(token_ids.shape[0] > prefill_tokens)
            prefill(stages, token_ids, view)

        def limited(run: Callable[..., Any]) -> Callable[..., Any]:
            def limited_rounds(
                stages: Stages, plan: Plan, judge: Any, drafter: Any, batch: RoundBatch, *others: Any
            ) -> Any:
                result = run(stages, plan, judge, drafter, batch, *others)
                self._check(int((batch.limits > 0).sum()) > rows)  # in the end, when much has been written
                return result

            return limited_rounds

        monkeypatch.setattr(Stages, "prefill", limited_prefill)
        monkeypatch.setattr(launchers, "run_round", limited(round.run_round))
        monkeypatch.setattr(launchers, "run_together", limited(rounds_together.run_together))

    def _check(self, too_much: bool) -> None:
        if too_much:
            self.num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("name", ["ngram", "hybrid checks", "tree"])
def test_the_batch_shrinks_and_goes_on(
    tiny_decoder: Decoder,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    is_static: bool,
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], is_static=is_static, max_prefill_tokens=64)
    memory = Memory(monkeypatch, prefill_tokens=20, rows=3)
    assert run(engine, PROMPTS) == expected
    assert memory.num_failures >= 3
    assert (
        "prefill goes on with max_prefill_tokens=16" in caplog.text
        and "goes on with max_num_seqs=" in caplog.text
    )
    failures = memory.num_failures
    assert run(engine, PROMPTS) == expected
    assert memory.num_failures == failures, "what was learnt stays"


def test_penalties_count_each_token_once_when_a_round_fails(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.3
    )
    plain = run(make_engine(tiny_decoder), PROMPTS[:4], params)
    engine = drafter_engine(tiny_decoder, ALL["ngram"], is_static=True)
    memory = Memory(monkeypatch, rows=2)
    assert run(engine, PROMPTS[:4], params) == plain
    assert memory.num_failures > 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_penalties_count_each_token_once_when_the_round_after_fails(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """What the round before committed was counted already, so that this one could follow it."""
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.3
    )
    plain = run(make_engine(tiny_decoder), PROMPTS[:2], params)
    engine = drafter_engine(tiny_decoder, ALL["ngram"], is_static=True)
    run_round, num_ahead = round.run_round, 0

    def fails_when_ahead(*args: Any) -> Any:
        nonlocal num_ahead
        result = run_round(*args)
        num_ahead += engine._loop.flight is not None
        if engine._loop.flight is not None and num_ahead % 3 == 2:
            raise error
        return result

    monkeypatch.setattr(launchers, "run_round", fails_when_ahead)
    assert run_through_interrupts(engine, PROMPTS[:2], params) == plain
    assert num_ahead > 6


def test_a_request_that_does_not_fit_alone_ends_and_others_go_on(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2), max_prefill_tokens=64)
    prefill = Stages.prefill

    def too_large_after_40(stages: Stages, token_ids: Tensor, view: BatchView) -> None:
        if view.max_context_len > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        prefill(stages, token_ids, view)

    monkeypatch.setattr(Stages, "prefill", too_large_after_40)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    errors, finished = {}, set()
    while engine.has_unfinished():
        for delta in engine.step():
            if delta.finish_reason is not None:
                finished.add(delta.request_id)
            if delta.error is not None:
                errors[delta.request_id] = delta.error
        engine.check()
    assert finished == set(ids)
    assert list(errors) == [ids[7]] and "out of memory, even alone: CUDA out of memory" in errors[ids[7]]
    assert engine.stats()["kv_blocks_used"] == 0


def test_other_errors_are_not_taken_for_it(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("device-side assert")

    engine: Engine = make_engine(tiny_decoder)
    engine.add_request(PROMPTS[3], SamplingParams(max_tokens=2))
    monkeypatch.setattr(Stages, "prefill", broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.step()
