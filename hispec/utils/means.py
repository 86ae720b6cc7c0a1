"""A mean that a few stray values do not move."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

_CUT = 0.05  # of the values at each end


def trimmed_mean(values: Iterable[float]) -> float:
    """The mean of all but the largest and the smallest twentieth, of three or more values one at each end. Of
    times it says what many calls take together: a median says nothing of how often a machine is slow. Raises
    ValueError without values."""
    ordered = sorted(values)
    cut = max(int(_CUT * len(ordered)), 1 if len(ordered) > 2 else 0)
    return statistics.fmean(ordered[cut : len(ordered) - cut])
