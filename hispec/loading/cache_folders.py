"""Folders of the cache, which are there whole or not at all: made beside their place, then renamed to it."""

from __future__ import annotations

import os
import shutil
from glob import escape
from pathlib import Path


def temp_prefix(final: Path) -> str:
    """How the names of temporary folders begin in which `final` is made, beside it."""
    return f".{final.name}.tmp-"


def stale_folders(final: Path) -> list[Path]:
    """Temporary folders of `final`. With its lock held none is in use: killed runs left them."""
    return list(final.parent.glob(f"{escape(temp_prefix(final))}*"))


def remove_stale(final: Path) -> None:
    """Removes what killed runs left. Only to be called with the lock of `final` held."""
    for stale in stale_folders(final):
        shutil.rmtree(stale, ignore_errors=True)


def publish(folder: Path, final: Path, work: Path) -> None:
    """Renames `folder` to `final`, in place of what may be there, which is put into the temporary folder
    `work`; or put back, if that fails."""
    replaced = work / "replaced"
    if final.exists():
        os.replace(final, replaced)
    try:
        os.replace(folder, final)
    except BaseException:
        if replaced.exists():
            os.replace(replaced, final)
        raise
