"""Interrupts at every line between a round and the Deltas that a caller gets: no block is lost, and each
token comes once."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec import LLM
from hispec.config import Plan, SpeculativeConfig
from hispec.engine import Engine
from hispec.errors import RequestError
from hispec.outputs import Delta, RequestOutput
from hispec.sampling_params import SamplingParams
from hispec.scheduling.request import Request
from tests.helpers.adapters import TINY_MLP, loaded, make_exits
from tests.helpers.interrupts import Interrupts
from tests.helpers.scripted import ScriptedDecoder, one_hot_script, true_next
from tests.helpers.support import make_engine, random_prompts, run

FILES = (
    "hispec/engine/engine.py",
    "hispec/engine/step_loop.py",
    "hispec/scheduling/request.py",
    "hispec/scheduling/scheduler.py",
    "hispec/scheduling/kv_blocks.py",
    "cache/blocks.py",
)
STEM = [7, 3, 9, 1, 4, 4, 2, 8]
PROMPTS = [[*STEM, 5], [*STEM, 6, 2], [1, 2], [*STEM, 5, 5, 5]]


class Letters:
    """A text hook: each token is one letter."""

    def __init__(self, at_end: bool = False) -> None:
        self.at_end = at_end
        self._text, self._released = "", 0

    def append(self, token_id: int, may_stop: bool) -> str | None:
        assert not self.at_end
        self._text += chr(65 + token_id)
        return None

    def whole(self, token_ids: Sequence[int]) -> str:
        assert self.at_end
        return "".join(chr(65 + token) for token in token_ids)

    def release(self, final: bool) -> str:
        new = self._text[self._released :]
        self._released += len(new)
        return new


def small_engine(is_static: bool) -> Engine:
    """So few blocks that requests are preempted, and cached blocks evicted."""

    def next_token(exit_layer: int, position: int, token: int) -> int:
        wrong = exit_layer < 9 and position % 3 == 0
        return (true_next(position, token) + wrong) % 50

    return make_engine(
        ScriptedDecoder(one_hot_script(next_token)),
        Plan(2, 5, 2, 2),
        max_num_seqs=3,
        max_model_len=40,
        block_size=2,
        num_kv_blocks=16,
        max_prefill_tokens=7,
        is_static=is_static,
    )


def params_of(number: int) -> SamplingParams:
    tokens = list(PROMPTS[number])
    while len(tokens) < len(PROMPTS[number]) + 7:
        tokens.append(true_next(len(tokens) - 1, tokens[-1]))
    stop = tokens[-1:] if number == 1 else []
    return SamplingParams(
        temperature=0.0,
        max_tokens=11,
        logprobs=1 if number == 2 else None,
        stop_token_ids=stop,
        tiers=number != 1,
    )


def add(engine: Engine, name: str, number: int) -> None:
    is_stream = number % 4 != 1  # nobody reads that one before its end
    text = Letters(at_end=not is_stream)
    engine.add_request(PROMPTS[number % 4], params_of(number % 4), name, text=text, is_stream=is_stream)


def collect(deltas: list[Delta], into: dict[str, list[Delta]]) -> None:
    for delta in deltas:
        into.setdefault(delta.request_id, []).append(delta)


def joined(deltas: list[Delta]) -> tuple[list[int], str, int, Any, Any, int]:
    """Tokens, text, number of logprobs, how it ended, which the last Delta alone says, and number of
    tiers."""
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    last = deltas[-1]
    assert last.metrics is not None
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert last.metrics.num_output_tokens == len(tokens)
    logprobs = [entry.token_id for delta in deltas for entry in delta.logprobs or []]
    tiers = [tier for delta in deltas for tier in delta.tiers or []]
    assert logprobs in ([], tokens) and len(tiers) in (0, len(tokens))
    return (
        tokens,
        "".join(delta.text for delta in deltas),
        len(logprobs),
        last.finish_reason,
        last.stop_reason,
        len(tiers),
    )


def undisturbed(is_static: bool) -> dict[int, Any]:
    engine, got = small_engine(is_static), {}
    for number in range(4):
        add(engine, str(number), number)
    while engine.has_unfinished():
        collect(engine.step(), got)
    assert engine.stats()["preemptions"] > 0
    assert len(got["1"]) == 1 < len(got["0"])
    return {number: joined(got[str(number)]) for number in range(4)}


def test_an_interrupted_change_of_the_plan_is_completed_by_what_comes_next(
    tiny_path: Path, tmp_path: Path
) -> None:
    """From plain decoding to a plan whose exits have KV of their own, and back: neither blocks of the KV
    before nor the controller before may serve the plan."""
    checkpoint = open_checkpoint(tiny_path)
    decoder = Decoder.load(checkpoint, torch.float32, torch.device("cpu"))
    infos = [ExitInfo(layer=3, num_blocks=2, intermediate_size=TINY_MLP), ExitInfo(layer=6)]
    exits = loaded(make_exits(tmp_path, checkpoint, infos, from_trunk=True), decoder, checkpoint)
    prompts, few = random_prompts((20,)), SamplingParams(temperature=0.0, max_tokens=3)
    wanted = run(make_engine(decoder), prompts, few)
    speculative = SpeculativeConfig(draft={"layer": 3})
    plans = itertools.cycle([(Plan(3, 6, 2, 2), exits), (None, []), (Plan(3, None, 3, 1), exits[:1])])
    engine, interrupts = (
        make_engine(decoder),
        Interrupts("hispec/engine/engine.py", "hispec/runner/plan_cache.py"),
    )
    assert run(engine, prompts, few) == wanted
    count = -1
    while count < len(interrupts.lines):
        count = len(interrupts.lines)
        for plan, its_exits in (next(plans) for _ in range(3)):
            with suppress(KeyboardInterrupt), interrupts.armed():
                engine.set_speculative(speculative if plan else None, exits=its_exits, plan=plan)
            assert run(engine, prompts, few) == wanted
    source, first = inspect.getsourcelines(Engine._use)
    within = range(first, first + len(source))
    assert sum(file.endswith("engine.py") and line in within for file, line in interrupts.lines) >= 10


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("is_static", [False, True], ids=["packed", "static"])
def test_an_interrupt_at_any_line_of_a_step_loses_no_block_and_no_token(is_static: bool, at: int) -> None:
    wanted = undisturbed(is_static)
    assert wanted[2][2] == wanted[2][5] == 11 and wanted[1][3] == "stop"
    engine, interrupts = small_engine(is_static), Interrupts(*FILES, at=at)
    got: dict[str, list[Delta]] = {}
    for history in range(3):
        for number in range(4):
            add(engine, f"{history}/{number}", number)
        while engine.has_unfinished():
            deltas: list[Delta] = []
            try:
                with interrupts.armed():
                    deltas = engine.step()
            except KeyboardInterrupt:
                pass
            collect(deltas, got)
            engine.check()
    for name, deltas in got.items():
        assert joined(deltas) == wanted[int(name[-1])], name
    assert len(got) == 12 and engine.stats()["kv_blocks_used"] == 0
    functions = {Engine.step, Request.append, Request.has_ended, type(engine._pool).publish}
    for function in functions:  # the lines that matter were among them
        code = function.__code__
        lines = {(code.co_filename, line) for *_, line in code.co_lines() if line is not None}
        assert len(lines & interrupts.lines) >= 3, function


def test_an_interrupt_while_another_is_repaired_loses_nothing_either() -> None:
    wanted, engine, got = undisturbed(False), small_engine(False), {}
    first, second = Interrupts(*FILES, at=2), Interrupts(*FILES)
    repair = engine._scheduler.repair

    def interrupted_repair(live: Iterable[Request]) -> None:
        with second.armed():
            repair(live)

    engine._scheduler.repair = interrupted_repair  # type: ignore[method-assign]
    for history in range(3):
        for number in range(4):
            add(engine, f"{history}/{number}", number)
        while engine.has_unfinished():
            deltas: list[Delta] = []
            with suppress(KeyboardInterrupt), first.armed():
                deltas = engine.step()
            collect(deltas, got)
    engine.check()
    assert len(got) == 12 and len(second.lines) > 30
    for name, deltas in got.items():
        assert joined(deltas) == wanted[int(name[-1])], name


def test_an_interrupted_add_or_abort_has_been_done_or_can_be_done_again() -> None:
    engine, interrupts, number = small_engine(False), Interrupts(*FILES), 0
    ended: dict[str, list[Delta]] = {}
    count = -1
    while count < len(interrupts.lines):
        count, number, name = len(interrupts.lines), number + 1, f"request {number}"
        try:
            with interrupts.armed():
                add(engine, name, number)
        except KeyboardInterrupt:
            engine.check()
            with suppress(RequestError):  # it is there
                add(engine, name, number)
        collect(engine.step(), ended)
        try:
            with interrupts.armed():
                engine.abort([name])
        except KeyboardInterrupt:
            engine.check()
            engine.abort([name])
        collect(engine.step(), ended)
        engine.check()
        assert joined(ended[name])[3] == "abort" and not engine.has_unfinished()
    assert count > 40


def test_what_drain_has_not_yielded_comes_with_the_next_step() -> None:
    wanted, engine, got = undisturbed(False), small_engine(False), {}
    for number in range(4):
        add(engine, str(number), number)
    for turn in range(1000):
        if not engine.has_unfinished():
            break
        for delta in engine.drain():
            collect([delta], got)
            if turn % 3:
                break
        collect(engine.step() if turn % 2 else [], got)
        engine.check()
    assert {number: joined(got[str(number)]) for number in range(4)} == wanted


def test_an_interrupt_of_a_drain_between_two_deltas_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, engine, got = undisturbed(False), small_engine(False), {}
    has_unfinished, calls = engine.has_unfinished, itertools.count()

    def interrupted() -> bool:
        if next(calls) % 3 == 2:
            raise KeyboardInterrupt
        return has_unfinished()

    monkeypatch.setattr(engine, "has_unfinished", interrupted)
    for number in range(4):
        add(engine, str(number), number)
    while has_unfinished():
        with suppress(KeyboardInterrupt):
            for delta in engine.drain():
                collect([delta], got)
    assert {number: joined(got[str(number)]) for number in range(4)} == wanted


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_at_any_line_of_an_llms_step_loses_nothing(tiny_path: Path, at: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=0, n=2)
    with LLM(str(tiny_path), max_model_len=64, num_kv_blocks=32) as llm:
        wanted = llm.generate(["one", "two", "three"], params, use_tqdm=False)
        interrupts = Interrupts("hispec/llm.py", "hispec/outputs.py", at=at)
        done: dict[str, RequestOutput] = {}
        for name, prompt in (("0", "one"), ("1", "two"), ("2", "three")):
            llm.add(prompt, params, name)
        while llm.has_unfinished():
            try:
                with interrupts.armed():
                    outputs = llm.step()
            except KeyboardInterrupt:
                continue
            for output in outputs:
                assert output.request_id not in done
                done[output.request_id] = output
        assert len(interrupts.lines) > 12 and sorted(done) == ["0", "1", "2"]
        for name, output in done.items():
            for got, expected in zip(output.outputs, wanted[int(name)].outputs, strict=True):
                assert (got.text, got.token_ids, got.logprobs) == (
                    expected.text,
                    expected.token_ids,
                    expected.logprobs,
                )


def test_an_interrupt_as_an_llms_step_gathers_outputs_loses_none(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(dict[str, RequestOutput]):
        def values(self) -> Any:
            raise KeyboardInterrupt

    with LLM(str(tiny_path), max_model_len=64, num_kv_blocks=32) as llm:
        llm.add("one", SamplingParams(temperature=0.0, max_tokens=2), "0")
        while not llm._finished:
            llm._advance()
        monkeypatch.setattr(llm, "_advance", lambda: None)
        finished = llm._finished
        llm._finished = Interrupted(finished)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
        assert llm.has_unfinished() and dict(llm._finished) == finished
        llm._finished = finished

        def stored_and_interrupted(owner: LLM, name: str, value: Any) -> None:
            object.__setattr__(owner, name, value)
            if value == {}:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(LLM, "__setattr__", stored_and_interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.step()
        assert [output.request_id for output in llm.step()] == ["0"] and not llm.has_unfinished()


@pytest.mark.parametrize("n", [1, 2])
def test_an_interrupted_add_abort_or_stream_of_an_llm_leaves_nothing_in_its_engine(
    tiny_path: Path, n: int
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, n=n)
    one = params.model_copy(update={"n": 1})
    with LLM(str(tiny_path), max_model_len=64, num_kv_blocks=32) as llm:

        def ids() -> set[str]:
            return {*llm.engine._loop.requests, *llm.engine._loop.gained}

        def add_and_abort() -> None:
            llm.add("one", params, "a")
            llm.abort("a")

        calls: list[Callable[[], Any]] = [add_and_abort, lambda: list(llm.stream("one", one))]
        for call in calls:
            interrupts, count = Interrupts("hispec/llm.py"), -1
            while count < len(interrupts.lines):
                count = len(interrupts.lines)
                with suppress(KeyboardInterrupt), interrupts.armed():
                    call()
                known = {name for pending in llm._pending.values() for name in pending.sequences}
                assert ids() <= known
                llm.abort(list(llm._pending))
                assert not ids() and not llm.has_unfinished()
            assert count > 15
