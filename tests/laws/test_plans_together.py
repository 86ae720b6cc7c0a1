"""Rounds of plans that run as one call: tokens, counts, tiers and bits are those of rounds stage by stage."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ee_models import fused_pass
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec.config import EngineConfig, Plan, SchedulingConfig, SpeculativeConfig
from hispec.decoding import rounds_linked
from hispec.decoding.rounds_numba import Stage
from hispec.decoding.stages import Stages
from hispec.drafters.ngram import NgramDrafter
from hispec.engine import Engine
from hispec.engine.step_loop import StepLoop
from hispec.errors import build
from hispec.runner.launchers import PackedLauncher
from hispec.runner.round_runner import _MOST_TOGETHER
from hispec.stats import RoundCounts
from tests.helpers.adapter_engines import CASES
from tests.helpers.drafters import ALL, KINDS, FixedDrafter, drafter_engine, with_drafter
from tests.helpers.restless import flat_latency, make_restless
from tests.helpers.runs import (
    LONG,
    NUMBERS,
    PROMPTS,
    but,
    lengths_of_steps,
    one_by_one,
    repetitive,
    spied,
    together,
)
from tests.helpers.support import GREEDY, run, run_through_interrupts, threads
from tests.helpers.sweeps import sweep

EVERY_COUNT = sorted({field.name for field in fields(RoundCounts)} | {"layer_passes", "layer_positions"})
COMPILED = [name for name, values in KINDS.items() if values["draft"].get("kind") != "model"]
Make = Callable[..., Engine]


TEXTS = [*PROMPTS, *(repetitive(length, length) for length in (12, 40))]
MIXED = [
    but(GREEDY, max_tokens=number, tiers=True, speculative=at != 3)
    for at, number in enumerate((24, 23, 5, 9, 17, 40, 33, 60))
]


SIZES: list[dict[str, int]] = [{}, {"max_num_seqs": 2, "block_size": 4}, {"num_kv_blocks": 16}]


@sweep("name, sizes", itertools.product(COMPILED, SIZES), 2, ids=str)
def test_every_plan_does_in_one_call_what_it_does_round_by_round(
    tiny_decoder: Decoder, name: str, sizes: dict[str, int]
) -> None:
    single = drafter_engine(tiny_decoder, KINDS[name], max_run_ms=0.0, **sizes)
    several = drafter_engine(tiny_decoder, KINDS[name], **sizes)
    expected = run(single, TEXTS, MIXED)
    with spied(Stages, "run_linked") as calls:
        assert run(several, TEXTS, MIXED) == expected
    assert calls
    before, after = single.stats(), several.stats()
    assert after["steps"] < before["steps"], "or nothing ran together"
    if not sizes:  # else who shares a round with whom hangs on when rows end
        assert {count: after[count] for count in EVERY_COUNT} == {
            count: before[count] for count in EVERY_COUNT
        }


@pytest.mark.parametrize("name", ["ngram", "exit gated", "hybrid sure gated"])
def test_a_round_by_itself_is_one_call_too(tiny_decoder: Decoder, name: str) -> None:
    """Also while another's prompt is computed; but not where logits are asked for, or any row is sampled."""
    single, several = (
        drafter_engine(tiny_decoder, KINDS[name], max_run_ms=each, max_prefill_tokens=8)
        for each in (0.0, 1e-3)
    )
    expected = run(single, TEXTS, MIXED)
    with spied(Stages, "run_linked") as calls:
        assert run(several, TEXTS, MIXED) == expected
    before, after = single.stats(), several.stats()
    assert after["steps"] == before["steps"] and len(calls) > after["steps"] // 2
    for each in calls:
        assert sum(each[stage].passes for stage in (Stage.VERIFY, Stage.VERIFY_DRAFTS) if stage in each) == 1
    assert {count: after[count] for count in EVERY_COUNT} == {count: before[count] for count in EVERY_COUNT}
    for changed in ({"logprobs": 1}, {"temperature": 0.8, "seed": 1}):
        with spied(Stages, "run_linked") as calls:
            run(several, [TEXTS[1], TEXTS[4]], [GREEDY, but(GREEDY, max_tokens=60, **changed)])
        assert not calls


