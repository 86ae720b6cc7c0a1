"""The files of a job's input, as records: lines of JSON, or rows of a table."""

from __future__ import annotations

import atexit
import csv
import glob
import gzip
import io
import os
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from ..config import GoodputConfig
from ..errors import ConfigError, cut
from ..prompts import without_nulls_of_others
from ..utils.files import expanded, parse_json
from .schema import STANDARD, InputConfig, Job, RowField, format_of
from .uris import fetch, name_of

_BOM = b"\xef\xbb\xbf"
_BATCH = 1024  # rows of a table that are in memory at once
_LARGEST_VALUE = 1 << 30  # characters of a value in CSV
_TABLES = ("csv", "parquet")
JSON_FIELDS = ("prompt_token_ids", "messages", "sampling")  # of which a table may have the JSON
Content = bytes | dict[str, Any] | ConfigError
Extent = Mapping[Path, int | None]  # files in their order, and how many rows are read of each; None = all


@dataclass(frozen=True, slots=True)
class Record:
    """What stands for one row.

    file      its name where the input has several, its path where these are called alike, else None
    line      of its file, from 1, blank ones too; in a table the row
    content   the line, stripped, the row's columns, or why the row cannot be read
    table     csv, whose columns have nothing but texts, parquet, or None for lines
    place     of its file among those of the input, from 0
    """

    file: str | None
    line: int
    content: Content
    table: str | None = None
    place: int = 0

    @property
    def where(self) -> str:
        what = f"{'line' if self.table is None else 'row'} {self.line}"
        return what if self.file is None else f"{self.file}, {what}"


def find_files(config: InputConfig) -> list[Path]:
    """The files of the input, in the order of `path`, those of a pattern by name. Standard input, and what is
    elsewhere, is copied to temporary files first. Raises ConfigError."""
    files: list[Path] = []
    for path in config.paths:
        if isinstance(path, str):
            files += fetch(path)
        elif path == STANDARD:
            files.append(_standard_input())
        elif found := _named(path):
            files += found
        else:
            raise ConfigError(f"input.path: no file is named like {path}")
    for path in files:
        if path.exists() and not path.is_file():
            hint = f"; name its files, such as {path / '*.jsonl'}" if path.is_dir() else "; name another"
            raise ConfigError(f"input.path: {path} is not a regular file{hint}")
    if len({os.path.realpath(path) for path in files}) < len(files):
        raise ConfigError(f"input.path: {config} names a file twice; name each once")
    return files


def local_files(config: InputConfig) -> list[Path]:
    """Those of `find_files` that lie here: nothing is fetched, and standard input not waited for."""
    return [
        file for path in config.paths if isinstance(path, Path) and path != STANDARD for file in _named(path)
    ]


def files_read(job: Job) -> list[Path]:
    """The local files that a job reads, the one that it comes from left out."""
    of_latency = None if job.speculative is None else (job.speculative.goodput or GoodputConfig()).latency
    named = [expanded(name) for name in (job.model, of_latency) if name is not None]
    return [*local_files(job.input), *filter(Path.is_file, named)]


def _named(path: Path) -> list[Path]:
    """The files of a pattern, by name; of a path that is none itself, whether it is there or not."""
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    return sorted(Path(name) for name in glob.glob(str(path), recursive=True))


@cache
def _standard_input() -> Path:
    with tempfile.NamedTemporaryFile(prefix="hispec-stdin-", delete=False) as copy:
        atexit.register(Path(copy.name).unlink, missing_ok=True)
        shutil.copyfileobj(sys.stdin.buffer, copy)
    return Path(copy.name)


def pattern_of(config: InputConfig, path: Path) -> Path | None:
    """The pattern of the input that `path` fits, whether it is there or not; None if none does."""
    for pattern in config.paths:
        if isinstance(pattern, Path) and glob.has_magic(str(pattern)) and not pattern.exists():
            parts = pattern.absolute().parts
            first = next(at for at, part in enumerate(parts) if glob.has_magic(part))
            folder = Path(os.path.realpath(Path(*parts[:first])))
            place = Path(os.path.realpath(path.absolute().parent), path.name)
            if place.is_relative_to(folder) and _fits(place.relative_to(folder).parts, parts[first:]):
                return pattern
    return None


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether glob finds these names of folders and a file by the parts of a pattern."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _fits(names, pattern[1:]) or (not names[0].startswith(".") and _fits(names[1:], pattern))
    is_hidden = names[0].startswith(".") and not pattern[0].startswith(".")
    return not is_hidden and fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def describe_input(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Files of an input and their sizes in bytes, for a manifest, in which bytes of a name that are not UTF-8
    are written out."""
    return [
        {"path": name_of(path).encode("utf-8", "backslashreplace").decode(), "bytes": path.stat().st_size}
        for path in files
    ]


def read_records(config: InputConfig, extent: Extent | None = None) -> Iterator[Record]:
    """The records of all files, lazily, up to `limit`; extent: of these files so many, whatever has come to
    the input since. Raises ConfigError if a file can't be read, or has less."""
    return islice(_all_records(config, extent), config.limit)


def _all_records(config: InputConfig, extent: Extent | None) -> Iterator[Record]:
    if extent is None:
        extent = dict.fromkeys(find_files(config))
    named = Counter(path.name for path in extent)
    for place, (path, num_rows) in enumerate(extent.items()):
        kind = format_of(path) if config.format == "auto" else config.format
        name = None if len(extent) == 1 else path.name if named[path.name] == 1 else name_of(path)
        num_read = 0
        try:
            for line, content in islice(_rows_of(config, path, kind), num_rows):
                num_read += 1
                yield Record(name, line, content, kind if kind in _TABLES else None, place)
        except ConfigError:
            raise
        except (OSError, EOFError, zlib.error) as error:
            words = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"input.path: cannot read {name_of(path)}: {words}") from None
        except (ValueError, csv.Error) as error:  # pyarrow's are such
            raise ConfigError(f"input.path: cannot read {name_of(path)} as {kind}: {error}") from None
        if num_rows is not None and num_read < num_rows:
            raise ConfigError(
                f"input.path: {name_of(path)} had {num_rows} rows when the job began and has {num_read} now;"
                " the same command goes on with those that are there"
            )


