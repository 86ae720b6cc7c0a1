"""One LLM with one engine, and one with two workers, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hispec import LLM
from tests.workers.support import SMALL


@pytest.fixture(scope="session")
def one(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), workers=2, **SMALL) as llm:
        yield llm
