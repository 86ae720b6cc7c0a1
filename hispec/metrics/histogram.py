"""Histograms with fixed buckets, which can be added up over workers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from .table import BY_NAME


class Histogram:
    """Of one metric of the table.

    counts   by bucket: values above the bound before and up to the bucket's own; the last bucket has those
             above all bounds
    sum      of the values
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, name: str) -> None:
        self._bounds = BY_NAME[name].bounds
        self.counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value so many times, at the price of one."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def as_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "sum": self.sum}


def add_histograms(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Histograms of one metric, as `as_dict` gives them, as one."""
    counts = [sum(column) for column in zip(*(one["counts"] for one in each), strict=True)]
    return {"counts": counts, "sum": sum(one["sum"] for one in each)}


def mean(histogram: Mapping[str, Any]) -> float | None:
    """Exact; None for no values."""
    count = sum(histogram["counts"])
    return histogram["sum"] / count if count else None


def length_histogram(counts: Sequence[int]) -> dict[str, Any]:
    """accept_length_histogram, [i] = rounds of a row that committed i tokens, in buckets."""
    histogram = Histogram("accept_length_histogram")
    for length, count in enumerate(counts):
        histogram.observe(length, count)
    return histogram.as_dict()
