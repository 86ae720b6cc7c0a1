"""What of a job is done already, found before the model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ..errors import ConfigError, shown
from .inputs import Extent, find_files, read_records
from .manifest import AnotherJobsOutput
from .output import rows_path
from .row_index import RowIndex
from .rows import Identity, check_not_empty, identify
from .schema import Job

# The ends of lines that `output_row` and `openai_row` write. Millions of them are read before a job goes on,
# so they are not parsed whole.
_TEXT = rb'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(rb'\{"index": (\d{1,18}), "id": (null|-?\d+|' + _TEXT + rb"), ")
_OPENAI_HEAD = re.compile(
    rb'\{"id": "batch_req_([0-9a-f]{32})(?:-[0-9a-f]{16})?", "custom_id": (null|-?\d+|'
    + _TEXT
    + rb'), "response": \{"status_code": (\d+),'
)
_HASH = b', "hash": "'
_HEX = re.compile(rb"[0-9a-f]{32}")
_TAIL = len(_HASH) + 32 + len(b'"}\n')


@dataclass
class Work:
    """num_rows    rows of the input
    done        for each of them 1 if it is done
    num_done    how many are
    num_done_failed   of these, with errors
    num_bytes   the beginning of the output's rows that consists of whole lines
    rewrites    whether lines are to be taken out of it first: those of rows that are done again
    extent      what was read of the input: later reads take as much, so that no row changes its place
    """

    num_rows: int
    done: bytearray
    num_done: int
    num_bytes: int
    rewrites: bool
    num_done_failed: int = 0
    extent: Extent = field(default_factory=dict)

    def turns(self) -> Iterator[int]:
        """The rows that are not done."""
        return (index for index in range(self.num_rows) if not self.done[index])


def find_work(job: Job, keeps: bool) -> Work:
    """Reads the input, and of the output what is kept. Raises ConfigError for an id that two rows have, an
    output of which a line is none of ours, and a row whose id is done with another prompt or sampling."""
    path = rows_path(job)
    work = Work(0, bytearray(), num_done=0, num_bytes=0, rewrites=False)
    with RowIndex() as index:
        if keeps:
            for line, work.num_bytes in read_output(path):
                if line is None or (line.failed and job.output.retry_failed):
                    work.rewrites = True
                    continue
                index.add_done(line.number, line.identity, line.failed)
        files = find_files(job.input)
        read = [0] * len(files)
        for number, record in enumerate(read_records(job.input, dict.fromkeys(files))):
            work.num_rows = number + 1
            read[record.place] += 1
            index.add_row(number, identify(job.input, record))
        work.extent = dict(zip(files, read, strict=True))
        check_not_empty(job.input, work.num_rows)
        if repeated := index.find_repeated_id():
            first, second = (_where(job, work, number) for number in (repeated.first, repeated.second))
            more = f" (in all {repeated.count} rows have one that an earlier row has)"
            raise ConfigError(
                f"input.path: {job.input}: {first} and {second} have the same id"
                f"{more if repeated.count > 1 else ''}; give each row its own, or none"
            )
        work.done = bytearray(work.num_rows)
        num_changed, changed = 0, work.num_rows
        for number, is_same, failed in index.done_rows():
            work.done[number] = 1
            work.num_done += 1
            work.num_done_failed += failed
            if not is_same:
                num_changed, changed = num_changed + 1, min(changed, number)
        if num_changed and not job.output.only_missing:
            more = f" ({num_changed} such rows)" if num_changed > 1 else ""
            raise AnotherJobsOutput(
                f"output.path: {path} has a result for the id of {_where(job, work, changed)}{more}, of"
                " another prompt or sampling. If it has an error, do it again with --retry-failed; else start"
                " anew with --new (output.overwrite=true), keep the results there with --only-missing"
                " (output.only_missing=true), or choose another output.path"
            )
    return work


def _where(job: Job, work: Work, number: int) -> str:
    """Where a row of the input stands, in words."""
    return next(islice(read_records(job.input, work.extent), number, None)).where


def read_output(path: Path) -> Iterator[tuple[OutputLine | None, int]]:
    """(line, bytes up to its end) of each line; None for one of which a power failure has left zeros. A last
    line without its end is passed over. Raises AnotherJobsOutput for any other line that is none of ours,
    ConfigError if the file can't be read."""
    num_bytes = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                found = read_line(line)
                if found is None and b"\0" not in line:
                    raise AnotherJobsOutput(
                        f"output.path: line {number} of {path} is no row of an output:"
                        f" {shown(line.decode('utf-8', 'replace'))}; take it out and its row is done again,"
                        " start anew with --new (output.overwrite=true), or choose another output.path"
                    )
                num_bytes += len(line)
                yield found, num_bytes
    except OSError as error:
        raise ConfigError(f"output.path: cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A row of an output: its number in the input of then (-1 = it does not say), and whether it has an
    error."""

    number: int
    identity: Identity
    failed: bool


def is_to_drop(job: Job, line: bytes) -> bool:
    """Whether a line is taken out of an output, because its row is done again."""
    found = read_line(line)
    return found is None or (found.failed and job.output.retry_failed)


def read_line(line: bytes) -> OutputLine | None:
    """The row of a line of an output; None for what is no such line."""
    if not line.endswith(b"}\n") or b"\0" in line:
        return None
    if head := _OPENAI_HEAD.match(line):
        number, identity, failed = -1, _identity(head[2], head[1]), head[3] != b"200"
    else:
        head = _HEAD.match(line)
        digits = line[-_TAIL + len(_HASH) : -3]
        if head is None or line[-_TAIL : -_TAIL + len(_HASH)] != _HASH or not _HEX.fullmatch(digits):
            return None
        number, identity = int(head[1]), _identity(head[2], digits)
        failed = not line.endswith(b'"error": null', 0, -_TAIL)
    return None if identity is None else OutputLine(number, identity, failed)


def _identity(row_id: bytes, content_hash: bytes) -> Identity | None:
    try:
        if row_id[:1] == b'"' and b"\\" not in row_id:  # most are, and JSON takes its time
            return Identity(row_id[1:-1].decode(), content_hash.decode())
        return Identity(json.loads(row_id), content_hash.decode())
    except ValueError:
        return None
