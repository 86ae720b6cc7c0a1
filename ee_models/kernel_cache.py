"""numba's `njit` and `cfunc`, whose compiled kernels are kept for as long as no source of ours changes.

All kernels are declared by these. numba itself asks whether the file that a function stands in has changed,
not whether those have that it calls or whose constants it reads. After an upgrade, which leaves compiled
files where they are, such a kernel would take memory for what it no longer is.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from numba import cfunc as cfunc
from numba import config
from numba import njit as njit
from numba.core import caching
from numba.core.event import Event, Listener, register

PACKAGES = ("hispec", "ee_models", "cache")
_ROOT = Path(__file__).resolve().parents[1]
_locators: list[Any] = caching.CacheImpl._locator_classes  # of which numba takes the first that can
_log = logging.getLogger(__name__)


def digest_of(root: Path) -> str:
    """A digest of all sources of PACKAGES in `root`."""
    digest = hashlib.blake2b(digest_size=16)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.is_file():  # else a link of an editor's, such as Emacs's locks
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _own_digest() -> str:
    return digest_of(_ROOT)


class _ByAllSources(caching._CacheLocator):
    """Puts compiled kernels of PACKAGES where numba would, under the digest of all sources."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        path = Path(py_file).resolve()
        if not path.is_file():  # in an archive, of which numba takes the digest itself
            return None
        if not any(path.is_relative_to(_ROOT / package) for package in PACKAGES):
            return None
        others = (each for each in _locators if each is not cls)
        found = next((found for each in others if (found := each.from_function(py_func, py_file))), None)
        if found is None:
            found = _InOwnFolder(py_func, py_file)
        found.get_source_stamp = _own_digest
        return found


class _InOwnFolder(caching._SourceFileBackedLocatorMixin, caching._CacheLocator):
    """Puts compiled kernels into a folder that goes with this process: where nothing else may be written."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        self._py_file, self._lineno = py_file, py_func.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return _own_folder()


@cache
def _own_folder() -> str:
    folder = tempfile.mkdtemp(prefix="hispec-kernels-")  # nobody else's: numba unpickles what it finds there
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and not a worker that was forked
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    _log.warning(
        "compiled kernels cannot be kept, neither beside %s nor in a cache of the user's: each process"
        " compiles them anew, in a minute or two; set NUMBA_CACHE_DIR to a folder that may be written",
        _ROOT,
    )
    return folder


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


# Without those of an earlier import of this module: two would ask each other without end.
_locators[:] = [_ByAllSources, *(each for each in _locators if each.__qualname__ != "_ByAllSources")]
if getattr(config, "CACHE_LOCATOR_CLASSES", ""):
    _log.warning(
        "NUMBA_CACHE_LOCATOR_CLASSES is set: compiled kernels are kept by it, also where a source that they"
        " depend on has changed; delete them when HiSpec changes, or unset it"
    )
register("numba:compile", CompileNotice())
