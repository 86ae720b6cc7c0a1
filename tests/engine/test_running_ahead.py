"""Rounds that are launched before the host has read the one before, while requests come and go: rows of ended
requests stay, dead, and others take them."""

from __future__ import annotations

from typing import Any

import pytest

from ee_models.decoder import Decoder
from hispec.config import EngineConfig, Plan, SchedulingConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.engine.step_loop import StepLoop
from hispec.errors import build
from hispec.runner.launchers import Flight, StaticLauncher
from hispec.sampling_params import SamplingParams
from tests.helpers.drafters import ALL, drafter_engine
from tests.helpers.support import make_engine, random_prompts, run

PROMPTS = random_prompts([1 + 5 * number % 23 for number in range(20)])
GREEDY = [
    SamplingParams(temperature=0.0, max_tokens=3 + 7 * number % 19, ignore_eos=True)
    for number in range(len(PROMPTS))
]
SAMPLED = [
    SamplingParams(
        temperature=0.8 if number % 3 else 0.0,
        seed=number,
        max_tokens=3 + 7 * number % 19,
        top_k=20 if number % 4 == 1 else 0,
        min_tokens=2 if number % 5 == 2 else 0,
        stop_token_ids=[17, 40] if number % 5 == 2 else [],
        logit_bias={5: 2.0} if number % 7 == 3 else {},
    )
    for number in range(len(PROMPTS))
]
NAMES = ("plain", "exit gated", "ngram checks", "hybrid checks")


