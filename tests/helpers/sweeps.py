"""Sweeps of which `make test` takes a part, and `make test-slow` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(
    names: str, values: Iterable[Any], quick: Callable[[Any], bool], **options: Any
) -> pytest.MarkDecorator:
    """As pytest.mark.parametrize; values that are not `quick` have the marker `slow`. With several names a
    value is a tuple of as many."""
    several = "," in names
    cases = []
    for value in values:
        marks = () if quick(value) else (pytest.mark.slow,)
        cases.append(pytest.param(*(value if several else (value,)), marks=marks))
    assert any(not case.marks for case in cases), "make test would run none of them"
    return pytest.mark.parametrize(names, cases, **options)
