"""Timed runs of engines and plans, and what is derived from them: speeds, ratios, intervals, same outputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import SpeculativeConfig
from .bench_inputs import TokenIds, task_of
from .confidence_interval import Paired, ratio_interval
from .rows import Row


@dataclass(frozen=True)
class Group:
    """Prompts that are timed together, by number; all of one task."""

    task: str
    prompts: list[int]


@dataclass
class Runs:
    """The timed runs of one engine, or plan, over groups of prompts.

    seconds, decode_seconds   by run and group; those of rounds alone (without prompts), where they are asked
                              for
    outputs                   token ids by run and prompt
    stats                     what the engine counted: `hispec bench` of all runs, `hispec profile` a part, of
                              the last
    """

    groups: Sequence[Group]
    seconds: list[list[float]] = field(default_factory=list)
    decode_seconds: list[list[float]] = field(default_factory=list)
    outputs: list[list[TokenIds]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    def begin_run(self) -> None:
        self.seconds.append([0.0] * len(self.groups))
        self.decode_seconds.append([0.0] * len(self.groups))
        self.outputs.append([[] for group in self.groups for _ in group.prompts])

    def time(
        self,
        number: int,
        prompts: Sequence[TokenIds],
        run: Callable[[list[TokenIds]], list[TokenIds]],
        decode_clock: Callable[[], float] | None = None,
    ) -> None:
        """Times group `number` of the prompts in the latest run. decode_clock: seconds that rounds have taken
        so far."""
        group = self.groups[number]
        decoded, started = decode_clock() if decode_clock else 0.0, time.perf_counter()
        results = run([prompts[prompt] for prompt in group.prompts])
        self.seconds[-1][number] = time.perf_counter() - started
        if decode_clock is not None:
            self.decode_seconds[-1][number] = decode_clock() - decoded
        for prompt, result in zip(group.prompts, results, strict=True):
            self.outputs[-1][prompt] = result

    def median_tokens_per_s(self, task: str | None = None, *, decode: bool = False) -> float:
        return statistics.median(self.tokens_per_s(task, decode=decode))

    def tokens_per_s(self, task: str | None = None, *, decode: bool = False) -> list[float]:
        """By run, over all groups or those of one task. `decode`: by the time of rounds alone."""
        taken = [number for number, group in enumerate(self.groups) if task in (None, group.task)]
        times = self.decode_seconds if decode else self.seconds
        return [
            sum(self._num_tokens(number, outputs) for number in taken)
            / sum(seconds[number] for number in taken)
            for outputs, seconds in zip(self.outputs, times, strict=True)
        ]

    def by_group(self, task: str | None = None, *, decode: bool = False) -> tuple[list[float], list[float]]:
        """Mean tokens and median seconds over runs of each group, or of each of the task. `decode`: of rounds
        alone."""
        taken = [number for number, group in enumerate(self.groups) if task in (None, group.task)]
        times = self.decode_seconds if decode else self.seconds
        return [
            statistics.fmean(self._num_tokens(number, outputs) for outputs in self.outputs)
            for number in taken
        ], [statistics.median(seconds[number] for seconds in times) for number in taken]

    def _num_tokens(self, group: int, outputs: Sequence[TokenIds]) -> int:
        return sum(len(outputs[prompt]) for prompt in self.groups[group].prompts)


def keeps_outputs(plan: SpeculativeConfig | None) -> bool:
    """Whether what it drafts hangs on earlier outputs."""
    return plan is not None and plan.draft.lookup is not None and plan.draft.lookup.keeps_outputs


def make_groups(rows: list[Row], batch_size: int, *, by_batch: bool = False) -> list[Group]:
    """Each prompt by itself at batch size 1; else all prompts of a task, since a batch has no time of single
    prompts, or with `by_batch` as many of them as run together."""
    if batch_size == 1:
        return [Group(task_of(row), [number]) for number, row in enumerate(rows)]
    tasks: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        tasks.setdefault(task_of(row), []).append(number)
    return [
        Group(task, numbers[start : start + size])
        for task, numbers in tasks.items()
        for size in (batch_size if by_batch else len(numbers),)
        for start in range(0, len(numbers), size)
    ]


def ratios_by_task(runs: dict[str, Runs], *, decode: bool = False) -> dict[str, dict[str, float]]:
    """By engine: tokens/s over plain's for each task, and their mean; empty for a single task."""
    tasks = _tasks(runs)
    if len(tasks) < 2:
        return {}
    found = {}
    for name, run in runs.items():
        ratios = {
            task: run.median_tokens_per_s(task, decode=decode)
            / runs["plain"].median_tokens_per_s(task, decode=decode)
            for task in tasks
        }
        found[name] = {**ratios, "mean": statistics.fmean(ratios.values())}
    return found


def ratio_intervals(runs: dict[str, Runs]) -> dict[str, list[float]]:
    """By engine: the 95 % interval over prompts of its mean ratio to plain; empty if a task has a single
    prompt."""
    found, plain = {}, runs["plain"]
    for name, run in runs.items():
        tasks = [Paired(*run.by_group(task), *plain.by_group(task)) for task in _tasks(runs)]
        if name != "plain" and (interval := ratio_interval(tasks)) is not None:
            found[name] = list(interval)
    return found


def _tasks(runs: dict[str, Runs]) -> list[str]:
    return list(dict.fromkeys(group.task for group in runs["plain"].groups))


def num_matches(run: Runs, plain: Runs) -> list[int]:
    """[n, total]: prompts whose tokens are plain decoding's in every run, of all prompts."""
    by_prompt = zip(*run.outputs, *plain.outputs, strict=True)
    return [sum(all(each == outputs[0] for each in outputs) for outputs in by_prompt), len(plain.outputs[0])]