class Launches:
    """What was launched and what was read of it, of static rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched, self.read = 0, 0
        self.num_rows: list[int] = []
        run_, read = StaticLauncher._run, StepLoop.read

        def spied_run(launcher: StaticLauncher, runtime: Any, plan: Any, rows: Any) -> Flight:
            self.launched += bool(rows.requests)
            self.num_rows.append(rows.inputs.shape[1])
            return run_(launcher, runtime, plan, rows)

        def spied_read(loop: StepLoop, flight: Flight) -> None:
            self.read += 1
            read(loop, flight)

        monkeypatch.setattr(StaticLauncher, "_run", spied_run)
        monkeypatch.setattr(StepLoop, "read", spied_read)

    @property
    def dropped(self) -> int:
        return self.launched - self.read


def engine_of(decoder: Decoder, name: str, is_static: bool = True, **config: Any) -> Engine:
    if name == "plain":
        return make_engine(decoder, is_static=is_static, **config)
    return drafter_engine(decoder, ALL[name], is_static=is_static, **config)


@pytest.fixture(scope="module")
def sampled(tiny_decoder: Decoder) -> list[list[int]]:
    return run(make_engine(tiny_decoder), PROMPTS, SAMPLED)


@pytest.mark.parametrize("name", NAMES)
def test_with_a_full_queue_hardly_a_round_waits_for_the_host(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wanted = run(make_engine(tiny_decoder), PROMPTS, GREEDY)
    launches = Launches(monkeypatch)
    engine = engine_of(tiny_decoder, name, max_num_seqs=4)
    assert run(engine, PROMPTS, GREEDY) == wanted
    stats = engine.stats()
    # The first, and as the batch empties at the end; the 20 requests end at about as many different rounds.
    assert stats["steps"] >= 20 and stats["steps"] - stats["rounds_ahead"] <= 4
    assert launches.dropped <= 1


@pytest.mark.parametrize("name", NAMES)
def test_requests_that_join_are_sampled_as_ever(
    tiny_decoder: Decoder, sampled: list[list[int]], name: str
) -> None:
    engine = engine_of(tiny_decoder, name, max_num_seqs=3)
    for _ in range(2):  # the second time from the prefix cache
        assert run(engine, PROMPTS, SAMPLED) == sampled
    assert engine.stats()["rounds_ahead"] * 4 > engine.stats()["steps"] * 3


def test_rejection_is_the_same_however_requests_join(tiny_decoder: Decoder) -> None:
    values = {**ALL["ngram checks"], "acceptance": "rejection"}
    together = drafter_engine(tiny_decoder, values, is_static=True, max_num_seqs=len(PROMPTS))
    few = drafter_engine(tiny_decoder, values, is_static=True, max_num_seqs=3)
    assert run(few, PROMPTS, SAMPLED) == run(together, PROMPTS, SAMPLED)


def test_dead_rows_stay_until_half_of_the_rows_would_do(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    engine = make_engine(tiny_decoder, is_static=True)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4 + 3 * number, ignore_eos=True) for number in range(8)
    ]
    wanted = run(make_engine(tiny_decoder), PROMPTS[12:], params)
    assert run(engine, PROMPTS[12:], params) == wanted
    assert sorted(set(launches.num_rows), reverse=True) == [8, 4, 2, 1]
    stats = engine.stats()
    assert stats["steps"] - stats["rounds_ahead"] <= 6


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_ends_is_reported_with_its_last_tokens(tiny_decoder: Decoder, name: str) -> None:
    engine = engine_of(tiny_decoder, name, max_num_seqs=4)
    for prompt, params in zip(PROMPTS, GREEDY, strict=True):
        engine.add_request(prompt, params)
    num_ended = 0
    while engine.has_unfinished():
        for delta in engine.step():
            num_ended += delta.finish_reason is not None
            assert delta.token_ids, "no Delta comes later than its tokens"
        engine.check()
        flight = engine._loop.flight
        assert len(engine._loop.requests) == len(PROMPTS) - num_ended
        assert flight is None or len(flight.rows.requests) <= 4
    assert num_ended == len(PROMPTS)


@pytest.mark.parametrize("name", ["plain", "ngram checks"])
def test_what_cannot_join_waits_for_the_host(tiny_decoder: Decoder, name: str) -> None:
    """Penalties count tokens that the host has not read; logprobs take another kind of round."""
    params = [
        SamplingParams(
            temperature=0.7,
            seed=number,
            max_tokens=5 + number,
            repetition_penalty=1.3 if number % 4 == 1 else 1.0,
            logprobs=1 if number % 4 == 3 else None,
            speculative=number % 5 != 0,
        )
        for number in range(12)
    ]
    wanted = run(make_engine(tiny_decoder), PROMPTS[:12], params)
    assert run(engine_of(tiny_decoder, name, max_num_seqs=3), PROMPTS[:12], params) == wanted


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "mlfq", "laps"])
@pytest.mark.parametrize("name", ["plain", "ngram checks"])
def test_few_blocks_small_chunks_aborts_and_every_policy(
    tiny_decoder: Decoder, sampled: list[list[int]], name: str, policy: str
) -> None:
    sizes = EngineConfig(
        max_num_seqs=4, max_model_len=112, block_size=8, num_kv_blocks=14, max_prefill_tokens=5
    )
    speculative = None if name == "plain" else build(SpeculativeConfig, ALL[name])
    scheduling = SchedulingConfig(policy=policy)
    engine = Engine(tiny_decoder, sizes, speculative, scheduling=scheduling, is_static=True)
    ids = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS[:16], SAMPLED, strict=False)]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    steps, aborted = 0, set()
    while engine.has_unfinished():
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
        engine.check()
        steps += 1
        if steps % 4 == 0 and engine._loop.requests:
            victim = sorted(engine._loop.requests)[0 if steps % 8 else -1]
            if len(aborted) < 4:
                aborted.add(victim)
                engine.abort([victim], notify=False)
                engine.check()
        if steps in (6, 9):
            late = engine.add_request(PROMPTS[16 + steps // 9], SAMPLED[16 + steps // 9])
            outputs[late] = []
            ids.append(late)
    for request_id, wanted in zip(ids, sampled[:18], strict=True):
        assert request_id in aborted or outputs[request_id] == wanted
    assert engine.stats()["kv_blocks_used"] == 0 and engine.stats()["rounds_ahead"] > 0


@pytest.mark.parametrize("name", NAMES[1:])
def test_nobody_drafts_once_the_last_that_may_has_ended(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, speculative=length == 4)
        for length in (4, 30, 30, 30)
    ]
    wanted, drafts, run_ = run(make_engine(tiny_decoder), PROMPTS[:4], params), [], StaticLauncher._run

    def spied(launcher: StaticLauncher, runtime: Any, plan: Plan, rows: Any) -> Flight:
        drafts.append(not plan.is_plain)
        return run_(launcher, runtime, plan, rows)

    monkeypatch.setattr(StaticLauncher, "_run", spied)
    engine = engine_of(tiny_decoder, name, max_num_seqs=4)
    assert run(engine, PROMPTS[:4], params) == wanted
    # Its own rounds, and one that was launched before its end was known.
    assert drafts[0] and 1 <= sum(drafts) <= 5 and len(drafts) >= 29 and not any(drafts[5:])
    assert engine.stats()["rounds_ahead"] >= 25, "plain rounds are launched ahead as well"


def test_a_drafter_that_is_only_followed_is_followed(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One from outside may know no `join`: then the host reads before somebody takes a row."""
    from hispec.decoding.drafter import Drafter
    from hispec.drafters.ngram import NgramDrafter

    monkeypatch.setattr(NgramDrafter, "join", Drafter.join)
    wanted = run(make_engine(tiny_decoder), PROMPTS, GREEDY)
    engine = engine_of(tiny_decoder, "ngram checks", max_num_seqs=4)
    assert run(engine, PROMPTS, GREEDY) == wanted
    stats = engine.stats()
    assert 0 < stats["rounds_ahead"] < stats["steps"] - 8
