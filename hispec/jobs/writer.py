"""Appends rows to a file that no other process writes meanwhile, so that a crash takes none but the last."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, HiSpecError
from ..utils.files import lock, replace_file, sync_folder
from .schema import STANDARD


class OutputError(HiSpecError):
    """The output can't be written any more; what is written is whole."""


class RowWriter:
    """Appends rows as whole lines: in the order of their indices, in whatever order they come, or as they
    come. Unbuffered: what is written survives a crash of the program. A context manager, on whose exit the
    file ends with a whole line and is put on the disk; what others have done to it is told then."""

    def __init__(
        self,
        path: Path,
        num_bytes: int = 0,
        turns: Iterator[int] | None = None,
        sync_s: float | None = None,
        way_on: str = "",
        held: Any = None,
    ) -> None:
        """Keeps the first `num_bytes` bytes of the file; makes the file, and its folders, if there is none.

        held     the file as `hold` has opened it, if it was there; it is closed in the end
        turns    the indices of the rows that will come, in the order in which they are to stand; None = as
                 they come
        sync_s   as in OutputConfig
        way_on   how a job goes on that could not write any more, in words

        Raises OSError, and ConfigError if another process writes the file.
        """
        self.num_written = 0
        self._path, self._way_on, self._turns = path, way_on, turns
        self._next = next(turns, None) if turns is not None else None
        self._end = num_bytes
        self._waiting: dict[int, bytes] = {}
        self._is_file = path != STANDARD
        # Standard output is looked at where it is written to alone: a notebook's has no bytes.
        self._file: Any = (held or hold(path)) if self._is_file else sys.stdout.buffer
        if self._is_file and held is None and self._file.seek(0, os.SEEK_END) != num_bytes:
            self._file.close()
            raise ConfigError(
                f"output.path: another process has written {path} meanwhile; the same command goes on"
            )
        self._syncs = self._is_file and sync_s is not None
        self._syncs_each = self._syncs and sync_s == 0
        self._broken: OSError | OutputError | None = None
        self._is_dirty = False
        self._stop = threading.Event()
        if self._is_file:
            self._file.truncate(num_bytes)
        if self._syncs:
            sync_folder(path.parent)
        if self._syncs and not self._syncs_each:
            # Beside the engine, which would otherwise wait for the disk.
            threading.Thread(target=self._sync_often, args=(sync_s,), name="sync", daemon=True).start()

    @property
    def num_waiting(self) -> int:
        """Rows that came before their turn."""
        return len(self._waiting)

    def add(self, index: int, row: dict[str, Any]) -> None:
        """Writes the row, or keeps it until all that stand before it are written. Raises OutputError."""
        line = line_of(row)
        if self._turns is None:
            self._write(line)
            return
        self._waiting[index] = line
        while self._next in self._waiting:
            self._write(self._waiting[self._next])
            del self._waiting[self._next]
            self._next = next(self._turns, None)

    def _write(self, line: bytes) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            _write_all(self._file, line)
        except (BrokenPipeError, OutputError):  # who read standard output has enough
            raise
        except OSError as error:
            where = self._path if self._is_file else "standard output"
            raise OutputError(
                f"cannot write {where} any more: {error.strerror}; it has {self.num_written} whole lines of"
                f" this run, one per row that is done; free some space, and {self._way_on}"
            ) from error
        self._end += len(line)
        self.num_written += 1
        self._is_dirty = True
        if not self._is_file:
            self._file.flush()
        elif self._syncs_each:
            self._sync()

    def _sync_often(self, sync_s: float) -> None:
        while not self._stop.wait(sync_s):
            self._sync()

    def _sync(self) -> None:
        if self._is_dirty:
            self._is_dirty = False
            try:
                os.fsync(self._file.fileno())
                self._check_whole()
            except (OSError, OutputError) as error:  # told where a row is written next
                self._broken = error
            except ValueError:  # closed meanwhile
                return

    def _check_whole(self) -> None:
        """Raises OutputError if another program has taken the file away, or a part of it."""
        num_bytes = self._end  # first: a line may be written meanwhile
        own = os.fstat(self._file.fileno())
        at_path: os.stat_result | None = own
        try:
            at_path = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            at_path = None
        except OSError:  # which says nothing of the file
            pass
        if own.st_size < num_bytes:
            change, remedy = f"{self._path} was cut to {own.st_size} of {num_bytes} bytes", ""
        elif at_path is None or not os.path.samestat(own, at_path):
            change = f"{self._path} was moved, removed or replaced, and rows went into what it was"
            remedy = "put it back, and "
        else:
            return
        raise OutputError(f"output.path: {change}, by another program; {remedy}{self._way_on}")

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cuts off what was not written whole. Raises OSError, and OutputError if another program has taken
        lines away."""
        self._stop.set()
        if not self._is_file:
            self._file.flush()
            return
        try:
            # Where it is whole it stays as it is: what is made of it is known to be newer by its time.
            if os.fstat(self._file.fileno()).st_size > self._end:
                self._file.truncate(self._end)
            if self._broken is not None:
                raise self._broken
            self._check_whole()
            if self._syncs:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def line_of(row: dict[str, Any]) -> bytes:
    """A row as it is written."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def hold(path: Path) -> Any:
    """The file at `path`, made if there is none, open for appending; until it is closed, or this process
    ends, no other can hold it. Raises OSError, and ConfigError if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)
    if not lock(file.fileno()):
        file.close()
        raise ConfigError(
            f"output.path: {path} is being written by another process; wait for its end, or choose another"
            " path"
        )
    return file


def _write_all(file: Any, content: bytes) -> None:
    """An unbuffered file may take a part, above all where the disk fills up. Raises OSError."""
    while content:
        content = content[file.write(content) :]


def drop_lines(
    path: Path, held: Any, num_bytes: int, is_dropped: Callable[[bytes], bool], way_on: str
) -> tuple[Any, int]:
    """Takes lines out of the first `num_bytes` bytes of a held file, which are whole ones, and all that
    follows them; at once, or not at all -> the file as it is then, held, and its bytes. way_on: as of
    RowWriter. Raises OutputError, and ConfigError if another process does the same."""
    place = path.resolve()  # a link stays one
    draft = place.with_name(f".{place.name}.draft")
    try:
        kept = hold(draft)
        try:
            kept.truncate(0)
            with place.open("rb") as source:
                while source.tell() < num_bytes:
                    line = source.readline()
                    if not is_dropped(line):
                        _write_all(kept, line)
            replace_file(draft, place, sync=True)
        except BaseException:
            kept.close()
            with suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:
        raise OutputError(
            f"cannot write {path} without the rows that are done again: {error.strerror}; it is as it was;"
            f" free some space, and {way_on}"
        ) from error
    held.close()
    return kept, kept.tell()
