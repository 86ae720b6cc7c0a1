"""What all tests have: one tiny random checkpoint, its decoder, transformers' own model of it, and what
stands in for a GPU's kernels."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec.decoding import drafter
from hispec.drafters.lookup_torch import TensorLookup
from hispec.sampling import noise
from tests.helpers.adapter_engines import checkpoint, engine_of, expected, files  # noqa: F401 - fixtures
from tests.helpers.interpreter import adapt_interpreter
from tests.helpers.recorded_graphs import recordable
from tests.helpers.tiny import tiny_checkpoint, tiny_model


def pytest_collection_finish() -> None:
    """What collecting has made stays: to look for garbage in it took a twentieth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def broken_invariants() -> Iterator[None]:
    """What scripted decoders and exits of tests find broken within a drafter ends the test, as an invariant
    of ours does, and is no failure of the drafter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "OUR_PACKAGES", (*drafter.OUR_PACKAGES, "tests"))
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", tokenizer=True)


@pytest.fixture(scope="session")
def tiny_decoder(tiny_path: Path) -> Decoder:
    return Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def tiny_reference() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def torch_decoder(tiny_path: Path) -> Decoder:
    return recordable(Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu")))


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that run Triton's interpreter, and compare bits of it."""
    adapt_interpreter(monkeypatch)


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would run, since a recorder does not see what numba does."""

    def draw(logits: Tensor, key: Tensor) -> Tensor:
        return (logits + noise.gumbel(key, logits.shape[-1])).argmax(-1)

    for module in ("hispec.sampling.sampler", "hispec.decoding.acceptance"):
        monkeypatch.setattr(f"{module}.draw", draw)
    monkeypatch.setattr("hispec.sampling.confidence.runs_numba", lambda device: False)
    monkeypatch.setattr(
        "hispec.drafters.ngram.make_lookup", lambda device, *sizes: TensorLookup(device, *sizes)
    )
