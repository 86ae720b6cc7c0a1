"""One thread that steps: nobody waits for ever, whatever happens to the engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hispec import LLM, RequestError, SamplingParams
from hispec.errors import ClosedError
from hispec.integrations.engine_thread import EngineThread

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)
SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}


def test_requests_from_many_threads_are_served(tiny_path: Path) -> None:
    prompts = [f"prompt {number}" for number in range(12)]
    with LLM(str(tiny_path), **SMALL) as llm:
        wanted = [output.outputs[0].text for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    engine = EngineThread(LLM(str(tiny_path), **SMALL))
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        texts[number] = engine.submit(prompts[number], PARAMS).result(timeout=60).outputs[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()
    assert [texts[number] for number in range(12)] == wanted


def test_a_request_that_cannot_be_served_says_why(tiny_path: Path) -> None:
    engine = EngineThread(LLM(str(tiny_path), **SMALL))
    with pytest.raises(RequestError, match=r"^the prompt has 500 tokens"):
        engine.submit([1] * 500, PARAMS).result(timeout=60)
    assert engine.submit([1] * 5, PARAMS).result(timeout=60).error is None
    engine.close()


def test_closing_ends_all_that_wait(tiny_path: Path) -> None:
    engine = EngineThread(LLM(str(tiny_path), **SMALL))
    many = [engine.submit([1] * 20, SamplingParams(max_tokens=90, ignore_eos=True)) for _ in range(40)]
    engine.close()
    engine.close()
    many.append(engine.submit([1], PARAMS))
    ended = [future.exception(timeout=60) for future in many]
    assert all(error is None or isinstance(error, ClosedError) for error in ended)
    assert isinstance(ended[-1], ClosedError)


def test_an_engine_that_breaks_tells_all(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_path), **SMALL)
    release = threading.Event()

    def broken() -> Any:
        release.wait(60)
        raise OSError("the device is gone")

    monkeypatch.setattr(llm, "step", broken)
    engine = EngineThread(llm)
    waiting = [engine.submit([1], PARAMS) for _ in range(3)]
    release.set()
    for future in waiting:
        with pytest.raises(OSError, match="device is gone"):
            future.result(timeout=60)
    with pytest.raises(OSError, match="device is gone"):
        engine.submit([1], PARAMS).result(timeout=60)
    engine.close()
    assert llm.engine.is_closed


def test_a_request_that_was_cancelled_before_it_ran_is_left_out(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), **SMALL)
    added: list[Any] = []
    add = llm.add
    begin = threading.Event()

    def counted(*arguments: Any, **more: Any) -> None:
        added.append(arguments[0])
        begin.wait(60)
        add(*arguments, **more)

    llm.add = counted  # type: ignore[method-assign]
    engine = EngineThread(llm)
    first, second, third = (engine.submit([number], PARAMS) for number in (1, 2, 3))
    assert second.cancel()
    begin.set()
    assert first.result(timeout=60).error is None and third.result(timeout=60).error is None
    engine.close()
    assert added == [[1], [3]]
