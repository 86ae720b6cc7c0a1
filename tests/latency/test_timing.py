"""Passes that are timed against each other."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import fmean

import pytest
import torch

from hispec.measure.timing import quiet_times

CPU = torch.device("cpu")


def test_passes_take_turns_within_a_budget() -> None:
    runs: list[str] = []

    def run(name: str) -> Callable[[], None]:
        return lambda: runs.append(name)

    found = quiet_times({"a": run("a"), "b": run("b")}, CPU, samples=4, what="test", progress=False)
    assert (
        sorted(runs) == ["a"] * 5 + ["b"] * 5
        and all({*runs[at : at + 2]} == {"a", "b"} for at in range(0, 10, 2))
        and min(found.values()) > 0
    )
    runs.clear()
    quiet_times({"a": run("a"), "b": run("b")}, CPU, samples=4, what="test", progress=False, budget_s=0.0)
    assert sorted(runs) == ["a"] * 4 + ["b"] * 4, "a warm-up and three samples are the least"


def test_what_all_are_compared_with_is_sampled_often() -> None:
    runs: list[str] = []
    passes = {name: lambda name=name: runs.append(name) for name in "abc"}
    quiet_times(passes, CPU, samples=2, what="test", progress=False, often=["b"])
    assert sorted(runs) == sorted("abbbbc" * 3)


def test_a_pass_takes_what_it_does_in_quiet_moments() -> None:
    """A third of the time by half slower, once as slow as never: neither makes it cost more."""
    ms = iter([50.0, 4.0, 6.0, 4.2, 4.1, 90.0, 6.1, 4.3, 6.2, 4.4])  # the first is a warm-up
    found = quiet_times({"a": lambda: next(ms)}, CPU, samples=9, what="test", progress=False)
    assert found == {"a": pytest.approx(4.15)}


@pytest.mark.parametrize("num", [3, 4, 6, 11, 40])
def test_what_is_expected_of_few_samples_is_what_is_of_many(num: int) -> None:
    """Of times that are all as likely: passes that were sampled more often than others are compared."""
    random, found = Random(num), []
    for _ in range(2000):
        ms = iter([0.0, *(10.0 + random.random() for _ in range(num))])
        found.append(
            quiet_times({"a": lambda ms=ms: next(ms)}, CPU, samples=num, what="", progress=False)["a"]
        )
    assert fmean(found) == pytest.approx(10.25, abs=0.015)
