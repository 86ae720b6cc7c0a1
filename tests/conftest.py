"""Models shared by the tests: one tiny random checkpoint, its decoder, and transformers' own model of it."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from tests.helpers.adapter_engines import checkpoint, engine_of, expected, files  # noqa: F401 - fixtures
from tests.helpers.tiny import tiny_checkpoint, tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", tokenizer=True)


@pytest.fixture(scope="session")
def tiny_decoder(tiny_path: Path) -> Decoder:
    return Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def tiny_reference() -> PreTrainedModel:
    return tiny_model()
