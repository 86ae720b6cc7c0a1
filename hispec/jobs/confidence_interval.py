"""Confidence intervals of speed-ups, by resampling prompts [Efron 1979]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000


@dataclass(frozen=True)
class Paired:
    """One task's prompts, each decoded in two ways: [prompts] tokens and seconds of either."""

    tokens: Sequence[float]
    seconds: Sequence[float]
    plain_tokens: Sequence[float]
    plain_seconds: Sequence[float]


def ratio_interval(
    tasks: Sequence[Paired], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean over tasks of (tokens/s) / (plain tokens/s).

    Prompts are drawn with replacement within each task, the two ways of decoding together, so that what a
    prompt's length or the machine's drift does to both cancels out. None where some task has a single prompt:
    it would not vary.
    """
    if not tasks or any(len(task.tokens) < 2 for task in tasks):
        return None
    random = np.random.default_rng(seed)
    means = np.zeros(_RESAMPLES)
    for task in tasks:
        drawn = random.integers(0, len(task.tokens), size=(_RESAMPLES, len(task.tokens)))
        speed = np.asarray(task.tokens)[drawn].sum(1) / np.asarray(task.seconds)[drawn].sum(1)
        plain_speed = np.asarray(task.plain_tokens)[drawn].sum(1) / np.asarray(task.plain_seconds)[drawn].sum(
            1
        )
        means += speed / plain_speed / len(tasks)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
