"""numba's `njit` and `cfunc` as all kernels are declared, whose compiled code is kept for as long as no
source changes that it can be made of.

numba itself asks whether the file that a function stands in has changed,
not whether those have that it calls or whose constants it reads. After an upgrade, which leaves compiled
files where they are, such a kernel would take memory for what it no longer is. What a kernel calls or reads
its file imports, and so on: these files are asked of all.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import config, types
from numba.core import caching
from numba.core.errors import TypingError
from numba.core.event import Event, Listener, register
from numba.extending import intrinsic

PACKAGES = ("hispec", "ee_models", "cache")
_ROOT = Path(__file__).resolve().parents[1]
_locators: list[Any] = caching.CacheImpl._locator_classes  # of which numba takes the first that can
_log = logging.getLogger(__name__)


def njit(function: Any) -> Any:
    """numba's: kept on the disk, without Python's lock, dividing as numpy does."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def inlined(function: Any) -> Any:
    """What is compiled within its callers alone, and kept with them: LLVM optimises what a kernel calls once
    more in each that calls it."""
    return numba.njit(inline="always", nogil=True, error_model="numpy")(function)


def cfunc(signature: Any) -> Any:
    """numba's, as `njit`: compiled where it is declared, of one signature, for calls by address."""
    return numba.cfunc(signature, cache=True, error_model="numpy")


# Also within functions; and in texts, which does no harm. Parsing takes several times as long.
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)"  # dots, module, names
    r"|import[ \t]+([^\n]*))",  # modules
    re.MULTILINE,
)


def sources_of(root: Path, path: Path) -> set[Path]:
    """A source of PACKAGES in `root`, and all of them that it imports, itself or through others."""
    found, left = {path}, [path]
    while left:
        new = _imported(root, left.pop()) - found
        found |= new
        left += new
    return found


@cache
def _imported(root: Path, path: Path) -> frozenset[Path]:
    return frozenset(file for name in _names_in(root, path) for file in _files_of(root, name))


def _names_in(root: Path, path: Path) -> Iterator[tuple[str, ...]]:
    """What a source imports, by parts; of `from a import b` both a and a.b, as either may be a module."""
    folders = path.relative_to(root).parent.parts
    for dots, module, names, modules in _IMPORT.findall(path.read_text(encoding="utf-8")):
        if modules:
            yield from (tuple(each.split()[0].split(".")) for each in modules.split(",") if each.strip())
        else:
            above = folders[: len(folders) + 1 - len(dots)] if dots else ()
            base = (*above, *filter(None, module.split(".")))
            yield base
            yield from ((*base, name) for name in re.findall(r"\w+", names))


def _files_of(root: Path, name: tuple[str, ...]) -> Iterator[Path]:
    if name[:1] and name[0] in PACKAGES:
        place = root.joinpath(*name)
        yield from filter(Path.is_file, (place.with_suffix(".py"), place / "__init__.py"))


def digest_of(root: Path, path: Path) -> str:
    """A digest of these sources, and of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(sources_of(root, path)):
        digest.update(f"{source.relative_to(root)}\0".encode() + source.read_bytes())
    return digest.hexdigest()


_own_digest = cache(partial(digest_of, _ROOT))


class _BySources(caching._CacheLocator):
    """Puts compiled kernels of PACKAGES where numba would, under the digest of what they are made of."""

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
        found.get_source_stamp = partial(_own_digest, path)
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


class Kernel:
    """A kernel whose arguments are int64, which Python calls as it does any function, and other kernels at
    its `address`, by its `caller`.

    What an njit function calls is compiled once more within it, and again within each that calls that. This
    is compiled once, which counts where it is as large as a product."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.num_numbers = len(inspect.signature(function).parameters)
        signature = types.void(*(types.int64,) * self.num_numbers)
        self.compiled = cfunc(signature)(function)
        self.address: int = self.compiled.address

    def __call__(self, *numbers: int) -> None:
        self.compiled.ctypes(*numbers)

    @property
    def caller(self) -> Any:
        """What kernels call with an address of such a kernel and a tuple of as many numbers as it takes: no
        more and no less is compiled."""
        count = self.num_numbers

        def call(_context: Any, _address: Any, numbers: Any) -> Any:
            if len(numbers) != count:
                raise TypingError(f"the kernel takes {count} numbers, not {len(numbers)}")
            return types.none(types.intp, types.UniTuple(types.int64, count)), _generate_call

        return intrinsic(call)


def _generate_call(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    address, numbers = args
    given = [builder.extract_value(numbers, i) for i in range(numbers.type.count)]
    signature = ir.FunctionType(ir.VoidType(), [number.type for number in given])
    builder.call(builder.inttoptr(address, signature.as_pointer()), given)
    return ir.Constant(ir.IntType(8).as_pointer(), None)  # numba's None


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
_locators[:] = [_BySources, *(each for each in _locators if each.__qualname__ != "_BySources")]
if getattr(config, "CACHE_LOCATOR_CLASSES", ""):
    _log.warning(
        "NUMBA_CACHE_LOCATOR_CLASSES is set: compiled kernels are kept by it, also where a source that they"
        " depend on has changed; delete them when HiSpec changes, or unset it"
    )
register("numba:compile", CompileNotice())
