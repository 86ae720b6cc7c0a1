"""AsyncEngine: tasks share an LLM; who leaves is forgotten, and nobody waits for ever."""

from __future__ import annotations

import _thread
import asyncio
import gc
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ee_models.errors import CheckpointError
from hispec import LLM, ConfigError, RequestError, SamplingParams
from hispec import prompts as prompts_module
from hispec.engine import Engine
from hispec.errors import BusyError, ClosedError, EngineDeadError
from hispec.serving import async_engine as module
from hispec.serving.async_engine import AsyncEngine
from tests.helpers.sweeps import sweep

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}
PROMPTS = [f"prompt {number} " * (1 + number % 3) for number in range(10)]
PLAN = {"draft": {"layer": 3}, "check": {"layer": 6}, "num_draft_tokens": 2}


def with_engine(
    path: Path, test: Callable[[AsyncEngine, LLM], Coroutine[Any, Any, None]], **settings: Any
) -> None:
    """Runs a test within a minute; then nothing may be left of any request."""
    most = settings.pop("max_requests", None)

    async def run() -> None:
        llm = LLM(str(path), **{**SMALL, **settings})
        async with AsyncEngine(llm, max_requests=most) as engine:
            await asyncio.wait_for(test(engine, llm), 60.0)
            if not engine.is_dead and isinstance(llm.engine, Engine):
                await asyncio.wrap_future(engine._call(lambda: None))
                await until(lambda: engine.num_unfinished == 0)
                await asyncio.wrap_future(engine._call(llm.engine.check))
                assert not llm.has_unfinished()

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def wanted(path: Path, params: SamplingParams = GREEDY) -> list[Any]:
    with LLM(str(path), **SMALL) as llm:
        return [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def same(found: Any, expected: Any) -> bool:
    return [(each.text, each.token_ids, each.finish_reason, each.logprobs) for each in found] == [
        (each.text, each.token_ids, each.finish_reason, each.logprobs) for each in expected
    ]


@sweep(
    "settings",
    [{}, {"speculative": PLAN}, {"workers": 2}, {"max_requests": 2}],
    lambda settings: "workers" not in settings,
)
def test_outputs_are_those_of_generate(tiny_path: Path, settings: dict[str, Any]) -> None:
    params = GREEDY.model_copy(update={"n": 2, "temperature": 0.8, "seed": 3, "logprobs": 2})
    expected = wanted(tiny_path, params)

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))
        for output, one in zip(outputs, expected, strict=True):
            assert output.error is None and same(output.outputs, one)
        assert engine.num_unfinished == 0

    with_engine(tiny_path, test, **settings)


@sweep("settings", [{"speculative": PLAN}, {"workers": 2}], lambda settings: "workers" not in settings)
def test_streams_give_each_token_once(tiny_path: Path, settings: dict[str, Any]) -> None:
    expected = wanted(tiny_path, GREEDY.model_copy(update={"n": 2, "temperature": 0.8, "seed": 3}))
    params = GREEDY.model_copy(update={"n": 2, "temperature": 0.8, "seed": 3})

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        async def read(prompt: str) -> list[tuple[str, list[int]]]:
            texts, tokens, num_deltas = ["", ""], list[list[int]]([[], []]), 0
            async for index, delta in engine.stream_each(prompt, params):
                texts[index] += delta.text
                tokens[index] += delta.token_ids
                num_deltas += 1
            assert num_deltas > 2
            return list(zip(texts, tokens, strict=True))

        found = await asyncio.gather(*map(read, PROMPTS))
        assert found == [[(each.text, each.token_ids) for each in one] for one in expected]
        with pytest.raises(RequestError, match="n=2: a stream has one output"):
            await anext(engine.stream(PROMPTS[0], params))
        deltas = [delta async for delta in engine.stream(PROMPTS[0], GREEDY)]
        assert deltas[-1].finish_reason is not None and deltas[-1].metrics is not None

    with_engine(tiny_path, test, **settings)


def test_who_is_cancelled_or_leaves_is_aborted_and_nobody_notices(tiny_path: Path) -> None:
    expected = wanted(tiny_path)

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        tasks = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
        others = [asyncio.create_task(engine.generate(prompt, GREEDY)) for prompt in PROMPTS]
        async with aclosing(engine.stream("left", LONG)) as stream:
            async for _ in stream:
                break
        for task in tasks:
            task.cancel()
        for output, one in zip(await asyncio.gather(*others), expected, strict=True):
            assert same(output.outputs, one)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)

    with_engine(tiny_path, test, max_requests=5)


