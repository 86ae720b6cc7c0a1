"""Output rows: checked before the work starts, written as whole lines."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, HiSpecError
from ..outputs import CompletionOutput, RequestOutput
from ..utils.files import check_folder, finite
from .inputs import find_files, import_arrow
from .manifest import (
    AnotherJobsOutput,
    Manifest,
    check_same,
    manifest_path,
    read_manifest,
    settings_that_matter,
)
from .rows import BadRow, Row, has_openai_lines
from .schema import COMPRESSED, STANDARD, Job, OutputConfig, format_of

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class OutputError(HiSpecError):
    """The output can't be written any more; what is written is whole."""


@dataclass(frozen=True)
class RowError:
    """Why a row has no outputs.

    invalid_line  the input line can't be used
    refused       the engine can't serve the request, now or ever
    failed        the engine gave up while serving it
    """

    type: Literal["invalid_line", "refused", "failed"]
    message: str


Outcome = RequestOutput | RowError


def output_format(job: Job) -> str:
    """jsonl or openai for lines, parquet or csv."""
    if job.output.format != "auto":
        return job.output.format
    named = format_of(job.output.path)
    return "openai" if named == "jsonl" and has_openai_lines(job.input) else named


def rows_path(job: Job) -> Path:
    """The file that rows are appended to: the output itself, or lines beside it if the output is a table or
    compressed, which can only be made as a whole."""
    path = job.output.path
    is_made_last = output_format(job) in ("parquet", "csv") or path.suffix.lower() in COMPRESSED
    return path.with_name(f"{path.name}.rows.jsonl") if is_made_last else path


def prepare_output(job: Job) -> Manifest | None:
    """The manifest of the rows that are kept; None where there are none. Raises ConfigError if the output
    can't be written, or must not be.

    Nothing is created and an existing file is left as it is until the first row is due, so a job that fails
    to start leaves and destroys nothing.
    """
    output, kind = job.output, output_format(job)
    if output.path == STANDARD:
        if output.compare_plain or kind in ("parquet", "csv"):
            raise ConfigError(
                'output.path: "-" takes lines of JSON alone, without compare_plain; name a file'
            )
        return None
    if kind in ("parquet", "csv") or output.path.suffix.lower() == ".zst":
        import_arrow(f"output.path: writing {output.path}")
    rows = rows_path(job)
    for path in dict.fromkeys((output.path, rows)):
        _check_path(job, path)
    if output.overwrite:
        return None
    if not (rows.exists() and rows.stat().st_size):
        if rows != output.path and output.path.exists():
            raise AnotherJobsOutput(
                f"output.path: {output.path} exists, but {rows.name}, from which a job goes on, does not;"
                " start anew with --new (output.overwrite=true), or choose another output.path"
            )
        return None
    if not output.resume:
        raise ConfigError(
            f"output.path: {rows} exists; set output.resume=true to go on with it, output.overwrite=true to"
            " replace it, or choose another path"
        )
    before = read_manifest(output.path)
    if before is None:
        raise AnotherJobsOutput(
            f"output.path: {rows} exists, but {manifest_path(output.path).name}, by which a job knows its own"
            " output again, does not; start anew with --new (output.overwrite=true), or choose another"
            " output.path"
        )
    if not output.only_missing:
        check_same(output.path, before.settings, settings_that_matter(job))
    return before


def _check_path(job: Job, path: Path) -> None:
    for source in find_files(job.input):
        if path.resolve() == source.resolve() or (path.exists() and path.samefile(source)):
            raise ConfigError(f"output.path: {path} is the input file; choose another path")
    trace = job.engine.trace
    if trace is not None and Path(trace).resolve() == path.resolve():
        raise ConfigError(f"output.path: {path} is engine.trace too; choose another path for one of them")
    if path.exists() and not path.is_file():
        raise ConfigError(f"output.path: {path} is not a regular file; choose another path")
    if not path.exists():
        # Of the folders that are missing, the first is made here.
        check_folder("output.path", next(folder for folder in path.absolute().parents if folder.exists()))
        return
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"output.path: cannot write {path}: {error.strerror}") from None


