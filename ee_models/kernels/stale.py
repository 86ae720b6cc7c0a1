"""Drops compiled kernels that are older than any source of the packages, when it is imported.

numba's cache asks whether the file that a function stands in has changed, not whether those have that it
calls or whose arrays it reads. After an upgrade, which leaves compiled files where they are, such a kernel
would take memory for what it no longer is.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PACKAGES = ("hispec", "ee_models", "cache")


def drop_stale(root: Path) -> None:
    """Deletes the cache's indices of PACKAGES in `root` that are older than the newest source there; where
    nothing may be written, nothing is."""
    packages = [root / name for name in PACKAGES if (root / name).is_dir()]
    with suppress(OSError):
        newest = max(path.stat().st_mtime for package in packages for path in package.rglob("*.py"))
        for package in packages:
            for index in package.rglob("__pycache__/*.nbi"):
                if index.stat().st_mtime < newest:
                    index.unlink(missing_ok=True)


drop_stale(Path(__file__).parents[2])
