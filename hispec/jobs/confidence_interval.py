"""Confidence intervals of speed-ups: by resampling prompts [Efron 1979], and by the noise of repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_RESAMPLES, _TAILS = 2000, (0.025, 0.975)
# Student's t of a two-sided 95 % interval, by degrees of freedom from 1 on. Beyond, the first terms of its
# series in their inverse, which begins with the normal distribution's [Abramowitz and Stegun 26.7.5].
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_T_BEYOND = 1.95996, 2.37227, 2.82250


@dataclass(frozen=True)
class Paired:
    """One task's prompts, each decoded in two ways: [prompts] tokens and seconds of either."""

    tokens: Sequence[float]
    seconds: Sequence[float]
    plain_tokens: Sequence[float]
    plain_seconds: Sequence[float]


def mean_ratio(tasks: Sequence[Paired]) -> float:
    """The mean over tasks of (tokens/s) / (plain tokens/s)."""
    return statistics.fmean(
        sum(task.tokens) / sum(task.seconds) / (sum(task.plain_tokens) / sum(task.plain_seconds))
        for task in tasks
    )


def ratio_interval(tasks: Sequence[Paired]) -> tuple[float, float] | None:
    """As `_bootstrap_interval`, of a ratio of speeds: none is below 0, however little is known."""
    interval = _bootstrap_interval(tasks)
    return None if interval is None else (max(0.0, interval[0]), interval[1])


def _bootstrap_interval(tasks: Sequence[Paired]) -> tuple[float, float] | None:
    """Bootstrap interval of `mean_ratio`, 95 %.

    Prompts are drawn with replacement within each task, the two ways of decoding together, so that what a
    prompt's length or the machine's drift does to both cancels out. Drawn so, n of them vary less than n new
    ones, by (n - 1) / n, and how much a few vary is not known well: percentiles alone would hold the mean of
    seven tasks of two prompts in three quarters of cases. So deviations are widened by both, the latter by
    Student's t, as if all tasks varied alike. None where some task has a single prompt: it would not vary.
    """
    if not tasks or any(len(task.tokens) < 2 for task in tasks):
        return None
    random, deviations = np.random.default_rng(0), np.zeros(_RESAMPLES)
    for task in tasks:
        num = len(task.tokens)
        drawn = random.integers(0, num, size=(_RESAMPLES, num))
        tokens, seconds, plain_tokens, plain_seconds = (
            np.asarray(values)[drawn].sum(1)
            for values in (task.tokens, task.seconds, task.plain_tokens, task.plain_seconds)
        )
        deviations += (tokens / seconds / (plain_tokens / plain_seconds) - mean_ratio([task])) * math.sqrt(
            num / (num - 1)
        )
    widened = students_t(sum(len(task.tokens) - 1 for task in tasks)) / _T_BEYOND[0]
    low, high = mean_ratio(tasks) + np.quantile(deviations / len(tasks), _TAILS) * widened
    return float(low), float(high)


def students_t(freedom: int) -> float:
    """Standard errors on either side of a mean that hold 95 %, for so many degrees of freedom, at least 1."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    normal, first, second = _T_BEYOND
    return normal + (first + second / freedom) / freedom


def mean_of(
    totals: Sequence[float], counts: Sequence[float], tasks: Sequence[str] | None = None
) -> dict[str, Any]:
    """Sum of `totals` over sum of `counts`, the mean over tasks if given; with its bootstrap interval over
    rows (None where a task has a single row)."""
    rows: dict[str, list[int]] = {}
    for row in range(len(totals)):
        rows.setdefault("" if tasks is None else tasks[row], []).append(row)
    paired, means = [], []
    for of_task in rows.values():
        total, count = [totals[row] for row in of_task], [counts[row] for row in of_task]
        ones = [1.0] * len(of_task)  # over which a ratio is what it is
        paired.append(Paired(total, count, ones, ones))
        means.append(sum(total) / sum(count))
    return {"value": sum(means) / len(means), "interval": _bootstrap_interval(paired)}


def noise_of_repeats(speeds: Sequence[Sequence[float]]) -> float | None:
    """The factor by which two programs that are equally fast differ at most, in 95 % of comparisons, by their
    geometric mean speeds; None without a second program and a second repeat.

    speeds   [programs][repeats], timed in turns. What a repeat does to all programs alike cancels out; what
             is left is pooled over them (analysis of variance of the logarithms, in blocks), so that two or
             three repeats say something.
    """
    logs = np.log(np.asarray(speeds))
    num_programs, num_repeats = logs.shape
    freedom = (num_programs - 1) * (num_repeats - 1)
    if freedom == 0:
        return None
    left = logs - logs.mean(0) - logs.mean(1, keepdims=True) + logs.mean()
    deviation = math.sqrt((left**2).sum() / freedom)
    return math.exp(students_t(freedom) * deviation * math.sqrt(2 / num_repeats))
