"""Checkpoints that EE packages make: once, whole, again by force or where something is missing, and without
leftovers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from ee_models.checkpoint.ee_package import EEPackage, save_package
from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.checkpoint.low_rank import LowRank
from hispec.loading import ee_packages
from hispec.loading.cache_folders import temp_prefix
from hispec.loading.ee_packages import PackageError, package_checkpoint
from hispec.loading.fetch import fetch
from hispec.loading.known_models import resolve_model
from tests.helpers.adapters import make_exits
from tests.helpers.tiny import tiny_checkpoint

CHANGED = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base") / "model", num_layers=2, hidden=16, vocab=260)


@pytest.fixture(scope="module")
def package(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package in a folder of packages, with an exit."""
    folder = tmp_path_factory.mktemp("packages") / "tiny-maths"
    folder.mkdir()
    change = {CHANGED: LowRank(torch.ones(2, 16), torch.ones(16, 2), 0.5)}
    about: dict[str, Any] = {"recipe": {}, "data": {}, "held_out": {"loss": 1.0}}
    made = save_package(folder, str(base), open_checkpoint(base), change, **about)
    whole = made.make_checkpoint(open_checkpoint(base), tmp_path_factory.mktemp("made"))
    exits = make_exits(
        tmp_path_factory.mktemp("exits") / "e", whole, [ExitInfo(layer=1, intermediate_size=32)]
    )
    for file in exits.folder.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder of models."""
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def as_it_is(name: str) -> str:
    return name


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def leftovers(made: Path) -> list[str]:
    """What lies beside a checkpoint, besides its lock."""
    return [path.name for path in made.parent.iterdir() if path.name not in (made.name, f".{made.name}.lock")]


def test_a_whole_checkpoint_is_reused(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = package_checkpoint(package, as_it_is)
    (made / "kept").touch()
    capsys.readouterr()
    assert package_checkpoint(package, lambda name: pytest.fail("the base is not needed")) == made
    assert (made / "kept").exists() and capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "exits.json", "exits.safetensors"])
@pytest.mark.parametrize("damage", [Path.unlink, cut], ids=["gone", "cut"])
def test_a_damaged_checkpoint_is_made_anew(
    package: Path, name: str, damage: Callable[[Path], object]
) -> None:
    made = package_checkpoint(package, as_it_is)
    right = (made / name).read_bytes()
    damage(made / name)
    (made / "old").touch()
    assert package_checkpoint(package, as_it_is) == made
    assert (made / name).read_bytes() == right and not (made / "old").exists()
    assert leftovers(made) == []


@pytest.mark.parametrize(
    ("target", "has_own", "expected"),
    [("self", False, "base"), ("self", True, "own"), ("labels", False, None), ("labels", True, "own")],
)
def test_a_model_that_stayed_what_it_was_guesses_from_its_bases_ngrams(
    base: Path,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    has_own: bool,
    expected: str | None,
) -> None:
    """It says nearly the same; what was trained on labels has n-grams of its own, or none."""
    shipped, folder = tmp_path / "shipped", tmp_path / "tiny-ee"
    monkeypatch.setattr(ee_packages, "PRETRAINED", shipped)
    make_exits(
        shipped / "another", open_checkpoint(package_checkpoint(package, as_it_is)), [ExitInfo(layer=1)]
    )
    make_exits(shipped / "tiny", open_checkpoint(base), [ExitInfo(layer=1)])
    shutil.copytree(package, folder)
    about = json.loads((folder / "ee.json").read_text())
    (folder / "ee.json").write_text(json.dumps(about | {"recipe": {"target": target}}))
    without = package_checkpoint(folder, as_it_is)
    for where in (shipped / "another", shipped / "tiny", *([folder] if has_own else [])):
        for name in ("ngrams.json", "ngrams.safetensors"):
            (where / name).write_text({"tiny": "base", "tiny-ee": "own"}.get(where.name, "of another model"))
    made = package_checkpoint(folder, as_it_is)
    found = made / "ngrams.safetensors"
    assert (found.read_text() if found.exists() else None) == expected
    assert (made == without) == (expected is None), "n-grams that come later are taken, too"
    if expected is not None:
        found.unlink()
        assert package_checkpoint(folder, as_it_is) == made and found.read_text() == expected


@pytest.mark.parametrize(
    ("a", "b"),
    [((2, 16), (16, 3)), ((2, 9), (16, 2)), ((2, 16), (16,)), ((16,), (16, 2))],
    ids=["ranks", "inputs", "no matrix", "no matrix either"],
)
def test_changes_that_do_not_fit_are_refused(
    base: Path, tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    about: dict[str, Any] = {"recipe": {}, "data": {}, "held_out": {"loss": 1.0}}
    change = {CHANGED: LowRank(torch.ones(a), torch.ones(b), 0.5)}
    (tmp_path / "package").mkdir()
    made = save_package(tmp_path / "package", str(base), open_checkpoint(base), change, **about)
    with pytest.raises(PackageError, match=rf"{CHANGED}.a .* do not make a change of \[16, 16\]"):
        package_checkpoint(made.folder, as_it_is)


def test_a_scale_that_is_no_number_is_refused(package: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(package, tmp_path / "copy"))
    about = folder / "ee.json"
    about.write_text(about.read_text().replace('"scale": 0.5', '"scale": NaN'))
    with pytest.raises(PackageError, match=r"scale: .*finite"):
        package_checkpoint(folder, as_it_is)


def test_force_makes_it_anew(package: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the name of the package, as `hispec fetch NAME --force` does."""
    monkeypatch.setattr(ee_packages, "PRETRAINED", package.parent)
    made = fetch("tiny-maths", progress=False)
    assert made.parent == models
    (made / "old").touch()
    assert fetch("tiny-maths", progress=False) == made and (made / "old").exists()
    assert fetch("tiny-maths", force=True, progress=False) == made and not (made / "old").exists()
    assert open_checkpoint(made).has(CHANGED) and leftovers(made) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_stays_if_it_cannot_be_made_anew(
    package: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    made = package_checkpoint(package, as_it_is)
    (made / "old").touch()

    def failing(self: EEPackage, base: Any, folder: Path) -> None:
        (folder / "config.json").touch()
        raise error

    monkeypatch.setattr(EEPackage, "make_checkpoint", failing)
    with pytest.raises((PackageError, KeyboardInterrupt)):
        package_checkpoint(package, as_it_is, force=True)
    assert (made / "old").exists() and leftovers(made) == []
    assert package_checkpoint(package, as_it_is) == made


@pytest.mark.parametrize("is_made", [False, True])
def test_temporary_folders_of_killed_runs_are_removed(package: Path, is_made: bool) -> None:
    made = package_checkpoint(package, as_it_is)
    if not is_made:
        shutil.rmtree(made)
    stale = made.parent / f"{temp_prefix(made)}killed"
    (stale / "model").mkdir(parents=True)
    with FileLock(made.with_name(f".{made.name}.lock")):
        if is_made:  # another process is at work, whose folder it may be
            package_checkpoint(package, as_it_is)
            assert stale.exists()
    package_checkpoint(package, as_it_is)
    assert leftovers(made) == []


def test_packages_that_lead_to_themselves_are_refused(package: Path, tmp_path: Path, models: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, other in zip(folders, reversed(folders), strict=True):
        shutil.copytree(package, folder)
        info = json.loads((folder / "ee.json").read_text())
        info["base_model"]["name"] = str(other)
        (folder / "ee.json").write_text(json.dumps(info))
    with pytest.raises(PackageError, match=r"one belongs to itself, by its ee\.json"):
        resolve_model(str(folders[0]))
