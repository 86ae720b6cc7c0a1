"""What happens around a round of static shape when something fails in between: copies, drafters, tables of
the sampler, interrupts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ee_models.decoder import Decoder
from hispec.config import Plan, SpeculativeConfig
from hispec.drafters.autoregressive import ExitHead
from hispec.engine.step_loop import StepLoop
from hispec.runner.launchers import StaticLauncher
from hispec.runner.plan_cache import MOST_KEPT
from hispec.sampling.logits import Logits
from hispec.sampling.logits_processors import Penalties
from hispec.sampling.sampler import Sampler
from hispec.sampling_params import SamplingParams
from tests.helpers.drafters import ALL, draft_decoder, drafter_engine
from tests.helpers.support import make_engine, random_prompts, run, run_through_interrupts
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint

PROMPTS = random_prompts((1, 2, 7, 8, 9, 31, 33, 70))


@sweep("after, at", itertools.product([False, True], range(1, 9)), 3)
def test_a_copy_of_block_tables_that_was_interrupted_is_made_again(
    tiny_decoder: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, at: int, after: bool
) -> None:
    copy, calls = StaticLauncher._copy, 0

    def interrupted(self: StaticLauncher, target: Tensor, source: Tensor) -> None:
        nonlocal calls
        calls += target is self._block_tables
        if after:
            copy(self, target, source)
        if target is self._block_tables and calls == at:
            raise KeyboardInterrupt
        copy(self, target, source)

    monkeypatch.setattr(StaticLauncher, "_copy", interrupted)
    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2), is_static=True, block_size=4, max_num_seqs=3)
    assert run_through_interrupts(engine, PROMPTS) == expected
    assert calls > at


@pytest.mark.parametrize("is_static", [False, True])
def test_memory_that_a_drafter_lacks_shrinks_the_batch_and_keeps_the_drafter(
    tiny_decoder: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, is_static: bool
) -> None:
    logits = ExitHead.logits

    def limited(self: ExitHead, batch: Any, span: Any, asks_probability: bool) -> Logits:
        if int((batch.limits > 0).sum()) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits(self, batch, span, asks_probability)

    monkeypatch.setattr(ExitHead, "logits", limited)
    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2), is_static=is_static)
    assert run(engine, PROMPTS) == expected
    stats = engine.stats()
    assert stats["drafter_failures"] == 0 and stats["drafted"] > 0


def test_tables_of_the_sampler_that_do_not_fit_shrink_the_batch(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=16, repetition_penalty=1.2)
    plain = run(make_engine(tiny_decoder), PROMPTS, params)
    make_tables = Penalties.make_tables

    def limited(self: Penalties, num_lines: int) -> None:
        if num_lines > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        make_tables(self, num_lines)

    monkeypatch.setattr(Penalties, "make_tables", limited)
    engine = drafter_engine(tiny_decoder, ALL["ngram"], is_static=True)
    assert run(engine, PROMPTS[:2], params) == plain[:2]
    assert run(engine, PROMPTS, params) == plain


def test_penalties_that_cannot_be_counted_are_counted_anew(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=16, repetition_penalty=1.2)
    plain = run(make_engine(tiny_decoder), PROMPTS[:3], params)
    advance, calls = Sampler.advance, 0

    def fails(self: Sampler, tokens: Tensor, counts: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        advance(self, tokens, counts)

    monkeypatch.setattr(Sampler, "advance", fails)
    for is_static in (False, True):
        assert (
            run(make_engine(tiny_decoder, Plan(3, 6, 2, 2), is_static=is_static), PROMPTS[:3], params)
            == plain
        )


@pytest.mark.parametrize("is_static", [False, True])
def test_prompt_lookup_forgets_what_a_lost_round_told_it(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, is_static: bool
) -> None:
    """A text of one token, so that all drafts are right, up to the longest text that there may be."""
    params = SamplingParams(temperature=0.0, max_tokens=44, logit_bias={7: 100.0})
    read, calls = StepLoop.read, 0

    def interrupted(self: StepLoop, flight: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 4):
            raise KeyboardInterrupt
        read(self, flight)

    monkeypatch.setattr(StepLoop, "read", interrupted)
    engine = drafter_engine(tiny_decoder, ALL["ngram"], is_static=is_static, max_model_len=64)
    assert run_through_interrupts(engine, [[7] * 20], params) == [[7] * 44]
    stats = engine.stats()
    assert stats["drafter_failures"] == 0 and stats["looked_up_kept"] == stats["looked_up"] > 20


@pytest.mark.parametrize("is_static", [False, True])
def test_plans_of_one_draft_model_share_its_kv(
    tiny_decoder: Decoder, expected: list[list[int]], is_static: bool
) -> None:
    """The draft model is the target: where its KV is there, all drafts are right."""
    engine = drafter_engine(tiny_decoder, ALL["model"], tiny_decoder, is_static=is_static)
    first, other = (
        SpeculativeConfig(**ALL["model"]),
        SpeculativeConfig(**{**ALL["model"], "num_draft_tokens": 2}),
    )
    for speculative in (first, None, other, first):
        engine.set_speculative(speculative, draft_model=tiny_decoder if speculative else None)
        engine.reset_stats()
        assert run(engine, PROMPTS) == expected
        stats = engine.stats()
        assert stats["draft_kept"] == stats["drafted"]
    assert stats["cached_tokens"] > 0


def test_what_plans_keep_is_counted_and_released(tiny_decoder: Decoder, tmp_path: Path) -> None:
    from tests.helpers.recorded_graphs import RecordedGraphs

    draft_model = draft_decoder(tiny_checkpoint(tmp_path, hidden=32, num_layers=2))
    engine = drafter_engine(
        tiny_decoder, ALL["model"], draft_model, is_static=True, graph_device=RecordedGraphs()
    )
    held = engine.memory()["hidden_bytes"]
    kept = [engine._runtime]
    for length in range(1, 30):
        engine.set_speculative(
            SpeculativeConfig(**{**ALL["model"], "num_draft_tokens": length}), draft_model=draft_model
        )
        kept.append(engine._runtime)
        assert len(engine._plans.kept) <= MOST_KEPT < 29
    assert engine.memory()["hidden_bytes"] == sum(each.hidden.num_bytes for each in engine._plans.kept) > held
    assert all(each.draft_kv is kept[0].draft_kv for each in engine._plans.kept)
    engine.close()
    assert all(
        each.kv.num_bytes == 0 and each.draft_kv is not None and each.draft_kv.num_bytes == 0
        for each in engine._plans.kept
    )
