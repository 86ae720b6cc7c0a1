"""The model that runs of the command train exits for, and one such run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny import tiny_checkpoint
from tests.helpers.training_command import train, write_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("train") / "model", num_layers=6, tokenizer=True)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HISPEC_DEBUG", raising=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("trained")
    assert train(write_config(folder, model)) == 0
    return folder / "out"
