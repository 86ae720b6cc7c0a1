"""Where HiSpec keeps its files, and how a file is written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def cache_dir() -> Path:
    """$HISPEC_CACHE, else $XDG_CACHE_HOME/hispec, else ~/.cache/hispec. An empty variable counts as unset."""
    if own := os.environ.get("HISPEC_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "hispec"
    return Path.home() / ".cache" / "hispec"


def write_atomically(path: Path, content: bytes) -> None:
    """Puts `content` at `path`, or leaves what was there. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()
