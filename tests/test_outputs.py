"""What is collected of an output: all of it, once, in few Deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hispec import LLM, SamplingParams
from hispec.outputs import Delta, GrowingOutput, TokenLogprobs
from tests.helpers.interrupts import Interrupts

SIZE = 1000


def deltas(size: int) -> list[Delta]:
    return [
        Delta(
            "a",
            [at, at + 1],
            f"{at} ",
            [TokenLogprobs(at, -1.0, {}), TokenLogprobs(at + 1, -1.0, {})],
            "stop" if at == size - 1 else None,
            None,
            tiers=["draft", "verify"],
        )
        for at in range(size)
    ]


def whole(size: int) -> tuple[Any, ...]:
    tokens = [token for at in range(size) for token in (at, at + 1)]
    return "".join(f"{at} " for at in range(size)), tokens, tokens, ["draft", "verify"] * size, "stop"


def parts(one: Any) -> tuple[Any, ...]:
    logprobs = [entry.token_id for entry in one.logprobs]
    return one.text, one.token_ids, logprobs, one.tiers, one.finish_reason


def test_a_long_output_is_whole_and_kept_in_few_deltas() -> None:
    growing = GrowingOutput()
    for delta in deltas(SIZE):
        growing.add(delta)
        growing.add(delta)  # as after an interrupt
        assert growing.last is delta and len(growing.deltas) <= 65 + SIZE // 60
    assert parts(growing.make_delta()) == whole(SIZE)
    assert parts(growing.make_output(0, True, True)) == whole(SIZE)
    bare = growing.make_output(0, False, False)
    assert bare.logprobs is bare.tiers is None


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_at_any_line_loses_and_doubles_nothing(at: int) -> None:
    size, growing = 200, GrowingOutput()
    interrupts = Interrupts("hispec/outputs.py", at=at)
    for delta in deltas(size):
        for _ in range(10**4):
            try:
                with interrupts.armed():
                    growing.add(delta)
                break
            except KeyboardInterrupt:
                continue
    assert len(interrupts.lines) > 4 and parts(growing.make_delta()) == whole(size)


def test_a_stream_keeps_what_was_not_read_alone(tiny_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with LLM(str(tiny_path), max_model_len=128, num_kv_blocks=64, max_run_ms=0.0) as llm:
        (expected,) = llm.generate(["one"], params, use_tqdm=False)
        stream = llm.stream("one", params)
        read = [next(stream)]
        (pending,) = llm._pending.values()
        (growing,) = pending.sequences.values()
        for _ in range(80):  # unread for a while: none of them may be joined
            llm.step()
        assert len(growing.deltas) > 70
        for delta in stream:
            read.append(delta)
        assert len(growing.deltas) == 1 and len(read) > 95
        assert [token for delta in read for token in delta.token_ids] == expected.outputs[0].token_ids
        assert "".join(delta.text for delta in read) == expected.outputs[0].text
