"""Quantiles of a sample: exact of few values, close of many, in memory that does not grow."""

from __future__ import annotations

import pytest

from hispec.metrics.sample import Sample


def test_few_values_have_exact_quantiles() -> None:
    sample = Sample()
    assert not sample
    for value in (3.0, 1.0, 2.0):
        sample.add(value)
    assert sample.quantiles(0.0, 0.5, 1.0) == [1.0, 2.0, 3.0] and len(sample) == 3


def test_of_many_values_an_even_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hispec.metrics.sample._MOST", 1000)
    sample = Sample()
    for value in range(100_000):  # in order: the last of them are as likely to be kept as the first
        sample.add(float(value))
    assert len(sample._kept) == 1000 and len(sample) == 100_000
    for share in (0.1, 0.5, 0.9):
        assert sample.quantiles(share)[0] == pytest.approx(share * 1e5, abs=6e3)  # 4 standard errors at most
