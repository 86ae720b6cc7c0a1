"""Where a checkpoint comes from: folders of shards, the hub, and what is turned away at the door."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ee_models.checkpoint.loader import CheckpointError, UnsupportedModelError, open_checkpoint
from tests.helpers.tiny import tiny_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "sharded", num_layers=2, max_shard_size="50KB")


def move_tensor(folder: Path, name: str, file: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"the shard '{shard.name}' that {INDEX} names is missing"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "a/../../b.safetensors",
        "..\\b.safetensors",
        "C:\\b.safetensors",
        "weights.bin",
        3,
        None,
    ],
)
def test_an_index_reaches_no_file_outside_its_folder(sharded: Path, file: object) -> None:
    move_tensor(sharded, "model.norm.weight", file)
    with pytest.raises(
        CheckpointError,
        match=r"places 'model.norm.weight' in .*only .safetensors files within the model's folder",
    ):
        open_checkpoint(sharded)


def test_a_shard_without_its_tensor_is_refused(sharded: Path) -> None:
    shards = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    move_tensor(
        sharded, "model.norm.weight", next(name for name in shards if name != weight_map["model.norm.weight"])
    )
    with pytest.raises(CheckpointError, match=r"places 'model.norm.weight' .*which does not hold it"):
        open_checkpoint(sharded)


def test_shards_may_be_links_out_of_the_folder(sharded: Path, tmp_path: Path) -> None:
    """The hub's cache is made of these."""
    for shard in sharded.glob("model-*.safetensors"):
        shard.symlink_to(shard.rename(tmp_path / f"blob-{shard.stem}"))
    assert open_checkpoint(sharded).tensor("model.norm.weight").shape == (48,)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_an_index_without_a_map_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=f"{INDEX} has no weight_map"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_read(tmp_path: Path, pickle: str) -> None:
    folder = tiny_checkpoint(tmp_path, num_layers=1)
    (folder / "model.safetensors").rename(folder / pickle)
    with pytest.raises(
        CheckpointError, match=f"pickles \\({pickle}\\), which can run code .*save_pretrained"
    ):
        open_checkpoint(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no model.safetensors, .*nor weights of any other kind"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(
        CheckpointError, match=r"has no model.safetensors, .*it holds adapter_model.safetensors"
    ):
        open_checkpoint(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_layers=1)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        open_checkpoint(folder)


def test_a_weights_file_is_no_model(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_layers=1)
    with pytest.raises(CheckpointError, match=r"model.safetensors is no .gguf file; give the folder"):
        open_checkpoint(folder / "model.safetensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub of one repository, and the downloads asked of it."""
    folder = tiny_checkpoint(tmp_path / "snapshot", num_layers=1)
    asked: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append({"repo_id": repo_id, **options})
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_hub_id_is_fetched_without_pickles_and_config_first(hub: list[dict[str, Any]]) -> None:
    checkpoint = open_checkpoint("owner/name", revision="v1")
    assert checkpoint.config.num_layers == 1
    assert [call["repo_id"] for call in hub] == ["owner/name"] * 2
    assert {call["revision"] for call in hub} == {"v1"}
    first, second = (call["allow_patterns"] for call in hub)
    assert not any("safetensors" in pattern for pattern in first)
    assert "*.safetensors" in second
    assert not any(suffix in pattern for pattern in second for suffix in (".bin", ".pt", "*.*", ".py"))


def test_an_unsupported_hub_model_is_refused_before_its_weights_are_fetched(
    hub: list[dict[str, Any]], tmp_path: Path
) -> None:
    config = tmp_path / "snapshot" / "config.json"
    config.write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    with pytest.raises(
        UnsupportedModelError, match="cannot load model 'owner/name': architectures is 'MambaForCausalLM'"
    ):
        open_checkpoint("owner/name")
    assert len(hub) == 1


def test_a_local_folder_goes_before_the_hub(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "owner" / "name", num_layers=1, dtype=torch.bfloat16)
    assert open_checkpoint("owner/name").dtype == torch.bfloat16
    assert not hub
    with pytest.raises(CheckpointError, match="revision 'v1' has no meaning for a local path"):
        open_checkpoint("owner/name", revision="v1")


@pytest.mark.parametrize(
    "model",
    [
        "./model",
        "~/no/such",
        "/no/such",
        "a/b/c",
        "model.gguf",
        "owner/model.safetensors",
        "..",
        "a\\b",
        Path("owner/name"),
        "",
    ],
)
def test_a_path_that_is_not_there_is_never_sent_to_the_hub(
    hub: list[dict[str, Any]], model: str | Path
) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(model)
    assert not hub


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("gated", response=RESPONSE), "its licence to be accepted"),
        (
            RepositoryNotFoundError("none", response=RESPONSE),
            "no such local path, and the hub has no such repository open to you; mind the spelling",
        ),
        (RevisionNotFoundError("none", response=RESPONSE), "has no revision 'v1'; name one of its branches"),
        (LocalEntryNotFoundError("offline"), "not in the download cache, and the hub cannot be reached"),
        (OSError("disk full"), "download from the hub failed: OSError: disk full"),
    ],
)
def test_a_failed_download_says_why(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=f"cannot load model 'owner/name': .*{message}"):
        open_checkpoint("owner/name", revision="v1")
