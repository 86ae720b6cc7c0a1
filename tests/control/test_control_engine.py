"""A controller in an engine: what it is told, and what becomes of it when drafters fail, plans come back, and
steps are interrupted."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ee_models.decoder import Decoder
from hispec.config import EngineConfig, Plan, SchedulingConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.errors import ConfigError
from hispec.sampling_params import SamplingParams
from hispec.trace.writer import read_trace
from tests.helpers.drafters import draft_decoder
from tests.helpers.restless import flat_latency, make_restless
from tests.helpers.support import make_engine, random_prompts, run
from tests.helpers.tiny import tiny_checkpoint

PROMPTS = random_prompts((1, 2, 7, 8, 9, 31, 33, 70))
SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "block_size": 8,
    "num_kv_blocks": 64,
    "max_prefill_tokens": 32,
}
EXITS: dict[str, Any] = {
    "draft": {"layer": 3},
    "check": {"layer": 6},
    "num_draft_tokens": 3,
    "control": "goodput",
}
MODEL: dict[str, Any] = {
    "draft": {"kind": "model", "path": "tiny"},
    "check": {"layer": 6},
    "num_draft_tokens": 3,
    "control": "goodput",
}


def controlled(
    decoder: Decoder,
    values: dict[str, Any],
    draft_model: Decoder | None = None,
    policy: str = "fcfs",
    **config: Any,
) -> Engine:
    return Engine(
        decoder,
        EngineConfig(**{**SIZES, **config}),
        SpeculativeConfig(**values),
        draft_model=draft_model,
        latency=flat_latency([3, 6], has_model=draft_model is not None),
        scheduling=SchedulingConfig(policy=policy, review_rounds=1, first_quantum=2.0, stability_window=2),
    )


@pytest.fixture(scope="module")
def expected(tiny_decoder: Decoder) -> list[list[int]]:
    return run(make_engine(tiny_decoder), PROMPTS)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """With a vocabulary of its own size."""
    return draft_decoder(
        tiny_checkpoint(tmp_path_factory.mktemp("small"), hidden=32, num_layers=2, vocab=300)
    )


def test_a_draft_model_is_no_exit_to_be_watched(tiny_decoder: Decoder, small_model: Decoder) -> None:
    """Though its own passes go through layers of the same numbers; penalties look at rows of the whole
    vocabulary."""
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=16, repetition_penalty=1.2)
    engine = controlled(tiny_decoder, MODEL, small_model)
    control = make_restless(engine, watches=1.0, plain=0.0)
    assert run(engine, PROMPTS, params) == run(make_engine(tiny_decoder), PROMPTS, params)
    assert engine.stats()["drafter_failures"] == 0 and engine.stats()["draft_model_layer_passes"] > 0
    assert any(seen.shadows for seen in control.seen)


def test_it_decides_for_the_rows_that_run(
    tiny_decoder: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks: most of those who might have a row wait."""
    engine = controlled(tiny_decoder, EXITS, max_num_seqs=8, num_kv_blocks=16)
    control = make_restless(engine)
    told: list[int] = []
    choose = control.choose
    monkeypatch.setattr(
        control, "choose", lambda numbers, context: (told.append(len(numbers)), choose(numbers, context))[1]
    )
    monkeypatch.setattr(type(control), "is_due", True)
    assert run(engine, PROMPTS) == expected
    assert told == [seen.num_rows for seen in control.seen] and max(told) < 8


def test_one_failing_drafter_does_not_end_the_others(
    tiny_decoder: Decoder, small_model: Decoder, expected: list[list[int]]
) -> None:
    """Its route is left alone for longer and longer."""
    engine = controlled(
        tiny_decoder,
        MODEL
        | {"goodput": {"drafters": ("ngram", "model"), "interval": 1, "probe_share": 0.5, "window": 16.0}},
        small_model,
    )

    def fail(*_: Any) -> None:
        raise OSError("gone")

    failing = next(
        drafter for drafter in engine._runtime.drafters if type(drafter).__name__ == "ModelDrafter"
    )
    setattr(failing, "propose", fail)  # noqa: B010 - a method of this one object
    for _ in range(3):
        assert run(engine, PROMPTS) == expected
    stats = engine.stats()
    assert 0 < stats["drafter_failures"] == stats["control"]["failures"] < 12 and stats["drafted"] > 0
    setattr(failing, "prefill", fail)  # noqa: B010
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["drafter_failures"] > stats["drafter_failures"]


