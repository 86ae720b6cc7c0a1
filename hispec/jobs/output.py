"""Output rows: checked before the work starts, written in input order, whole lines only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, HiSpecError
from ..outputs import CompletionOutput, RequestOutput
from ..utils.files import check_folder, finite
from .rows import BadRow, Row
from .schema import Job, OutputConfig


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


def prepare_output(job: Job) -> None:
    """Raises ConfigError if the file can't be written, or must not be.

    Nothing is created and an existing file is left as it is until the first row is due, so a job that fails
    to start leaves and destroys nothing.
    """
    path = job.output.path
    if path.resolve() == job.input.path.resolve() or (path.exists() and path.samefile(job.input.path)):
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
    if path.stat().st_size and not (job.output.overwrite or job.output.resume):
        raise ConfigError(
            f"output.path: {path} exists; set output.resume=true to go on with it, output.overwrite=true to"
            " replace it, or choose another path"
        )


def count_done(path: Path, rows: Iterator[Row | BadRow]) -> tuple[int, int]:
    """How many rows of `rows`, from the first, the file holds already, and how many bytes they take.

    A last line without its end was cut off by a crash and counts as missing. Raises ConfigError if the file
    holds anything that is not the result of the same row: same prompt, sampling and model.
    """
    num_done = num_bytes = 0
    if not path.exists():
        return num_done, num_bytes
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            row = next(rows, None)
            if row is None or _content_hash(raw) != row.content_hash:
                what = "more lines than the input has rows"
                if row is not None:
                    what = f"line {num_done + 1} is not the result of input line {row.line}"
                raise ConfigError(
                    f"output.resume: {path} does not belong to this job: {what} (another prompt, sampling,"
                    " model, quantization, dtype or kv_cache_dtype); set output.overwrite=true to replace the"
                    " file, or choose another output.path"
                )
            num_done += 1
            num_bytes += len(raw)
    return num_done, num_bytes


def _content_hash(raw: bytes) -> str | None:
    try:
        values = json.loads(raw)
    except ValueError:
        return None
    return values.get("hash") if isinstance(values, dict) else None


class OrderedWriter:
    """Writes rows in the order of their indices, in whatever order they come. Unbuffered: what is written
    survives a crash of the program. A context manager, on whose exit the file ends with a whole line.
    """

    def __init__(self, path: Path, num_done: int = 0, num_bytes: int = 0, way_on: str = "") -> None:
        """Keeps the first `num_bytes` bytes of the file, which hold `num_done` rows; makes the file, and its
        folders, if there is none. way_on: how a job goes on that could not write any more, in words. Raises
        OSError."""
        self.next_index = num_done
        self._path, self._way_on = path, way_on
        self._end = num_bytes
        self._waiting: dict[int, bytes] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(num_bytes)

    @property
    def num_waiting(self) -> int:
        """Rows that came before their turn."""
        return len(self._waiting)

    def add(self, index: int, row: dict[str, Any]) -> None:
        """Writes the row as soon as all earlier ones are written. Raises OutputError."""
        text = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        self._waiting[index] = text.encode("utf-8", "backslashreplace")
        while self.next_index in self._waiting:
            self._write(self._waiting[self.next_index])
            del self._waiting[self.next_index]
            self.next_index += 1

    def _write(self, line: bytes) -> None:
        written = 0
        while written < len(line):
            try:
                written += self._file.write(line[written:])
            except OSError as error:
                raise OutputError(
                    f"cannot write {self._path} any more: {error.strerror}; it has {self.next_index} whole"
                    f" lines, one per row that is done; free some space, and {self._way_on}"
                ) from error
        self._end += len(line)

    def __enter__(self) -> OrderedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cuts off what was not written whole. Raises OSError."""
        try:
            self._file.truncate(self._end)
        finally:
            self._file.close()


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