def test_a_generator_that_is_thrown_away_is_aborted(tiny_path: Path) -> None:
    async def test(engine: AsyncEngine, llm: LLM) -> None:
        stream = engine.stream("left", LONG)
        await anext(stream)
        del stream
        gc.collect()
        await until(lambda: engine.num_unfinished == 0)

    with_engine(tiny_path, test)


def test_wrong_requests_say_why_and_others_go_on(tiny_path: Path) -> None:
    async def test(engine: AsyncEngine, llm: LLM) -> None:
        good = asyncio.create_task(engine.generate(PROMPTS[0], GREEDY))
        with pytest.raises(RequestError, match=r"^the prompt has 500 tokens"):
            await engine.generate([1] * 500, GREEDY)
        with pytest.raises(ConfigError, match="temperature"):
            await engine.generate("x", {"temperature": -1})
        with pytest.raises(RequestError):
            await anext(engine.stream({"nothing": 1}, GREEDY))
        assert (await good).error is None

    with_engine(tiny_path, test)


def test_requests_beyond_the_most_wait_or_are_refused(tiny_path: Path) -> None:
    async def test(engine: AsyncEngine, llm: LLM) -> None:
        tasks = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS[:3]]
        await until(lambda: engine.num_unfinished == 3)
        assert engine.is_full and (await engine.stats())["waiting"] == 1
        with pytest.raises(
            BusyError, match="3 outputs are unfinished, at most 2 may be, and this request has 1"
        ):
            await engine.generate("x", GREEDY, wait=False)
        waiting = asyncio.create_task(engine.generate("x", GREEDY))
        tasks[2].cancel()  # one that waits
        assert (await waiting).error is None
        await asyncio.gather(*tasks[:2])
        assert (await engine.generate("x", GREEDY, wait=False)).error is None

    with_engine(tiny_path, test, max_requests=2)
    with pytest.raises(ConfigError, match="max_requests"):
        AsyncEngine(None, max_requests=0)  # type: ignore[arg-type]


def test_a_refusal_does_not_wait_for_others(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers a step returns once a request has gained something, or when it is woken."""

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        step, woken, num_waits = llm.step, threading.Event(), 0

        def wait() -> list[Any]:
            nonlocal num_waits
            num_waits += 1
            woken.wait(60)
            woken.clear()
            return []

        monkeypatch.setattr(llm, "step", wait)
        monkeypatch.setattr(llm, "wake", woken.set)
        good = asyncio.create_task(engine.generate(PROMPTS[0], GREEDY))
        await until(lambda: num_waits == 2)  # it was woken once, when the good one came
        with pytest.raises(RequestError, match="the prompt has 500 tokens"):
            await asyncio.wait_for(engine.generate([1] * 500, GREEDY), 20.0)
        monkeypatch.setattr(llm, "step", step)
        woken.set()
        assert (await good).error is None

    with_engine(tiny_path, test)


def test_those_that_run_make_steps_while_many_prompts_are_read(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second each, on the clock that the engine sees."""
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("hispec.serving.async_engine.time", clock, raising=False)

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        add, step, held = llm.add, llm.step, threading.Event()
        running, woken_by = [], []

        def add_slowly(*arguments: Any) -> None:
            nonlocal now_s
            now_s += 1.0
            add(*arguments)

        def step_noted() -> Any:
            running.append(len(llm._pending))
            return step()

        monkeypatch.setattr(llm, "add", add_slowly)
        monkeypatch.setattr(llm, "step", step_noted)
        monkeypatch.setattr(llm, "wake", lambda: woken_by.append(threading.current_thread()))
        engine._post(lambda: held.wait(30) and None)
        tasks = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS[:4]]
        await until(lambda: engine.num_unfinished == 4)
        held.set()
        assert all(output.error is None for output in await asyncio.gather(*tasks))
        assert running[:4] == [1, 2, 3, 4]
        assert woken_by.count(engine._thread) == 3, "with workers steps would wait"

    with_engine(tiny_path, test, max_run_ms=0.0)