class RowWriter:
    """Appends rows as whole lines: in the order of their indices, in whatever order they come, or as they
    come. Unbuffered: what is written survives a crash of the program. A context manager, on whose exit the
    file ends with a whole line and is put on the disk."""

    def __init__(
        self,
        path: Path,
        num_bytes: int = 0,
        turns: Iterator[int] | None = None,
        sync_s: float | None = None,
        way_on: str = "",
    ) -> None:
        """Keeps the first `num_bytes` bytes of the file; makes the file, and its folders, if there is none.

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
        if self._is_file:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file: Any = path.open("ab", buffering=0) if self._is_file else sys.stdout.buffer
        self._syncs = self._is_file and sync_s is not None
        self._syncs_each = self._syncs and sync_s == 0
        self._broken: OSError | None = None
        self._is_dirty = False
        self._stop = threading.Event()
        if self._is_file:
            lock(self._file, path)
            self._file.truncate(num_bytes)
        if self._syncs and not self._syncs_each:
            # Beside the engine, which would otherwise wait for the disk.
            threading.Thread(target=self._sync_often, args=(sync_s,), name="sync", daemon=True).start()

    @property
    def num_waiting(self) -> int:
        """Rows that came before their turn."""
        return len(self._waiting)

    def add(self, index: int, row: dict[str, Any]) -> None:
        """Writes the row, or keeps it until all that stand before it are written. Raises OutputError."""
        text = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        line = text.encode("utf-8", "backslashreplace")
        if self._turns is None:
            self._write(line)
            return
        self._waiting[index] = line
        while self._next in self._waiting:
            self._write(self._waiting[self._next])
            del self._waiting[self._next]
            self._next = next(self._turns, None)

    def _write(self, line: bytes) -> None:
        written = 0
        while written < len(line):
            try:
                if self._broken is not None:
                    raise self._broken
                written += self._file.write(line[written:])
            except OSError as error:
                raise OutputError(
                    f"cannot write {self._path} any more: {error.strerror}; it has {self.num_written} whole"
                    f" lines of this run, one per row that is done; free some space, and {self._way_on}"
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
            except OSError as error:  # told where a row is written next
                self._broken = error
            except ValueError:  # closed meanwhile
                return

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cuts off what was not written whole. Raises OSError."""
        self._stop.set()
        if not self._is_file:
            self._file.flush()
            return
        try:
            self._file.truncate(self._end)
            if self._syncs:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def lock(file: Any, path: Path) -> None:
    """Keeps other processes from writing an open file until it is closed, or this process ends. Raises
    ConfigError if one does."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"output.path: {path} is being written by another process; wait for its end, or choose another"
            " path"
        ) from None
    except OSError:  # a file system without locks
        return


def drop_rows(path: Path, num_bytes: int, is_dropped: Callable[[bytes], bool]) -> int:
    """Takes lines out of the first `num_bytes` bytes of a file, which are whole ones, and all that follows
    them; at once, or not at all -> the bytes that are left. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with path.open("rb") as source, draft.open("wb") as kept:
            read = 0
            while read < num_bytes:
                line = source.readline()
                read += len(line)
                if not is_dropped(line):
                    kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
            left = kept.tell()
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()
    return left


def output_row(row: Row | BadRow, outcome: Outcome, config: OutputConfig) -> dict[str, Any]:
    """The output row of an input row: its outputs, or what went wrong."""
    if isinstance(outcome, RequestOutput) and outcome.error is not None:
        outcome = RowError("failed", outcome.error)
    if isinstance(outcome, RowError):
        body: dict[str, Any] = {"outputs": [], "usage": None, "error": {**asdict(outcome), "line": row.line}}
    else:
        num_new = sum(len(output.token_ids) for output in outcome.outputs)
        usage = {"prompt_tokens": len(outcome.prompt_token_ids), "completion_tokens": num_new}
        outputs = [_output_fields(output, config) for output in outcome.outputs]
        body = {"outputs": outputs, "usage": usage, "error": None}
    return {**_head(row, config), **body, "hash": row.content_hash}


def _head(row: Row | BadRow, config: OutputConfig) -> dict[str, Any]:
    if isinstance(row, BadRow):
        return {"index": row.index, "id": row.id}
    head: dict[str, Any] = {"index": row.index, "id": row.input.id}
    if config.echo_input:
        head[row.input.prompt_fields[0]] = row.prompt
    if row.input.metadata is not None:
        head["metadata"] = row.input.metadata
    return head


def _output_fields(output: CompletionOutput, config: OutputConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if config.token_ids:
        values["token_ids"] = output.token_ids
    if output.logprobs is not None:
        values["logprobs"] = [finite(asdict(entry)) for entry in output.logprobs]
    return values
