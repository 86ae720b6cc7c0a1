"""Means that stray values do not move."""

from __future__ import annotations

import statistics

import pytest

from hispec.utils.means import trimmed_mean


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([5.0], 5.0),
        ([4.0, 6.0], 5.0),
        ([9.0, 1.0, 2.0], 2.0),
        ([1.0, 2.0, 4.0, 90.0], 3.0),
        ([*[4.0] * 20, *[6.0] * 20, 1000.0, 0.0], 5.0),
    ],
)
def test_what_is_left_is_averaged(values: list[float], mean: float) -> None:
    assert trimmed_mean(values) == pytest.approx(mean)


def test_without_values_there_is_no_mean() -> None:
    with pytest.raises(statistics.StatisticsError):
        trimmed_mean([])
