"""Sweeps of which `make test` takes a part, and `make test-slow` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(
    names: str, values: Iterable[Any], quick: Callable[[Any], bool] | int, **options: Any
) -> pytest.MarkDecorator:
    """As pytest.mark.parametrize; values that are not `quick` have the marker `slow`: a number n is for each
    n-th. With several names a value is a tuple of as many."""
    several = "," in names
    cases = []
    for number, value in enumerate(values):
        is_quick = number % quick == 0 if isinstance(quick, int) else quick(value)
        marks = () if is_quick else (pytest.mark.slow,)
        cases.append(pytest.param(*(value if several else (value,)), marks=marks))
    assert any(not case.marks for case in cases), "make test would run none of them"
    return pytest.mark.parametrize(names, cases, **options)
