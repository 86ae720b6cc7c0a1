"""Folders of the cache, which are there whole or not at all: made beside their place, under a lock, then
renamed to it. So a temporary folder that is found while the lock is held was left by a killed run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path

from filelock import FileLock, Timeout

from ee_models.checkpoint.described import sync_files


def make_once(
    final: Path,
    is_whole: Callable[[], bool],
    begin: Callable[[], Callable[[Path], Path]],
    *,
    force: bool = False,
    waits: Callable[[], None] = lambda: None,
) -> bool:
    """Makes the folder `final`, unless what is there is whole; in place of that, if `force` -> whether it was
    made, and not there already. What fails, or is interrupted, leaves what was there.

    begin: called, before the lock is taken, if there may be something to make -> what is then given a
    temporary folder on the same file system, in which it makes, somewhere, the folder that it returns. waits:
    called if another process holds the lock. Raises OSError, also where the cache may not be written.
    """
    lock = FileLock(final.with_name(f".{final.name}.lock"))
    if not force and is_whole():
        if _stale(final):  # of a killed run that would have replaced it
            with (
                suppress(Timeout, OSError),
                lock.acquire(timeout=0),
            ):  # a busy or read-only cache keeps it for now
                _remove_stale(final)
        return False
    make = begin()
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waits()
        lock.acquire()
    try:  # the system releases a lock when its process dies
        _remove_stale(final)
        if not force and is_whole():  # another process was faster
            return False
        with tempfile.TemporaryDirectory(
            prefix=temp_prefix(final), dir=final.parent, ignore_cleanup_errors=True
        ) as work:
            _publish(make(Path(work)), final, Path(work))
        return True
    finally:
        lock.release()


def temp_prefix(final: Path) -> str:
    """How the names of temporary folders begin in which `final` is made, beside it."""
    return f".{final.name}.tmp-"


def _stale(final: Path) -> list[Path]:
    return list(final.parent.glob(f"{escape(temp_prefix(final))}*"))


def _remove_stale(final: Path) -> None:
    for stale in _stale(final):
        shutil.rmtree(stale, ignore_errors=True)


def _publish(folder: Path, final: Path, work: Path) -> None:
    """Renames `folder` to `final`, in place of what may be there, which is put into the temporary folder
    `work`; or put back, if that fails."""
    replaced = work / "replaced"
    sync_files(folder)
    try:
        if final.exists():
            os.replace(final, replaced)
        os.replace(folder, final)
    except BaseException:
        if replaced.exists() and not final.exists():
            os.replace(replaced, final)
        raise
