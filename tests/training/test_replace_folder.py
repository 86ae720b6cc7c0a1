"""A folder that is replaced is there whole, whatever ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ee_models.errors import TrainingError
from ee_models.training.trunk import replace_folder


def write(folder: Path) -> None:
    (folder / "config.json").write_text("new")


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_what_a_killed_process_left_does_not_mix_with_what_is_written(tmp_path: Path) -> None:
    """Whatever its number was, which in a container may come again."""
    for name in ("draft", "former"):
        (tmp_path / f".model.{name}").mkdir()
        (tmp_path / f".model.{name}" / "stale").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("old")
    replace_folder(tmp_path / "model", "checkpoint", "config.json", write)
    assert names(tmp_path) == ["model", "model/config.json"]
    assert (tmp_path / "model" / "config.json").read_text() == "new"


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / ".model.former").mkdir()
    (tmp_path / ".model.former" / "config.json").write_text("old")

    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(TrainingError, match="No space left"):
        replace_folder(tmp_path / "model", "checkpoint", "config.json", fail)
    assert names(tmp_path) == ["model", "model/config.json"]
    assert (tmp_path / "model" / "config.json").read_text() == "old"
