"""Outputs that can only be made as a whole, from the lines of rows beside them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from ..errors import HiSpecError
from ..utils.files import replace_file
from .inputs import import_arrow
from .output import rows_path
from .schema import Job, output_format
from .writer import OutputError

_BATCH, _BATCH_BYTES = 1024, 64 << 20  # rows that are in memory at once, and their bytes; but for one alone
# What has no type of its own is JSON.
COLUMNS = {
    "index": "int64",
    "id": "string",
    "prompt": "string",
    "prompt_token_ids": "string",
    "messages": "string",
    "metadata": "string",
    "text": "string",
    "finish_reason": "string",
    "stop_reason": "string",
    "outputs": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "error_type": "string",
    "error": "string",
    "hash": "string",
}


def make_output(job: Job) -> None:
    """Makes the job's output of its rows, whole or not at all, where it is not the file of rows itself.
    Raises OutputError."""
    path, rows = job.output.path, rows_path(job)
    if rows == path:
        return
    place = path.resolve()  # a link stays one
    draft = place.with_name(f".{place.name}.draft")  # nobody else makes it: whoever does holds the rows
    try:
        if output_format(job) in ("parquet", "csv"):
            _write_table(job, rows, draft)
        else:
            with rows.open("rb") as source, _compressed(draft, path.suffix) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        replace_file(draft, place, sync=job.output.sync_s is not None)
    except HiSpecError:
        raise
    except Exception as error:  # what pyarrow raises has no class in common
        words = getattr(error, "strerror", None) or str(error)
        space = "free some space, and " * isinstance(error, OSError)
        raise OutputError(
            f"cannot make {path}: {words}; all rows are in {rows}; {space}{job.output.way_on}"
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _write_table(job: Job, rows: Path, draft: Path) -> None:
    with rows.open("rb") as source, _compressed(draft, job.output.path.suffix) as target:
        if output_format(job) == "csv":
            with io.TextIOWrapper(cast("IO[bytes]", target), "utf-8", newline="") as text:
                table = csv.DictWriter(text, COLUMNS)
                table.writeheader()
                table.writerows(_columns(json.loads(line)) for line in source)
            return
        arrow = import_arrow(f"output.path: writing {job.output.path}")
        schema = arrow.schema([(name, getattr(arrow, kind)()) for name, kind in COLUMNS.items()])
        with arrow.parquet.ParquetWriter(target, schema) as writer:
            for lines in _batches(source):
                columns = [_columns(json.loads(line)) for line in lines]
                writer.write_batch(arrow.RecordBatch.from_pylist(columns, schema=schema))


def _batches(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Lines in order, so many at once that no column of theirs is larger than a table takes, 2 GB."""
    batch: list[bytes] = []
    num_bytes = 0
    for line in lines:
        if batch and (len(batch) == _BATCH or num_bytes + len(line) > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(line)
        num_bytes += len(line)
    if batch:
        yield batch


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row. Halves of surrogate pairs, which JSON can hold and tables cannot, are written
    out."""
    return {
        name: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for name, value in _fields(row).items()
    }


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    outputs, usage, error = row["outputs"], row["usage"] or {}, row["error"] or {}
    first = outputs[0] if outputs else {}
    return {
        "index": row["index"],
        "id": None if row["id"] is None else str(row["id"]),
        "prompt": row.get("prompt"),
        **{name: _as_json(row.get(name)) for name in ("prompt_token_ids", "messages", "metadata")},
        "text": first.get("text"),
        "finish_reason": first.get("finish_reason"),
        "stop_reason": None if first.get("stop_reason") is None else str(first["stop_reason"]),
        "outputs": _as_json(outputs),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "error_type": error.get("type"),
        "error": error.get("message"),
        "hash": row["hash"],
    }


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


@contextmanager
def _compressed(path: Path, suffix: str) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """A new file, what is written to it compressed as `suffix` says."""
    if suffix.lower() == ".gz":
        with gzip.open(path, "wb") as file:
            yield file
    elif suffix.lower() == ".zst":
        arrow = import_arrow(f"output.path: writing {path}")
        with path.open("wb") as raw, arrow.CompressedOutputStream(raw, "zstd") as stream:
            yield stream
    else:
        with path.open("wb") as file:
            yield file
