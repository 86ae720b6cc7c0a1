"""EE packages: made into checkpoints once, and found again by what they hold."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

import ee_models
from ee_models.checkpoint.ee_package import EEPackage, PackageError, holds_package
from ee_models.checkpoint.loader import open_checkpoint

from ..utils.files import cache_dir

PRETRAINED = Path(ee_models.__file__).parent / "pretrained"  # exits and packages that come with HiSpec


def packages() -> dict[str, Path]:
    """The packages that come with HiSpec, by the names that models are called by."""
    return {folder.name: folder for folder in sorted(PRETRAINED.iterdir()) if holds_package(folder)}


def package_checkpoint(folder: Path, resolve: Callable[[str], str]) -> Path:
    """The checkpoint that the package in `folder` makes of its base model; made at first use, then reused.

    resolve: finds the base model by the name that the package calls it. Raises PackageError, and what
    `resolve` raises.
    """
    package = EEPackage(folder)
    content = b"".join(file.read_bytes() for file in sorted(folder.glob("*.json")))
    made = cache_dir() / "models" / f"{folder.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    if (made / "config.json").exists():
        return made
    base = open_checkpoint(resolve(package.about.base_model.name))
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(made.with_name(f".{made.name}.lock")):
            if not made.exists():  # or another process was faster
                print(f"{folder.name}: making a checkpoint of it and {base.path}, once", file=sys.stderr)
                with tempfile.TemporaryDirectory(prefix=f".{made.name}.", dir=made.parent) as work:
                    draft = Path(work) / "model"
                    draft.mkdir()
                    package.make_checkpoint(base, draft)
                    os.replace(draft, made)
    except OSError as error:
        free = shutil.disk_usage(cache_dir()).free if cache_dir().exists() else 0
        raise PackageError(
            f"cannot make the checkpoint of {folder} in {made.parent}: {error} ({free / 1e9:.1f} GB free);"
            " free some space, or set HISPEC_CACHE to a folder elsewhere"
        ) from error
    return made
