"""scripts/try_wheel.py: an environment that the user has somewhere, even within the checkout."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def try_wheel() -> ModuleType:
    spec = importlib.util.spec_from_file_location("try_wheel", ROOT / "scripts" / "try_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_relative_folder_is_meant_from_where_the_command_was_typed(
    try_wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def environment(folder: Path, python: str) -> Path:
        made.append(folder)
        sys.exit(0)

    monkeypatch.setattr(try_wheel, "environment", environment)
    monkeypatch.setattr(sys, "argv", ["try_wheel.py", "--environment", "mine"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        try_wheel.main()
    assert made == [tmp_path.resolve() / "mine"]


def test_an_environment_within_the_checkout_does_not_get_into_the_wheel(
    try_wheel: ModuleType, tmp_path: Path
) -> None:
    checkout, copy = tmp_path.resolve() / "checkout", tmp_path / "copy"
    kept = [checkout / "setup.py", checkout / "hispec" / "mine" / "a.py"]
    environment = checkout / "mine"
    for path in (*kept, environment / "b.py", checkout / "build" / "c.py", checkout / ".git" / "d"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    shutil.copytree(checkout, copy, ignore=try_wheel.left_out(environment))
    files = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    assert files == {path.relative_to(checkout) for path in kept}
