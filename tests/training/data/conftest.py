"""A tiny model with its tokenizer, and what forbids to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import hispec.llm
from ee_models.checkpoint.loader import load_tokenizer, open_checkpoint
from tests.helpers.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("data") / "model", num_layers=3, tokenizer=True)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(open_checkpoint(model))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded, although there is nothing for it to write")

    monkeypatch.setattr(hispec.llm.LLM, "__init__", load)