def _rows_of(config: InputConfig, path: Path, kind: str) -> Iterator[tuple[int, Content]]:
    """(number, content) of a file's rows, as of Record."""
    if kind == "parquet":
        return _parquet_rows(path, config.columns)
    return _csv_rows(path) if kind == "csv" else _lines(path)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, bytes) of the lines that are not blank, stripped."""
    with _opened(path) as file:
        for number, raw in enumerate(file, start=1):
            raw = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
            if raw:
                yield number, raw


def _parquet_rows(path: Path, columns: Mapping[RowField, str] | None) -> Iterator[tuple[int, Content]]:
    """Of `columns` alone, where they are given: others may be large, or hold what Python has no value for."""
    arrow = import_arrow(f"input.path: reading {path}")
    unreadable = ValueError, OverflowError, arrow.ArrowException

    def read(batch: Any) -> list[Content]:
        try:
            rows: list[Content] = batch.to_pylist()
            return rows
        except unreadable as error:
            if not columns:
                hint = "name the columns that rows need in input.columns: no other is read"
                raise ValueError(f"{error}; {hint}") from None
            if batch.num_rows == 1:
                return [ConfigError(f"cannot be read: {error}")]
            return [row for at in range(batch.num_rows) for row in read(batch.slice(at, 1))]

    with arrow.parquet.ParquetFile(path) as file:
        there = file.schema_arrow.names
        names = sorted(set(columns.values()) & set(there)) if columns else None
        if twice := sorted({name for name in names or there if there.count(name) > 1}):
            raise ValueError(f"it has several columns of the name {cut(', '.join(twice))}; name each once")
        batches = file.iter_batches(_BATCH, columns=names or None)  # without any of them all rows are bad
        try:
            yield from enumerate((row for batch in batches for row in read(batch)), start=1)
        except arrow.ArrowException as error:
            raise ValueError(str(error)) from None


def _csv_rows(path: Path) -> Iterator[tuple[int, Content]]:
    """Every value is a text, or missing where it is empty. pyarrow takes NA and null for missing ones, and no
    value of a megabyte."""
    csv.field_size_limit(_LARGEST_VALUE)
    encoding: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    with _opened(path) as file, io.TextIOWrapper(cast("IO[bytes]", file), **encoding) as text:
        rows = csv.reader(text, strict=True)
        try:
            names = next(rows, [])
            if len(set(names)) < len(names) or not names:
                got = cut(", ".join(names)) or "an empty one"
                raise ValueError(f"its first line must name each column once, got {got}")
            if not all(map(_is_utf8, names)):
                raise ValueError("its first line is not UTF-8; save the file as UTF-8")
            for number, values in enumerate(filter(None, rows), start=1):
                yield number, _csv_row(names, values)
        except csv.Error as error:  # what follows could be anything
            raise ValueError(f"line {rows.line_num}: {error}") from None


def _csv_row(names: list[str], values: list[str]) -> Content:
    if len(values) != len(names):
        return ConfigError(f"has {len(values)} values, and the first line {len(names)} names")
    if bad := [name for name, value in zip(names, values, strict=True) if not _is_utf8(value)]:
        return ConfigError(f"{cut(bad[0])}: not UTF-8; save the file as UTF-8")
    return {name: value or None for name, value in zip(names, values, strict=True)}


def _is_utf8(text: str) -> bool:
    """Whether a text holds no byte that was none of UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """The bytes of a file, decompressed where its name says that they are compressed."""
    if path.suffix.lower() == ".gz":
        with gzip.open(path, "rb") as file:
            yield file
    elif path.suffix.lower() == ".zst":
        arrow = import_arrow(f"input.path: reading {path}")
        with path.open("rb") as raw, arrow.CompressedInputStream(raw, "zstd") as stream:
            yield io.BufferedReader(stream, 1 << 20)
    else:
        with path.open("rb") as file:
            yield file


def import_arrow(what: str) -> Any:
    """pyarrow, with its module parquet. Raises ConfigError if it is not installed; what: what needs
    it, in words."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{what} needs pyarrow: pip install '.[data]'") from None
    return pyarrow


def take_columns(config: InputConfig, record: Record, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row by their own names, those that are null left out; in a table those that are no
    texts may be JSON, in CSV they are. Of `sampling` a line of JSON keeps a null of max_tokens, which says
    that there is no limit. Raises ConfigError."""
    if config.columns is not None:
        values = {field: values.get(column) for field, column in config.columns.items()}
    values = {name: value for name, value in values.items() if value is not None}
    if isinstance(record.content, dict):
        for name in (*JSON_FIELDS, "metadata") if record.table == "csv" else JSON_FIELDS:
            if isinstance(value := values.get(name), str):
                try:
                    values[name] = parse_json(value)
                except ValueError as error:
                    raise ConfigError(f"{name}: not valid JSON: {error}") from None
    if isinstance(own := values.get("sampling"), dict):
        kept = () if isinstance(record.content, dict) else ("max_tokens",)
        values["sampling"] = {name: value for name, value in own.items() if value is not None or name in kept}
    if isinstance(record.content, dict) and isinstance(messages := values.get("messages"), list):
        values["messages"] = [without_nulls_of_others(message) for message in messages]
    return values
