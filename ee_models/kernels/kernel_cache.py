"""What numba's cache of compiled kernels needs: set up when it is imported, before any kernel is loaded."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from numba.core.event import Event, Listener, register

PACKAGES = ("hispec", "ee_models", "cache")
_log = logging.getLogger(__name__)


def drop_stale(root: Path) -> None:
    """Deletes the cache's indices of PACKAGES in `root` that are older than the newest source there; where
    nothing may be written, nothing is.

    The cache asks whether the file that a function stands in has changed, not whether those have that it
    calls or whose arrays it reads. After an upgrade, which leaves compiled files where they are, such a
    kernel would take memory for what it no longer is.
    """
    packages = [root / name for name in PACKAGES if (root / name).is_dir()]
    with suppress(OSError):
        newest = max(path.stat().st_mtime for package in packages for path in package.rglob("*.py"))
        for package in packages:
            for index in package.rglob("__pycache__/*.nbi"):
                if index.stat().st_mtime < newest:
                    index.unlink(missing_ok=True)


class CompileNotice(Listener):
    """Says, once, that kernels of PACKAGES are being compiled: all of them take a minute or two, in which
    nothing else can be seen to happen."""

    def __init__(self) -> None:
        self._is_due = True

    def on_start(self, event: Event) -> None:
        function = getattr(event.data["dispatcher"], "py_func", None)  # also of others: it may have no module
        module = getattr(function, "__module__", None) or ""
        if self._is_due and module.partition(".")[0] in PACKAGES:
            self._is_due = False
            _log.warning("compiling kernels that this machine has not run yet; later runs find them")

    def on_end(self, event: Event) -> None:
        pass


drop_stale(Path(__file__).parents[2])
register("numba:compile", CompileNotice())
