"""Clocks that go back, or far ahead, while an engine runs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ee_models.decoder import Decoder
from hispec.config import EngineConfig, Plan, SchedulingConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.trace.writer import TraceWriter, read_trace
from tests.helpers.restless import flat_latency
from tests.helpers.support import GREEDY, make_engine, random_prompts, run

PROMPTS = random_prompts((3, 9, 30, 5, 14, 8), seed=8)
DAY = 86400.0


def backwards() -> Callable[[], float]:
    times = iter(range(10**9, 0, -1))
    return lambda: float(next(times))


def jumping(seed: int) -> Callable[[], float]:
    """Ahead or back by up to a year, every third time."""
    generator, now = random.Random(seed), 1e6

    def clock() -> float:
        nonlocal now
        now += generator.uniform(-365, 365) * DAY if generator.random() < 0.3 else 1e-3
        return now

    return clock


CLOCKS: dict[str, Callable[[], Callable[[], float]]] = {
    "back": backwards,
    "stopped": lambda: lambda: 5.0,
    "at nought": lambda: lambda: 0.0,
    "jumps": lambda: jumping(1),
    "other jumps": lambda: jumping(2),
}


def set_clocks(patch: pytest.MonkeyPatch, clock: str) -> None:
    for name in ("monotonic", "perf_counter", "time"):
        patch.setattr(time, name, CLOCKS[clock]())
    patch.setitem(TraceWriter.__init__.__kwdefaults__, "clock", CLOCKS[clock]())


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "mlfq", "laps"])
@pytest.mark.parametrize("clock", CLOCKS)
def test_every_request_is_served_and_no_time_is_negative(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, clock: str, policy: str
) -> None:
    wanted = run(make_engine(tiny_decoder), PROMPTS)
    set_clocks(monkeypatch, clock)
    order = SchedulingConfig(policy=policy, first_quantum=1.0, review_rounds=1, max_slowdown=1.5)
    small = EngineConfig(max_num_seqs=2, num_kv_blocks=14, block_size=8, max_model_len=100)
    assert_served(Engine(tiny_decoder, small, plan=Plan(3, 6, 2, 2), scheduling=order), wanted)


def assert_served(engine: Engine, wanted: list[list[int]]) -> None:
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    got: dict[str, list[int]] = {request_id: [] for request_id in ids}
    for _ in range(1000):
        for delta in engine.step() if engine.has_unfinished() else ():
            assert delta.error is None
            got[delta.request_id] += delta.token_ids
            if (metrics := delta.metrics) is not None:
                assert metrics.first_token_s is not None and metrics.finished_s is not None
                assert metrics.arrival_s <= metrics.first_token_s <= metrics.finished_s
        engine.check()
    assert [got[request_id] for request_id in ids] == wanted
    stats = engine.stats()
    assert stats["prefill_s"] >= 0.0 and stats["round_s"] >= 0.0


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_controller_and_a_trace_get_no_negative_times(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: str
) -> None:
    wanted = run(make_engine(tiny_decoder), PROMPTS)
    with monkeypatch.context() as patch:
        set_clocks(patch, clock)
        engine = Engine(
            tiny_decoder,
            EngineConfig(max_num_seqs=3, num_kv_blocks=40, block_size=8, trace=str(tmp_path / "trace.jsonl")),
            SpeculativeConfig(draft={"layer": 3}, check={"layer": 6}, num_draft_tokens=3, control="goodput"),
            latency=flat_latency([3, 6]),
            scheduling=SchedulingConfig(policy="laps", review_rounds=1, first_quantum=2.0),
        )
        assert_served(engine, wanted)
        assert engine.stats()["control"]["overhead_s"] >= 0.0
        engine.close()
    trace = read_trace(tmp_path / "trace.jsonl")
    assert len(trace.requests) == len(PROMPTS) and trace.rounds
