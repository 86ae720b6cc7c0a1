"""Passes that are timed against each other."""

from __future__ import annotations

from collections.abc import Callable

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
    assert sorted(runs) == ["a", "a", "b", "b"], "a warm-up and one sample are the least"


def test_what_all_are_compared_with_is_sampled_often() -> None:
    runs: list[str] = []
    passes = {name: lambda name=name: runs.append(name) for name in "abc"}
    quiet_times(passes, CPU, samples=2, what="test", progress=False, often=["b"])
    assert sorted(runs) == sorted("abbbbc" * 3)


def test_a_pass_takes_what_it_does_in_quiet_moments() -> None:
    """A third of the time by half slower, once as slow as never: neither makes it cost more."""
    ms = iter([50.0, 4.0, 6.0, 4.2, 4.1, 90.0, 6.1, 4.3, 6.2, 4.4])  # the first is a warm-up
    found = quiet_times({"a": lambda: next(ms)}, CPU, samples=9, what="test", progress=False)
    assert found == {"a": 4.2}
