"""From files to a page: what each is, and its section."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, cut
from ..jobs.manifest import load_manifest
from ..trace.merge import read_together
from ..trace.records import Trace
from ..utils.files import parse_json, write_atomically
from .bench import bench_section
from .markup import Html, element, join, make_document
from .rows import Rows, rows_section
from .trace import trace_section

_ROWS = ".rows.jsonl"  # of outputs that are made last
_READS = (
    "traces (engine.trace), results of `hispec bench --json`, and rows of jobs, which for tables and"
    " compressed outputs are in OUTPUT.rows.jsonl"
)

_LONGEST_HEADER = 1 << 20  # bytes: other files may be one line
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # of what is not as we write


def is_trace(path: Path) -> bool:
    """Whether it is a trace, however its JSON is written, or empty. Raises ConfigError if it cannot be
    read."""
    try:
        with path.open("rb") as file:
            first = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    header = _parse(first)
    return not first or (isinstance(header, dict) and header.get("type") == "trace")


def write_page(paths: Sequence[Path], target: Path) -> Trace | None:
    """Writes the page of these files, traces as one -> the trace; None if there is none. Raises ConfigError
    for a file that is none of ours, and OSError."""
    traces = [path for path in paths if is_trace(path)]
    trace = read_together(traces) if traces else None
    sections: list[Html] = []
    for path in paths:
        if path not in traces:
            sections += [element("h2", path.name), _section(path)]
    if trace is not None:
        sections += [element("h2", ", ".join(path.name for path in traces)), trace_section(trace)]
    title = f"HiSpec: {paths[0].name}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    document = make_document(title, join(sections))
    write_atomically(target, document.encode("utf-8", "replace"))  # JSON may hold halves of characters
    return trace


def _section(path: Path) -> Html:
    try:
        with path.open("rb") as file:
            first = file.readline()
            if _is_row(first):
                return _rows_section(path)
            result = _parse(first + file.read())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if isinstance(result, dict) and {"engines", "ratio_to_plain", "acceptance"} <= result.keys():
        try:
            return bench_section(result)
        except _DAMAGE as error:
            raise ConfigError(f"{path}: not a whole result of `hispec bench`: {cut(repr(error))}") from None
    raise ConfigError(f"{path}: none of what a page is made of: {_READS}")


def _rows_section(path: Path) -> Html:
    """A manifest that this HiSpec cannot read is said to be so; the rows are shown without it."""
    rows = _read_rows(path)
    try:
        return rows_section(rows, load_manifest(_output_of(path)))
    except ConfigError as error:
        return rows_section(rows, None, str(error))


def _is_row(line: bytes) -> bool:
    value = _parse(line)
    return isinstance(value, dict) and {"index", "outputs", "usage", "error"} <= value.keys()


def _parse(content: bytes) -> Any:
    try:
        return parse_json(content)
    except ValueError:
        return None


def _read_rows(path: Path) -> Rows:
    """A last line that is still being written, or that a power failure cut off, is left out."""
    rows = Rows()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                rows.add(parse_json(line))
            except _DAMAGE as error:
                raise ConfigError(f"{path}, line {number}: not a row of a job: {cut(repr(error))}") from None
    return rows


def _output_of(rows: Path) -> Path:
    name = rows.name.removesuffix(_ROWS)
    return rows.with_name(name) if name else rows