def test_the_queue_is_what_waits_here_and_in_the_llm(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: AsyncEngine, llm: LLM) -> None:
        step, held, has_stepped = llm.step, threading.Event(), threading.Event()

        def step_once() -> Any:
            if has_stepped.is_set():
                time.sleep(0.005)
                return []
            finished = step()
            has_stepped.set()
            return finished

        monkeypatch.setattr(llm, "step", step_once)
        engine._post(lambda: held.wait(30) and None)
        two = LONG.model_copy(update={"n": 2})
        tasks = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS[:4]]
        tasks += [asyncio.create_task(engine.generate(prompt, two)) for prompt in PROMPTS[4:6]]
        await until(lambda: engine.num_unfinished == 8)
        held.set()
        await until(has_stepped.is_set)
        stats = await engine.stats()
        assert stats["running"] == 2 and stats["waiting"] == 6  # 2 of them in the LLM, which may have 4
        monkeypatch.setattr(llm, "step", step)
        await asyncio.gather(*tasks)

    with_engine(tiny_path, test, max_requests=4, max_num_seqs=2, max_run_ms=0.0)


def test_outputs_count_not_requests(tiny_path: Path) -> None:
    async def test(engine: AsyncEngine, llm: LLM) -> None:
        held = threading.Event()
        engine._post(lambda: held.wait(30) and None)
        two = GREEDY.model_copy(update={"n": 2})
        tasks = [asyncio.create_task(engine.generate(prompt, two, wait=False)) for prompt in PROMPTS[:2]]
        await until(lambda: engine.num_unfinished == 4)
        assert not engine.is_full
        with pytest.raises(BusyError, match=r"4 outputs are unfinished, at most 5 may be.* has 2"):
            await engine.generate("x", two, wait=False)
        tasks.append(asyncio.create_task(engine.generate("x", GREEDY, wait=False)))
        await until(lambda: engine.is_full)
        waiting = asyncio.create_task(engine.generate("x", two))
        await until(lambda: engine.num_unfinished == 7)
        held.set()
        running: list[int] = []
        step = llm.step

        def counted() -> Any:
            running.append(sum(len(pending.sequences) for pending in llm._pending.values()))
            return step()

        llm.step = counted  # type: ignore[method-assign]
        outputs = await asyncio.gather(*tasks, waiting)
        assert [len(output.outputs) for output in outputs] == [2, 2, 1, 2] and max(running) == 5
        with pytest.raises(RequestError, match=r"n=6: at most 5 outputs.*max_requests"):
            await engine.generate("x", GREEDY.model_copy(update={"n": 6}))

    with_engine(tiny_path, test, max_requests=5)


def test_drain_waits_for_all_and_takes_no_more(tiny_path: Path) -> None:
    async def test(engine: AsyncEngine, llm: LLM) -> None:
        tasks = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: engine.num_unfinished == len(PROMPTS))
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError, match="drain"):
            await engine.generate("x", GREEDY)
        await draining
        assert all(task.done() and task.result().error is None for task in tasks)
        await engine.drain()

    with_engine(tiny_path, test, max_requests=3)


def test_closing_ends_all_that_wait(tiny_path: Path) -> None:
    async def test(engine: AsyncEngine, llm: LLM) -> None:
        tasks = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
        draining = asyncio.create_task(engine.drain())
        await until(lambda: engine.num_unfinished == len(PROMPTS))
        await engine.aclose()
        engine.close()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, ClosedError) or each.error is None for each in ended)  # type: ignore[union-attr]
        assert any(isinstance(each, ClosedError) for each in ended)
        await draining
        with pytest.raises(ClosedError):
            await engine.generate("x", GREEDY)
        assert "waiting" in await engine.stats() and llm.engine.is_closed and engine.num_unfinished == 0

    with_engine(tiny_path, test, max_requests=6)


