"""After close() whatever would compute says so, in one way."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ee_models.decoder import Decoder
from hispec import LLM, ClosedError, HiSpecError, SamplingParams
from hispec.engine import Engine
from tests.helpers.forked import said_in_a_fork
from tests.helpers.support import GREEDY, make_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OF_ENGINE: dict[str, Callable[[Engine], Any]] = {
    "add_request": lambda engine: engine.add_request([1], GREEDY),
    "step": lambda engine: engine.step(),
    "abort": lambda engine: engine.abort([]),
    "drain": lambda engine: list(engine.drain()),
    "set_speculative": lambda engine: engine.set_speculative(None),
    "warm_up": lambda engine: engine.warm_up(),
    "__enter__": lambda engine: engine.__enter__(),
}
OF_LLM: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate(["a", "b"], use_tqdm=False),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "a"}], use_tqdm=False),
    "stream": lambda llm: llm.stream("a"),
    "add": lambda llm: llm.add("a", None, "a"),
    "step": lambda llm: llm.step(),
    "abort": lambda llm: llm.abort([]),
    "set_speculative": lambda llm: llm.set_speculative({"draft": {"layer": 3}}),
    "__enter__": lambda llm: llm.__enter__(),
}


def check_all(what: Any, methods: dict[str, Callable[[Any], Any]]) -> None:
    name = type(what).__name__
    for method, call in methods.items():
        said = f"{name}.{method}(): this {name} was closed and its KV memory released; make a new {name}"
        with pytest.raises(ClosedError) as caught:
            call(what)
        assert str(caught.value) == said and isinstance(caught.value, HiSpecError)
    what.reset_stats()
    assert what.stats()["tokens"] == 0 and what.memory()["kv_bytes"] == 0 and not what.has_unfinished()


def test_a_closed_engine_says_so_everywhere(tiny_decoder: Decoder) -> None:
    with make_engine(tiny_decoder) as engine:
        engine.add_request([1, 2], GREEDY)
        engine.step()
    check_all(engine, OF_ENGINE)
    engine.close()
    check_all(engine, OF_ENGINE)


def test_a_drain_that_is_cut_by_close_says_so_unless_all_has_come(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder)
    engine.add_request([1, 2], GREEDY)
    drained = engine.drain()
    next(drained)
    engine.close()
    with pytest.raises(ClosedError, match=r"Engine.drain\(\)"):
        next(drained)
    engine = make_engine(tiny_decoder)
    engine.add_request([1, 2], GREEDY)
    for delta in engine.drain():
        if delta.finish_reason is not None:
            engine.close()


def test_a_closed_llm_says_so_everywhere_its_streams_included(tiny_path: Path) -> None:
    with LLM(str(tiny_path), max_model_len=64, num_kv_blocks=16, max_run_ms=0.0) as llm:
        ended = llm.stream("abc", PARAMS)
        for delta in ended:
            if delta.finish_reason is not None:
                break
        not_begun, begun, beside = (llm.stream("abc", PARAMS) for _ in range(3))
        next(begun)
        next(beside)  # and Deltas of `begun` wait
        llm.add("abc", PARAMS, "job")
    check_all(llm, OF_LLM)
    assert list(ended) == []
    for stream in (not_begun, begun):
        with pytest.raises(ClosedError, match=r"LLM.stream\(\): this LLM was closed"):
            next(stream)
    beside.close()  # type: ignore[attr-defined]
    llm.close()
    check_all(llm, OF_LLM)


def test_an_llm_whose_engine_was_closed_is_closed(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), max_model_len=64, num_kv_blocks=16)
    llm.add("abc", PARAMS, "job")
    llm.engine.close()
    with pytest.raises(ClosedError):
        llm.step()
    llm.close()
    check_all(llm, OF_LLM)


def test_a_fork_says_so_and_does_not_wait_for_threads(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder)
    engine.add_request([1, 2], GREEDY)
    for method, call in OF_ENGINE.items():
        said = said_in_a_fork(partial(call, engine))
        begin = (
            f"ProcessError: Engine.{method}(): this Engine was made in process {os.getpid()}, whose threads"
        )
        assert said.startswith(begin) and said.endswith(
            "make a new Engine here, or have processes started by spawn"
        )
    assert engine.step(), "the process that made it goes on"


def test_an_llm_in_a_fork_says_so_and_leaves_the_trace_alone(tiny_path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with LLM(str(tiny_path), max_model_len=64, num_kv_blocks=16, max_run_ms=0.0, trace=str(trace)) as llm:
        llm.add("abc", PARAMS, "a")
        llm.step()
        said = said_in_a_fork(partial(llm.generate, "abc", use_tqdm=False))
        assert said.startswith("ProcessError: LLM.generate(): this LLM was made in process")
        assert said_in_a_fork(llm.close) == ""
        while llm.has_unfinished():
            llm.step()
    lines = trace.read_text().splitlines()
    assert len(set(lines)) == len(lines) and "abort" not in trace.read_text()