def test_a_probe_in_which_no_row_may_speculate_is_told_as_one(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would cost nothing, and be due again at once, for ever."""
    engine = controlled(tiny_decoder, EXITS)
    control, seen = engine._recorder.control, []
    observe = control.observe
    monkeypatch.setattr(control, "observe", lambda each: (seen.append(each), observe(each)))
    run(engine, PROMPTS[:4], SamplingParams(temperature=0.0, max_tokens=20, speculative=False))
    assert {(each.choice.route, each.choice.plan) for each in seen} == {(None, Plan())}
    stats, probed = engine.stats()["control"], [each.rounds for each in seen if each.choice.is_probe]
    assert stats["start_rounds"] + stats["probe_rounds"] == sum(probed) > 0


def test_what_was_learnt_is_there_when_a_plan_comes_back(tiny_decoder: Decoder) -> None:
    engine = controlled(tiny_decoder, EXITS)
    settings = [SpeculativeConfig(**EXITS | {"num_draft_tokens": size}) for size in range(1, 9)]
    run(engine, PROMPTS[:3])
    first = engine._recorder.control
    for speculative in settings[:7]:
        engine.set_speculative(speculative, latency=flat_latency([3, 6]))
        run(engine, PROMPTS[:1])
    engine.set_speculative(SpeculativeConfig(**EXITS), latency=flat_latency([3, 6]))
    assert engine._recorder.control is first and first.stats()["rounds"] > 20


# ---- the trace ----


def test_a_trace_names_the_plan_that_was_given(tiny_decoder: Decoder, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = Engine(
        tiny_decoder,
        EngineConfig(**SIZES, trace=str(trace)),
        SpeculativeConfig(draft={"layer": 1}),
        plan=Plan(3, 6, 2, 2),
        name="tiny",
    )
    outputs = run(engine, PROMPTS[:3])
    engine.close()
    read = read_trace(trace)
    assert read.header.model == "tiny" and tuple(read.header.routes) == ("exit D=3 C=6",)
    assert {(rounds.num_drafts, rounds.num_checks) for rounds in read.rounds if rounds.route is not None} == {
        (2, 2)
    }
    assert sum(rounds.tokens for rounds in read.rounds) == engine.stats()["committed"]
    assert [
        request.output_tokens for request in sorted(read.requests, key=lambda request: request.number)
    ] == [len(output) for output in outputs]


def test_a_trace_leaves_out_what_it_is_told_to(tiny_decoder: Decoder, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = Engine(tiny_decoder, EngineConfig(**SIZES, trace=str(trace)))
    engine.set_tracing(False)
    run(engine, PROMPTS[:3])
    engine.set_tracing(True)
    (output,) = run(engine, PROMPTS[:1])
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=4), "unfinished")
    with pytest.raises(ConfigError, match=r"set_tracing\(\) cannot be called while 1 requests are unf"):
        engine.set_tracing(False)
    engine.abort(["unfinished"], notify=False)
    engine.set_tracing(False)
    run(engine, PROMPTS[:2])
    engine.close()
    read = read_trace(trace)
    assert [request.output_tokens for request in read.requests] == [len(output), 0]
    assert sum(rounds.tokens for rounds in read.rounds) == len(output)


def test_an_engine_that_is_refused_leaves_an_earlier_trace(tiny_decoder: Decoder, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = Engine(tiny_decoder, EngineConfig(**SIZES, trace=str(trace)))
    run(engine, PROMPTS[:1])
    engine.close()
    before = trace.read_bytes()
    with pytest.raises(ConfigError, match="not an early exit"):
        Engine(tiny_decoder, EngineConfig(**SIZES, trace=str(trace)), SpeculativeConfig(draft={"layer": 20}))
    assert trace.read_bytes() == before


# ---- interrupts ----


INTERRUPTED = (
    "scheduling/scheduler.py",
    "scheduling/waiting.py",
    "scheduling/kv_blocks.py",
    "host_kv.py",
    "kv_offload.py",
)


@contextmanager
def interrupted(chance: random.Random, share: float) -> Iterator[None]:
    """KeyboardInterrupt before a line of the scheduler or of host memory, now and then."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.endswith(INTERRUPTED):
            return None if event == "call" and "hispec" not in name else trace
        if event == "line" and chance.random() < share:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_interrupted_in_the_scheduler_can_be_gone_on_with(
    tiny_decoder: Decoder, seed: int
) -> None:
    """Steps with KV that moves to host memory and back, stopped anywhere: everybody ends, and nothing
    leaks."""
    engine = controlled(tiny_decoder, EXITS, policy="laps", num_kv_blocks=16)
    make_restless(engine, seed)
    ids = [engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=12)) for prompt in PROMPTS]
    chance, ended, num_interrupts = random.Random(seed), set(), 0
    for step in range(3000):
        if not engine.has_unfinished():
            break
        try:
            if step < 60:
                with interrupted(chance, 0.004):
                    deltas = engine.step()
            else:
                deltas = engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            continue
        ended |= {delta.request_id for delta in deltas if delta.finish_reason is not None}
    assert not engine.has_unfinished(), "a request is lost"
    assert ended == set(ids) and num_interrupts > 0
    assert engine.stats()["kv_blocks_used"] == 0, "blocks leaked"