def test_an_engine_that_breaks_tells_all(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: AsyncEngine, llm: LLM) -> None:
        release = threading.Event()

        def broken() -> Any:
            release.wait(60)
            raise OSError("the device is gone")

        monkeypatch.setattr(llm, "step", broken)
        tasks = [asyncio.create_task(engine.generate(prompt, GREEDY)) for prompt in PROMPTS[:4]]
        draining = asyncio.create_task(engine.drain())
        await until(lambda: engine.num_unfinished == 4)
        release.set()
        waiting: list[Awaitable[Any]] = [*tasks, draining]
        for each in waiting:
            with pytest.raises(EngineDeadError, match="OSError: the device is gone") as raised:
                await each
            assert isinstance(raised.value.__cause__, OSError)
        with pytest.raises(EngineDeadError):
            await engine.generate("x", GREEDY)
        assert engine.is_dead and llm.engine.is_closed and engine.num_unfinished == 0
        await engine.stats()

    with_engine(tiny_path, test, max_requests=2)


def test_an_engine_without_workers_is_dead_though_nobody_asks_it_for_anything(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for counts finds it out, too."""

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        error = CheckpointError("no worker is left, the last was ended by SIGKILL")

        def gone() -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(llm, "stats", gone)
            for failure in (None, error):
                assert not engine.is_dead, "counts could not be had, no more"
                patch.setattr(LLM, "failure", failure)
                assert engine.is_dead == (failure is not None)
                with pytest.raises(CheckpointError):
                    await engine.stats()
            await until(lambda: engine.is_dead)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await engine.generate("x", GREEDY)
        await engine.stats()

    with_engine(tiny_path, test)


def test_what_a_broken_engine_tells_newcomers_does_not_grow(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that is raised again and again keeps the frames of all who got it, and their prompts."""

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        def broken() -> Any:
            raise OSError("the device is gone")

        monkeypatch.setattr(llm, "step", broken)
        depths = []
        for _ in range(4):
            with pytest.raises(EngineDeadError, match="OSError") as raised:
                await engine.generate("x", GREEDY)
            depths.append(len(traceback.extract_tb(raised.value.__traceback__)))
        assert depths[1:] == [depths[1]] * 3

    with_engine(tiny_path, test)


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_is_much_too_long_delays_nobody(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    """It is read in another thread than that which steps; one that fits is served, however long its text."""
    monkeypatch.setattr(module, "_LONG", 100)
    threads: dict[int, set[str]] = {}
    encode = prompts_module._encode

    def noted(tokenizer: Any, text: str, **options: Any) -> list[int]:
        threads.setdefault(len(text) // 300, set()).add(threading.current_thread().name)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(prompts_module, "_encode", noted)

    def prompt_of(length: int) -> Any:
        if not chat:
            return "x" * length
        half = {"type": "text", "text": "x" * (length // 2)}
        return [{"role": "user", "content": [half, half]}]

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        with pytest.raises(RequestError, match=r"^the prompt has [36]\d\d tokens, but max_model_len=128"):
            await engine.generate(prompt_of(600), GREEDY, chat=chat)
        with pytest.raises(RequestError, match=r"^the prompt has [36]\d\d tokens"):
            async for _ in engine.stream(prompt_of(600), GREEDY, chat=chat):
                pass
        with pytest.raises(RequestError, match=r"^the prompt has 300 tokens"):
            await engine.generate({"prompt_token_ids": [1] * 300}, GREEDY)
        assert "hispec-engine" not in threads[2]
        output = await engine.generate("y" * 101, GREEDY)
        assert output.error is None and "hispec-engine" in threads[0]
        assert engine.num_unfinished == 0
        running = asyncio.create_task(engine.generate("x", LONG))
        await until(lambda: engine.num_unfinished == 1)
        reads = sum(len(names) for names in threads.values())
        with pytest.raises(BusyError):  # and not read before
            await engine.generate(prompt_of(900), GREEDY, chat=chat, wait=False)
        assert 3 not in threads and sum(len(names) for names in threads.values()) <= reads + 1
        await running

    with_engine(tiny_path, test, max_requests=1)


def test_messages_are_counted_before_they_are_read(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their texts may be short, or none, or elsewhere than in `content`."""
    monkeypatch.setattr(module, "_LONG", 100)
    begun, may_read = threading.Event(), threading.Event()

    def chat_of(num: int, **fields: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "", **fields}] * num

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        encode = llm.encode

        def wait_and_read(prompt: Any, chat: bool = False) -> list[int]:
            begun.set()
            assert may_read.wait(60.0) and threading.current_thread().name != "hispec-engine"
            return encode(prompt, chat)

        monkeypatch.setattr(llm, "encode", wait_and_read)
        with pytest.raises(RequestError, match=r"^129 messages, .* max_model_len=128; leave some out"):
            await engine.generate(chat_of(129), GREEDY, chat=True)
        assert not begun.is_set()
        for few in (
            chat_of(1, name="x" * 100),
            chat_of(1, tool_calls=[{"arguments": "x" * 100}]),
            chat_of(60),
        ):
            reading = asyncio.create_task(engine.generate(few, GREEDY, chat=True))
            await asyncio.to_thread(begun.wait, 60.0)
            assert engine.num_unfinished == 1 and engine.is_full
            with pytest.raises(BusyError):
                await engine.generate("x", GREEDY, wait=False)
            may_read.set()
            await asyncio.gather(reading, return_exceptions=True)
            assert engine.num_unfinished == 0
            begun.clear()
            may_read.clear()

    with_engine(tiny_path, test, max_requests=1)


class Unspeakable:
    def __repr__(self) -> str:
        raise ZeroDivisionError("not foreseen")


def test_a_request_that_no_error_is_foreseen_for_fails_alone(tiny_path: Path) -> None:
    async def test(engine: AsyncEngine, llm: LLM) -> None:
        good = asyncio.create_task(engine.generate(PROMPTS[0], LONG))
        for prompt in (Unspeakable(), {"prompt": Unspeakable()}):
            with pytest.raises(ZeroDivisionError):
                await engine.generate(prompt, GREEDY)
        assert (await good).error is None and not engine.is_dead

    with_engine(tiny_path, test)


def test_an_llm_is_made_in_the_thread_that_steps_it(tiny_path: Path) -> None:
    threads = []

    def make() -> LLM:
        threads.append(threading.current_thread())
        return LLM(str(tiny_path), **SMALL)

    engine = AsyncEngine(make)
    assert engine.llm.num_workers == 1 and threads == [engine._thread]
    engine.close()
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncEngine(lambda: LLM(str(tiny_path), max_num_seqs=0))


@pytest.fixture
def on_interrupt() -> Iterator[None]:
    """Python's own handler: a program that a shell has put into the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("on_interrupt")
def test_an_llm_whose_making_was_interrupted_is_closed_when_it_is_made() -> None:
    closed, goes_on = threading.Event(), threading.Event()

    class Late:
        def close(self) -> None:
            closed.set()

    def make() -> Any:
        _thread.interrupt_main()
        goes_on.wait(60)
        return Late()

    with pytest.raises(KeyboardInterrupt):
        AsyncEngine(make)
    goes_on.set()
    assert closed.wait(20)


def test_several_event_loops_and_one_that_ends_early(tiny_path: Path) -> None:
    engine = AsyncEngine(LLM(str(tiny_path), **SMALL))
    expected = wanted(tiny_path)
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = asyncio.run(engine.generate(PROMPTS[number], GREEDY)).outputs

    async def leave() -> None:
        task = asyncio.create_task(engine.generate("left", LONG))
        await until(lambda: engine.num_unfinished > 0)
        del task

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    asyncio.run(leave())
    for thread in threads:
        thread.join(60)
    assert all(same(found[number], expected[number]) for number in range(len(PROMPTS)))
    engine.close()


def test_importing_it_starts_nothing() -> None:
    before = threading.active_count()
    import hispec.serving.async_engine  # noqa: F401

    assert threading.active_count() == before


def test_a_prompt_that_waits_to_be_read_ends_with_the_engine(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other requests do: who is cancelled though nobody cancelled him would be taken for one that left."""
    monkeypatch.setattr(module, "_LONG", 100)
    begun, may_read = threading.Event(), threading.Event()

    async def test(engine: AsyncEngine, llm: LLM) -> None:
        encode = llm.encode

        def wait_and_read(prompt: Any, chat: bool = False) -> list[int]:
            begun.set()
            assert may_read.wait(60.0)
            return encode(prompt, chat)

        monkeypatch.setattr(llm, "encode", wait_and_read)
        first, second, third = (asyncio.create_task(engine.generate("x" * 200, GREEDY)) for _ in range(3))
        await asyncio.to_thread(begun.wait, 60.0)
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        await engine.aclose()
        with pytest.raises(ClosedError):
            await second
        may_read.set()
        with pytest.raises((ClosedError, RequestError)):
            await first

    with_engine(tiny_path, test)
