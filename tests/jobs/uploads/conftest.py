"""No model is loaded, and nothing is kept between tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hispec.jobs import uris
from tests.helpers.job_support import install_fake_llm


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    install_fake_llm(monkeypatch)
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    yield
    uris.fetch.cache_clear()
