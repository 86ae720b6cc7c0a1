"""What plans give over others: means over tasks with their intervals, and what is claimed of three tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.hierarchy_plans import fastest
from hispec.jobs.confidence_interval import Paired, mean_ratio, ratio_interval
from hispec.profile.predict import Prediction

BASELINE = "two-tier exit"  # the paper's


class Totals(NamedTuple):
    """What answers or batches give and take, each."""

    tokens: Sequence[float]
    cost: Sequence[float]


def compared(ours: Totals, base: Totals, tasks: Sequence[str]) -> dict[str, Any]:
    """The mean over tasks of tokens per cost over the base's, and its interval (None where a task has a
    single entry)."""
    paired = [
        Paired(*([values[at] for at in numbers] for values in (*ours, *base)))
        for task in dict.fromkeys(tasks)
        for numbers in ([at for at, each in enumerate(tasks) if each == task],)
    ]
    interval = ratio_interval(paired)
    return {"ratio": mean_ratio(paired), "interval": None if interval is None else list(interval)}


def claims(
    held: Mapping[str, Totals], tasks: Sequence[str], tuned: Mapping[str, Prediction]
) -> dict[str, dict[str, Any]]:
    """The best three-tier plan over two-tier exits, which is the paper's comparison, and over the best
    two-tier plan of any drafter; which ones are best, the tuning prompts say."""
    three, two = fastest(tuned, "three"), fastest(tuned, "two")
    return {
        name: {"three_tier": three, "two_tier": base, **compared(held[three], held[base], tasks)}
        for name, base in (("over_exits", BASELINE), ("over_any", two))
    }
