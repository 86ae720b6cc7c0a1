"""Engines for tests of `benchmarks/peers_cpu.py`. Their processes import this file by itself: the package
`tests` would bring torch, which takes them seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

Generate = Callable[[Sequence[list[int]]], list[list[int]]]


def counting(setup: Any, batch_size: int, *, missing: int = 0) -> Generate:
    """After a token, the next larger one; `missing` tokens too few."""
    length = setup.max_tokens - missing
    return lambda prompts: [[prompt[-1] + 1 + at for at in range(length)] for prompt in prompts]


def near(setup: Any, batch_size: int, *, same: int) -> Generate:
    """What `counting` says for so many tokens, then something else, and its last token again."""
    count = counting(setup, batch_size)
    return lambda prompts: [
        [*output[:same], *(-1 for _ in output[same:-1]), output[-1]] for output in count(prompts)
    ]


def broken(setup: Any, batch_size: int) -> Generate:
    raise OSError("no such weights")


def killed(setup: Any, batch_size: int) -> Generate:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def dies_in_second_call(setup: Any, batch_size: int) -> Generate:
    """The first warms it up."""
    calls: list[int] = []

    def generate(prompts: Sequence[list[int]]) -> list[list[int]]:
        calls.append(len(prompts))
        if len(calls) > 1:
            os._exit(3)
        return counting(setup, batch_size)(prompts)

    return generate
