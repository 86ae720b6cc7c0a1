"""Loads what all tests have (`fixtures`), where tests run."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes the first runs no test, and the others wait for it: it does without torch, whose
    import takes seconds."""
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return
    import torch

    if not torch.cuda.is_available():
        # Triton's kernels run on the CPU by its interpreter, if it is told so before anybody declares one.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    config.pluginmanager.import_plugin("tests.fixtures")
