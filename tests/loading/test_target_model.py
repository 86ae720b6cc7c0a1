"""What is no model: a wrong type, a typo of a known name, nothing at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ee_models.errors import CheckpointError
from hispec import LLM, ConfigError
from hispec.loading.known_models import ModelNotFetchedError, nearest_known
from hispec.loading.target_model import open_model


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the hub nor anything downloaded before."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))


@pytest.mark.parametrize("model", [None, 5, "", b"smollm2", ["smollm2"], Path])
def test_what_is_no_name_or_path_is_refused(model: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^model=.*: give a name that `hispec fetch` knows \(smollm2\), a hub id"
    ):
        LLM(model)


@pytest.mark.parametrize("model", ["smolm2", "SmolLM2", "./smollm2", Path("smollm2")])
def test_a_typo_of_a_known_name_gets_that_name(model: str | Path) -> None:
    with pytest.raises(CheckpointError, match=r"`hispec fetch` knows: smollm2 \(did you mean 'smollm2'\?\)$"):
        open_model(model)


def test_an_unknown_name_gets_the_known_ones_and_no_guess(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot load model 'gpt2': .* knows: smollm2$"):
        open_model("gpt2")
    for there in (tmp_path, tmp_path / "notes.txt"):
        (tmp_path / "notes.txt").touch()
        with pytest.raises(CheckpointError) as caught:
            open_model(there)
        assert "hispec fetch" not in str(caught.value)
    with pytest.raises(ModelNotFetchedError, match="run `hispec fetch smollm2` once"):
        open_model("smollm2")


@pytest.mark.parametrize("name", ["SmolLM2", "smollm", "HuggingFaceTB/SmolLM2-135M-Instruct", "./smollm2/"])
def test_another_spelling_gets_the_known_name(name: str) -> None:
    assert nearest_known(name) == " (did you mean 'smollm2'?)"


def test_a_name_like_no_other_gets_no_guess() -> None:
    assert [nearest_known(name) for name in ("gpt2", "llama", "mistralai/Mistral-7B-v0.1")] == ["", "", ""]
