"""Counts and sizes of all workers as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..metrics.histogram import add_histograms
from ..metrics.table import METRICS

_SHARED = {"weights_bytes", "draft_model_bytes"}


def sum_stats(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """As Engine.stats(), of all: counts, seconds and what is held are summed; what a controller has decided
    and estimates is the first one's."""
    total = _sum(each)
    total["num_layers"] = each[0]["num_layers"]
    histograms = [one["accept_length_histogram"] for one in each]
    total["accept_length_histogram"] = [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]
    for metric in METRICS:
        if metric.name in total and metric.label:
            total[metric.name] = _sum([one[metric.name] for one in each])
        elif isinstance(total.get(metric.name), dict):
            total[metric.name] = add_histograms([one[metric.name] for one in each])
    total["control"] = _sum([one["control"] for one in each])
    if "rounds_by_plan" in total["control"]:
        rounds: Counter[str] = Counter()
        for one in each:
            rounds.update(one["control"]["rounds_by_plan"])
        total["control"]["rounds_by_plan"] = dict(rounds.most_common())
    return total


def sum_memory(each: Sequence[Mapping[str, int]], *, shares_weights: bool) -> dict[str, int]:
    """As LLM.memory(); weights that all share are counted once."""
    total = _sum(each)
    return total | {name: each[0][name] for name in _SHARED & total.keys() if shares_weights}


def _sum(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers are summed; all else is the first one's."""
    return {
        name: sum(one[name] for one in each) if isinstance(value, int | float) else value
        for name, value in each[0].items()
    }
