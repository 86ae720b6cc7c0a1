"""EE packages: made into checkpoints once, and found again by what they hold."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ee_models
from ee_models.checkpoint.ee_package import INFO as PACKAGE_INFO
from ee_models.checkpoint.ee_package import EEPackage, PackageError, holds_package
from ee_models.checkpoint.exit_files import INFO as EXITS_INFO
from ee_models.checkpoint.exit_files import TENSORS as EXITS_TENSORS
from ee_models.checkpoint.exit_files import ExitsFile
from ee_models.checkpoint.loader import CheckpointError, open_checkpoint
from ee_models.checkpoint.ngram_file import INFO as NGRAMS_INFO
from ee_models.checkpoint.ngram_file import TENSORS as NGRAMS_TENSORS

from ..utils.files import cache_dir
from .cache_folders import make_once

PRETRAINED = Path(ee_models.__file__).parent / "pretrained"  # exits and packages that come with HiSpec
_EXITS, _NGRAMS = (EXITS_INFO, EXITS_TENSORS), (NGRAMS_INFO, NGRAMS_TENSORS)


def packages() -> dict[str, Path]:
    """The packages that come with HiSpec, by the names that models are called by."""
    return {folder.name: folder for folder in sorted(PRETRAINED.iterdir()) if holds_package(folder)}


def shipped_files() -> Iterator[ExitsFile]:
    """The exits that come with HiSpec, of packages too, each read when it is asked for. Raises ExitsError."""
    return (ExitsFile(info.parent) for info in sorted(PRETRAINED.glob(f"*/{EXITS_INFO}")))


def package_checkpoint(folder: Path, resolve: Callable[[str], str], *, force: bool = False) -> Path:
    """The checkpoint that the package in `folder` makes of its base model, with n-grams where there are any
    for it (its own, or `_borrowed_ngrams`); made at first use, then reused. It is made anew with `force`, and
    where it cannot be opened or lacks such files.

    resolve: finds the base model by the name that the package calls it. Raises PackageError, also for a base
    that is not to be had.
    """
    package = EEPackage(folder)
    own = [names for names in (_EXITS, _NGRAMS) if (folder / names[0]).exists()]
    borrowed = _borrowed_ngrams(package)
    carried = [*(folder / name for names in own for name in names), *borrowed]
    described = [*sorted(folder.glob("*.json")), *borrowed[:1]]
    content = b"".join(file.read_bytes() for file in described)
    made = cache_dir() / "models" / f"{folder.name}-{hashlib.sha256(content).hexdigest()[:12]}"

    def begin() -> Callable[[Path], Path]:
        name = package.about.base_model.name
        try:
            base = open_checkpoint(resolve(name))
        except CheckpointError as error:
            raise PackageError(
                f"{folder} is what changed of {name}, which is not to be had here: {error}; where that is a"
                f" folder's name, write where it is now into {PACKAGE_INFO}, base_model.name"
            ) from error

        def make(work: Path) -> Path:
            print(f"{folder.name}: making a checkpoint of it and {base.path}, once", file=sys.stderr)
            draft = work / "model"
            draft.mkdir()
            package.make_checkpoint(base, draft)
            for file in borrowed:
                shutil.copyfile(file, draft / file.name)
            return draft

        return make

    try:
        make_once(made, lambda: _is_whole(made, carried), begin, force=force)
    except OSError as error:
        free = shutil.disk_usage(cache_dir()).free if cache_dir().exists() else 0
        raise PackageError(
            f"cannot make the checkpoint of {folder} in {made.parent}: {error} ({free / 1e9:.1f} GB free);"
            " free some space, or set HISPEC_CACHE to a folder elsewhere"
        ) from error
    return made


def _borrowed_ngrams(package: EEPackage) -> list[Path]:
    """The files of n-grams that come with HiSpec for the base of a model that has none of its own, and was
    trained to stay what its base was: it says nearly the same. None where there are none."""
    if (package.folder / NGRAMS_INFO).exists() or package.about.recipe.get("target") != "self":
        return []
    of_base = package.about.base_model.fingerprint
    shipped = (file.folder for file in shipped_files() if file.about.base_model.fingerprint == of_base)
    found = ([folder / name for name in _NGRAMS] for folder in shipped)
    return next((files for files in found if all(file.is_file() for file in files)), [])


def _is_whole(made: Path, carried: Sequence[Path]) -> bool:
    """Whether `made` can be opened, and has the files that are `carried` into it."""
    try:
        open_checkpoint(made)
        return all((made / file.name).stat().st_size == file.stat().st_size for file in carried)
    except (CheckpointError, OSError):
        return False
