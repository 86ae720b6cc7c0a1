"""What rounds that are launched ahead of the host are timed as, and who learns from it."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from ee_models.decoder import Decoder
from hispec.config import EngineConfig, SchedulingConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.engine.recorder import Recorder
from hispec.engine.step_loop import StepLoop
from hispec.errors import build
from hispec.runner.launchers import Flight
from hispec.runner.round_output import RowOutcome
from hispec.sampling_params import SamplingParams
from hispec.scheduling.policy import Service
from tests.helpers.drafters import ALL
from tests.helpers.support import random_prompts

PROMPTS = random_prompts([1, 6, 11])


class Timed:
    """An engine of static rounds under `sjf` with aging, by a clock that tells a millisecond more whenever it
    is asked; and the seconds of the last step, as the recorder and the policy are told."""

    def __init__(self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.of_rounds: list[float] = []
        self.of_policy: list[float] = []
        record, make = Recorder.record_round, RowOutcome.make_service

        def clock() -> float:
            self.now_s += 1e-3
            return self.now_s

        def spied_record(recorder: Recorder, flight: Flight, *others: Any) -> None:
            self.of_rounds.append(others[-1])
            record(recorder, flight, *others)

        def spied_make(outcome: RowOutcome, passes: float, seconds: float) -> Service:
            self.of_policy.append(seconds)
            return make(outcome, passes, seconds)

        monkeypatch.setattr(time, "perf_counter", clock)
        monkeypatch.setattr(Recorder, "record_round", spied_record)
        monkeypatch.setattr(RowOutcome, "make_service", spied_make)
        # Not one that preempts: it has the round in flight read before anybody joins.
        shortest = SchedulingConfig(policy="sjf", max_slowdown=20.0)
        sizes = EngineConfig(max_num_seqs=4, max_model_len=112)
        plan = build(SpeculativeConfig, ALL["ngram checks"])
        self.engine = Engine(decoder, sizes, plan, scheduling=shortest, is_static=True)

    def add(self, prompt: list[int], **params: Any) -> None:
        given = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, **params)
        self.engine.add_request(prompt, given)

    def step(self) -> None:
        self.of_rounds.clear()
        self.of_policy.clear()
        self.engine.step()
        assert self.of_rounds and self.of_policy
        assert all(seconds < 1.0 or math.isnan(seconds) for seconds in self.of_policy)


def test_what_was_not_timed_is_learnt_from_by_nobody(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that was done while the caller paused, and one that was captured."""
    timed = Timed(tiny_decoder, monkeypatch)
    for prompt in PROMPTS[:2]:
        timed.add(prompt)
    for what in ("", "", "pause", "", "capture", "", ""):
        flight = timed.engine._loop.flight
        timed.now_s += 100.0 * (what == "pause")
        if what == "capture":
            assert flight is not None
            flight.is_timed = False
        timed.step()
        assert flight is not None or what == ""
        assert all(math.isnan(each) == bool(what) for each in [*timed.of_rounds, *timed.of_policy]), what


def test_a_caller_that_pauses_while_the_device_is_at_work_changes_no_time(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(tiny_decoder, monkeypatch)
    timed.add(PROMPTS[0])
    timed.step()
    flight = timed.engine._loop.flight
    assert flight is not None
    outcomes = flight.outcomes

    def slow() -> Any:
        timed.now_s += 0.05
        return outcomes()

    flight.outcomes = slow
    timed.now_s += 0.5
    timed.step()
    assert all(0.55 <= seconds < 0.7 for seconds in [*timed.of_rounds, *timed.of_policy])


@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["joins", "waits for the host"])
def test_the_time_of_prompts_is_learnt_by_policies_alone(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, penalty: float
) -> None:
    """Where prefill is only queued, the next round waits for it, though it is launched a step later."""
    timed = Timed(tiny_decoder, monkeypatch)
    monkeypatch.setattr(StepLoop, "_queues_prompts", True)
    timed.add(PROMPTS[1])
    seen: list[bool] = []
    for number in range(9):
        if number == 3:
            timed.add(PROMPTS[2], repetition_penalty=penalty)
        timed.step()
        seen += map(math.isnan, timed.of_rounds)
        assert all(map(math.isfinite, timed.of_policy))
    assert seen[0] and not any(seen[1:4]) and sum(seen[4:]) == 1