@sweep("name", COMPILED, 2)
def test_a_row_alone_has_the_counts_the_tiers_and_the_kv_of_single_rounds(
    tiny_decoder: Decoder, name: str
) -> None:
    """All of it, whatever happens when: by tokens of every Delta, and bits of all that was computed."""
    for number, text in enumerate(TEXTS):
        params = but(GREEDY, max_tokens=50, tiers=True, stop_token_ids=[7 * number])
        found = []
        for max_run_ms in (0.0, LONG):
            engine = drafter_engine(
                tiny_decoder,
                KINDS[name],
                max_run_ms=max_run_ms,
                max_num_seqs=1,
                enable_prefix_caching=False,
            )
            engine.add_request(text, params)
            deltas = []
            while engine.has_unfinished():
                deltas += engine.step()
            (done,) = (delta for delta in deltas if delta.finish_reason is not None)
            tokens = [token for delta in deltas for token in delta.token_ids]
            tiers = [tier for delta in deltas for tier in delta.tiers or ()]
            stats = engine.stats()
            kv = engine._runtime.kv.data[:, :, : len(text) + len(tokens) - 1].clone()
            counts = {name: stats[name] for name in (*EVERY_COUNT, "adapter_passes")}
            assert done.metrics is not None
            found.append((tokens, tiers, counts, done.finish_reason, done.metrics.rounds, kv))
        assert found[0][:-1] == found[1][:-1]
        assert torch.equal(found[0][-1], found[1][-1]) and bool(found[0][-1].any())


@sweep(
    "name, plan, num_threads",
    [(*case, num_threads) for case in CASES for num_threads in (1, 3)],
    lambda case: CASES.index(case[:2]) % 2 == (case[2] == 3),
    ids=str,
)
def test_trained_exits_do_so_too(engine_of: Make, name: str, plan: Plan, num_threads: int) -> None:
    """Those with blocks of their own, and with a vocabulary of their own."""
    with threads(num_threads):
        single, several = (engine_of(name, plan, max_run_ms=each) for each in (0.0, LONG))
        outputs = run(single, TEXTS, MIXED)
        with spied(Stages, "run_linked") as calls:
            assert run(several, TEXTS, MIXED) == outputs
        assert calls
    for count in (*EVERY_COUNT, "adapter_passes"):
        assert several.stats()[count] == single.stats()[count], count


@pytest.mark.parametrize("name", ["ngram", "ngram gated", "exit gated", "hybrid sure gated"])
def test_plans_run_together_in_other_number_formats(tiny_path: Path, name: str) -> None:
    for options in (NUMBERS["int8"], {"kv_dtype": torch.bfloat16}, {"quantization": "int4"}):
        decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"), **options)
        single = drafter_engine(decoder, KINDS[name], max_run_ms=0.0)
        several = drafter_engine(decoder, KINDS[name])
        assert run(several, TEXTS, MIXED) == run(single, TEXTS, MIXED)
        assert several.stats()["steps"] < single.stats()["steps"]


@sweep("name", ["ngram", "exit gated", "hybrid sure gated"], ("exit gated").__ne__)
def test_every_row_of_a_plan_ends_as_it_would_alone(tiny_decoder: Decoder, name: str) -> None:
    """By a stop token, and by its room, at any place of a round and of a run."""
    params = but(GREEDY, max_tokens=30, ignore_eos=True)
    whole = run(one_by_one(tiny_decoder), TEXTS, params)
    engine = drafter_engine(tiny_decoder, KINDS[name])
    for row, output in enumerate(whole):
        for token in output[2:24:4]:
            length = output.index(token) + 1
            mixed = [params] * len(TEXTS)
            for ended in ({"stop_token_ids": [token]}, {"max_tokens": length}):
                mixed[row] = but(params, **ended)
                found = run(engine, TEXTS, mixed)
                assert found[row] == output[:length]
                assert found[:row] + found[row + 1 :] == whole[:row] + whole[row + 1 :]


@pytest.mark.parametrize("name", ["tree", "model", "model gated"])
def test_what_is_not_compiled_runs_round_by_round(tiny_decoder: Decoder, name: str) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], tiny_decoder)
    with spied(Stages, "run_linked") as calls:
        run(engine, TEXTS, but(GREEDY, max_tokens=12))
    assert not calls


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.5, "seed": 3}, {"logprobs": 1}, {"repetition_penalty": 1.1}, {"min_tokens": 9}],
    ids=str,
)
def test_one_row_that_needs_the_host_keeps_the_rounds_of_a_plan_apart(
    tiny_decoder: Decoder, asked: dict[str, Any]
) -> None:
    params = [but(GREEDY, max_tokens=12)] * len(TEXTS)
    params[2] = but(GREEDY, max_tokens=40, ignore_eos=True, **asked)  # it ends last
    engine = drafter_engine(tiny_decoder, KINDS["ngram"])
    with spied(Stages, "run_linked") as calls:
        outputs = run(engine, TEXTS, params)
    assert not calls
    assert outputs == run(one_by_one(tiny_decoder), TEXTS, params)


