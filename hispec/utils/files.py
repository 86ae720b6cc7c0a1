"""Where HiSpec keeps its files, and how a file is written whole or not at all; JSON as the standard has
it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigError, cut, shown

if sys.platform != "win32":
    import fcntl


def expanded(path: str | Path) -> Path:
    """`path` with ~ and ~user as home folders. ~user of nobody stays what it is, and nothing is found there;
    `known_place` is for what is written."""
    return Path(os.path.expanduser(path))


def known_place(path: str | Path) -> Path:
    """As `expanded`. Raises ConfigError for ~user of nobody, which would become a folder of that name."""
    found = expanded(path)
    if str(found).startswith("~"):
        raise ConfigError(f"{shown(str(path))} is in the home folder of nobody here; give the folder in full")
    return found


def cache_dir() -> Path:
    """$HISPEC_CACHE, else $XDG_CACHE_HOME/hispec, else ~/.cache/hispec. An empty variable counts as unset.
    Raises ConfigError where there is no such place."""
    if own := os.environ.get("HISPEC_CACHE"):
        return known_place(own).absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return known_place(shared).absolute() / "hispec"
    if str(found := expanded("~/.cache/hispec")).startswith("~"):
        raise ConfigError("there is no home folder to keep files in; set HISPEC_CACHE to a folder for them")
    return found


def lock(descriptor: int) -> bool:
    """Locks an open file or folder until it is closed, or this process ends -> False if another process holds
    it. Where there are no locks everyone may."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def write_atomically(path: Path, content: bytes, sync: bool = False) -> None:
    """Puts `content` at `path`, or leaves what was there; with `sync` a power failure changes nothing of
    that. A link stays one. Raises OSError."""
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        replace_file(draft, path, sync)
    finally:
        with suppress(OSError):
            draft.unlink()


def replace_file(draft: Path, path: Path, sync: bool) -> None:
    """Puts a file that is whole in the place of another; with `sync` a power failure leaves one of the two.
    Raises OSError."""
    if sync:
        with draft.open("rb") as file:
            os.fsync(file.fileno())
    os.replace(draft, path)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk, where the system does that."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_json(path: Path, value: Any, sync: bool = False) -> None:
    """Writes `value` as `write_atomically` does. Raises OSError."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text.encode() + b"\n", sync)


def parse_json(content: str | bytes) -> Any:
    """json.loads that refuses NaN and Infinity, as the standard does, numbers beyond those of Python, and
    repeated keys. Raises ValueError, also where it is nested too deeply."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON number")

    def as_float(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ValueError(f"{cut(digits)} is too large a number, at most {sys.float_info.max:.4g} is read")
        return value

    def as_int(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:
            most = sys.get_int_max_str_digits()
            raise ValueError(f"an integer of {len(digits)} digits, at most {most} are read") from None

    def without_repeats(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) < len(items):
            [(repeated, _)] = Counter(key for key, _ in items).most_common(1)
            raise ValueError(f"key {shown(repeated)} is given twice")
        return values

    try:
        return json.loads(
            content,
            parse_constant=refuse,
            parse_float=as_float,
            parse_int=as_int,
            object_pairs_hook=without_repeats,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def finite(value: Any) -> Any:
    """Nested `value` with None in place of numbers that JSON lacks: infinities and nan."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# How what an option writes begins, and what it is: a file that begins in another way is not replaced, such as
# the output of a job, whose name was given by mistake.
_BEGINNINGS = {
    **dict.fromkeys(("--json", "--latency"), ((b"{\n", b"[\n"), "result in JSON")),
    "--html": ((b"<!DOCTYPE html>",), "page"),
    "-o": ((b"\x89PNG",), "picture"),
}


def check_targets(targets: Mapping[str, Path | None], read: Iterable[Path] = ()) -> None:
    """Creates the folders of files that are to be written, as options say, which are named by their flags;
    None = not asked for. Raises ConfigError if that cannot be, or must not, since one of them is read, or is
    another of them, or something else is there that would be lost."""
    sources, taken = list(read), dict[str, str]()
    for flag, path in targets.items():
        if path is None:
            continue
        real = os.path.realpath(path)  # of a link that leads to itself, for which Path.resolve raises: a link
        if (other := taken.setdefault(real, flag)) != flag:
            raise ConfigError(f"{other} and {flag} both name {path}; give each a path of its own")
        if os.path.islink(real) or (path.exists() and not path.is_file()):
            raise ConfigError(f"{flag}: {path} is not a regular file; choose another path")
        if any(is_same(path, source) for source in sources):
            raise ConfigError(f"{flag}: {path} is read by this command; choose another path")
        check_folder(flag, path.parent)
    for flag, path in targets.items():
        if path is not None and path.exists() and flag in _BEGINNINGS:
            _check_replaced(flag, path)


def _check_replaced(flag: str, path: Path) -> None:
    """Raises ConfigError for a file that is not empty and not of the kind that `flag` writes, or can't be
    read."""
    beginnings, kind = _BEGINNINGS[flag]
    if path.suffix == ".json" and b"{\n" in beginnings:  # other programs write it without lines
        beginnings = *beginnings, b"{", b"["
    try:
        with path.open("rb") as file:
            found = file.read(max(map(len, beginnings)))
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}; choose another path") from None
    if found and not found.startswith(beginnings):
        raise ConfigError(
            f"{flag}: {path} exists and is no {kind}; what is in it would be lost: choose another path, or"
            " remove it first"
        )


def is_same(one: Path, other: Path) -> bool:
    """As with two hard links, or two links to one place."""
    if os.path.realpath(one) == os.path.realpath(other):  # a link that leads to itself has Path.resolve raise
        return True
    return one.exists() and other.exists() and one.samefile(other)


def check_folder(flag: str, folder: Path) -> None:
    """Creates a folder. Raises ConfigError if no file can be written there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{flag}: cannot write to {folder}: it is not a folder; choose another place")
    probe = folder / f".hispec-probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot write to {folder}: {error.strerror}; choose another place"
        ) from None
