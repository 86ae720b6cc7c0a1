"""Counts and sizes of all workers as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..metrics.histogram import add_histograms
from ..metrics.table import BY_NAME, METRICS

_COUNTS = tuple(metric.name for metric in METRICS if metric.kind != "gauge")
_SHARED = {"weights_bytes", "draft_model_bytes"}


def sum_stats(each: Sequence[Mapping[str, Any]], gone: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """As Engine.stats(), of all: counts, seconds and what is held are summed; what a controller has decided
    and estimates is the first one's. gone: counts of workers that have died, as `sum_counts`."""
    total = _sum(each) | sum_counts([*map(counts_of, each), gone or {}])
    total["num_layers"] = each[0]["num_layers"]
    controls = [one.get("control", {}) for one in each]  # one that has just started may have none yet
    total["control"] = _sum(controls)
    if "rounds_by_plan" in total["control"]:
        rounds: Counter[str] = Counter()
        for control in controls:
            rounds.update(control.get("rounds_by_plan", {}))
        total["control"]["rounds_by_plan"] = dict(rounds.most_common())
    return total


def counts_of(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The counters and histograms of an Engine's stats, without what is so at the moment."""
    return {name: stats[name] for name in _COUNTS if name in stats}


def sum_counts(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of several engines as one; {} has none."""
    named = {name: [one[name] for one in each if name in one] for name in _COUNTS}
    return {name: _sum_of_one(name, values) for name, values in named.items() if values}


def _sum_of_one(name: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [sum(counts) for counts in zip_longest(*values, fillvalue=0)]
    if BY_NAME[name].label:
        return _sum(values)
    return add_histograms(values) if isinstance(values[0], dict) else sum(values)


def sum_memory(each: Sequence[Mapping[str, int]], *, shares_weights: bool) -> dict[str, int]:
    """As LLM.memory(); weights that all share are counted once."""
    total = _sum(each)
    return total | {name: each[0][name] for name in _SHARED & total.keys() if shares_weights}


def _sum(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers are summed; all else is that of the first one that has it."""
    found = {}
    for name in dict.fromkeys(name for one in each for name in one):
        first, *others = [one[name] for one in each if name in one]
        if isinstance(first, int | float):
            first += sum(value for value in others if isinstance(value, int | float))
        found[name] = first
    return found