def test_rows_without_room_for_drafts_run_with_the_others(tiny_decoder: Decoder) -> None:
    """Whose requests opted out, beside some that did not; and all of them, which is plain decoding."""
    for speculates in (lambda at: at % 2 == 0, lambda _: False):
        params = [but(GREEDY, speculative=speculates(at)) for at in range(len(TEXTS))]
        engine = drafter_engine(tiny_decoder, KINDS["hybrid"])
        assert run(engine, TEXTS, params) == run(one_by_one(tiny_decoder), TEXTS)


def test_rows_that_all_opted_out_of_a_plan_run_together_as_plain_decoding(tiny_decoder: Decoder) -> None:
    params = but(GREEDY, max_tokens=60, ignore_eos=True, speculative=False)
    lengths = list(lengths_of_steps(drafter_engine(tiny_decoder, KINDS["ngram"]), params))
    assert lengths == list(lengths_of_steps(together(tiny_decoder), params))
    assert max(lengths) == _MOST_TOGETHER


@pytest.mark.parametrize("name", ["ngram gated", "tree", "model"])
def test_what_does_not_run_together_takes_no_blocks_for_it(tiny_path: Path, name: str) -> None:
    options = NUMBERS["sdpa"] if name == "ngram gated" else {}
    decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"), **options)
    found = []
    for max_run_ms in (0.0, LONG):
        engine = drafter_engine(decoder, ALL[name], decoder, max_run_ms=max_run_ms)
        with spied(PackedLauncher, "launch") as flights:
            outputs = run(engine, TEXTS, but(GREEDY, max_tokens=20))
        found.append((outputs, [flight.rows.context_len for flight in flights]))
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["fcfs", "laps"])
@pytest.mark.parametrize("seed", range(3))
def test_plans_that_change_between_runs_and_runs_that_are_lost(
    tiny_decoder: Decoder, policy: str, seed: int
) -> None:
    """A controller that changes its mind, also about single requests, few blocks, and interrupts before the
    host has read a run: of drafters that several plans share."""
    ways = {**KINDS["hybrid sure gated"], "control": "goodput", "goodput": {}}
    config = EngineConfig(max_num_seqs=4, max_model_len=256, block_size=4, num_kv_blocks=80, max_run_ms=LONG)
    engine = Engine(
        tiny_decoder,
        config,
        build(SpeculativeConfig, ways),
        latency=flat_latency([5, 8]),
        scheduling=SchedulingConfig(policy=policy),
    )
    control, chance = make_restless(engine, seed, watches=0.1), random.Random(seed)
    engine._rounds._last_rounds = AlwaysShort()
    original, lost = StepLoop.read, []

    def lose(loop: StepLoop, flight: Any) -> None:
        if chance.random() < 0.2:
            lost.append(flight.result.num_rounds)
            raise KeyboardInterrupt
        original(loop, flight)

    params = but(GREEDY, max_tokens=80, ignore_eos=True)
    expected = run(one_by_one(tiny_decoder), TEXTS, params)
    with patch.object(StepLoop, "read", lose), spied(Stages, "run_linked") as calls:
        assert run_through_interrupts(engine, TEXTS, params) == expected
    assert len(calls) > 9 and max(lost) > 1
    assert len({choice.plan for choice in control.choices}) > 5


class AlwaysShort(dict[Plan, tuple[float, int]]):
    """Rounds of any plan take no time, as the runner is told."""

    def get(self, plan: Plan, _: Any = None) -> tuple[float, int]:
        return 0.1, 1


def test_texts_that_a_lost_run_has_extended_are_set_right(tiny_decoder: Decoder) -> None:
    """The tokens of a run that the host never saw are in no text afterwards."""
    engine = drafter_engine(tiny_decoder, KINDS["ngram"], max_num_seqs=2)
    expected = run(drafter_engine(tiny_decoder, KINDS["ngram"], max_num_seqs=2), TEXTS[-2:])
    drafter, lost = engine._runtime.drafter, []
    assert isinstance(drafter, NgramDrafter)
    original = StepLoop.read

    def lose(loop: StepLoop, flight: Any) -> None:
        if flight.result.num_rounds > 1 and len(lost) < 2:
            lost.append(flight.result.num_rounds)
            raise KeyboardInterrupt
        original(loop, flight)

    original_follow = NgramDrafter.follow

    def follow(self: NgramDrafter, rows: Any) -> None:
        original_follow(self, rows)
        for number, token_ids in rows:
            row = self._index_row_of[number]
            assert self._lookup._texts.tokens[row, : self._lookup.length(row)].tolist() == token_ids

    with patch.object(StepLoop, "read", lose), patch.object(NgramDrafter, "follow", follow):
        assert run_through_interrupts(engine, TEXTS[-2:]) == expected
    assert len(lost) == 2 and min(lost) > 1


