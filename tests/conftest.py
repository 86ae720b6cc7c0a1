"""Loads the fixtures that all tests have (`fixtures`), where tests run."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes the first runs no test, and the others wait for it: it does without torch, whose
    import takes seconds."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")
