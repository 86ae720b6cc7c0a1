"""Files that are written whole, or not at all."""
from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Puts `content` at `path`, or leaves what was there. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()