def test_the_time_of_linked_passes_is_that_of_their_tiers(tiny_decoder: Decoder) -> None:
    engine = drafter_engine(tiny_decoder, KINDS["hybrid sure gated"])
    with spied(Stages, "run_linked") as calls:
        run(engine, TEXTS, but(GREEDY, max_tokens=40))
    stats = engine.stats()
    seconds = [stats[f"{tier}_pass_s"] for tier in ("draft", "check", "verify")]
    assert calls and min(seconds) > 0.0 and sum(seconds) < stats["round_s"]


def test_without_a_clock_all_time_is_verifys(tiny_decoder: Decoder) -> None:
    with patch.object(fused_pass, "find_clock", lambda: 0):
        engine = drafter_engine(tiny_decoder, KINDS["exit gated"])
        engine.add_request(TEXTS[0], but(GREEDY, max_tokens=60))
        engine.step(), engine.step()
        before = engine.stats()
        engine.step()
        after = engine.stats()
    assert after["rounds"] > before["rounds"] + 1
    assert after["verify_pass_s"] > before["verify_pass_s"]
    assert after["draft_pass_s"] == before["draft_pass_s"]


def test_a_run_has_blocks_for_all_of_its_rounds(engine_of: Make) -> None:
    """Also where each of them commits all that it can."""
    engine = engine_of("right", Plan(3, None, 3, 1), max_run_ms=LONG)
    with spied(PackedLauncher, "launch") as flights:
        run(engine, [TEXTS[2]], but(GREEDY, max_tokens=1 + 4 * (1 + 2 * _MOST_TOGETHER)))
    committed = [(flight.result.num_rounds, int(flight.result.counts[0])) for flight in flights]
    assert committed[1:3] == [(_MOST_TOGETHER, 4 * _MOST_TOGETHER)] * 2


def test_a_run_takes_no_more_blocks_than_there_are(tiny_decoder: Decoder) -> None:
    """It ends where the next round would lack places, and gives back what it has not used."""
    engine = drafter_engine(tiny_decoder, KINDS["ngram"], block_size=4, num_kv_blocks=13)
    expected = run(one_by_one(tiny_decoder), TEXTS[:2], but(GREEDY, max_tokens=30))
    assert run(engine, TEXTS[:2], but(GREEDY, max_tokens=30)) == expected


@pytest.mark.parametrize("error", [MemoryError("no memory"), torch.OutOfMemoryError("out of memory")])
def test_a_row_alone_that_lacks_memory_for_one_call_goes_on_stage_by_stage(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Where there are several, they become fewer first."""
    expected = run(one_by_one(tiny_decoder), TEXTS[:3])
    refused: list[int] = []

    def refuse(*inputs: Any) -> Any:
        refused.append(inputs[4].num_rows)
        raise error

    monkeypatch.setattr(rounds_linked, "run", refuse)
    engine = drafter_engine(tiny_decoder, KINDS["exit gated"])
    assert run(engine, TEXTS[:3]) == expected
    stats = engine.stats()
    assert 1 in refused and max(refused) > 1
    assert stats["drafted"] > 0 and stats["drafter_failures"] == 0 and not any(stats["errors"].values())


class Uncompiled(FixedDrafter):
    """Cannot say whether it has a compiled form."""

    def compiled(self) -> None:
        raise OSError("the drafter's library is gone")


def test_a_drafter_that_cannot_say_whether_it_is_compiled_runs_stage_by_stage(
    tiny_decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    engine = drafter_engine(tiny_decoder, KINDS["ngram"])
    with_drafter(engine, Uncompiled(lambda row, column: [1, 2]))
    with caplog.at_level(logging.WARNING, "hispec"), spied(Stages, "run_linked") as calls:
        assert run(engine, TEXTS) == run(one_by_one(tiny_decoder), TEXTS)
    (warning,) = caplog.messages
    assert "stage by stage: Uncompiled: OSError: the drafter's library is gone" in warning and not calls
    assert engine.stats()["drafted"] > 0 and engine.stats()["drafter_failures"] == 0
