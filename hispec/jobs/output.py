"""Output rows: what they are, and whether they may be written, which is checked before the work starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from ..outputs import CompletionOutput, RequestOutput
from ..utils.files import check_folder, finite, is_same
from .inputs import find_files, import_arrow, pattern_of
from .manifest import (
    AnotherJobsOutput,
    Manifest,
    check_same,
    manifest_path,
    read_manifest,
    settings_that_matter,
)
from .rows import BadRow, Row, find_format
from .schema import COMPRESSED, STANDARD, Job, OutputConfig, output_format


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
Split = Callable[[Sequence[int], str, bool], list[str] | None]  # LLM.split_text


def rows_path(job: Job) -> Path:
    """The file that rows are appended to: the output itself, or lines beside it if the output is a table or
    compressed, which can only be made as a whole."""
    path = job.output.path
    is_made_last = output_format(job) in ("parquet", "csv") or path.suffix.lower() in COMPRESSED
    return path.with_name(f"{path.name}.rows.jsonl") if is_made_last else path


def settle_format(job: Job) -> Job:
    """The job with the format of its input, which is found once, since files may come to it. Raises
    ConfigError if the output has no place for what is asked for."""
    job = job.model_copy(update={"input": find_format(job.input)})
    if output_format(job) == "openai" and job.sampling.tiers:
        raise ConfigError(
            "sampling.tiers: OpenAI's lines have no place for them; set output.format=jsonl, or tiers=false"
        )
    return job


def check_output(job: Job) -> None:
    """Raises ConfigError if the output can't be written.

    Nothing is created and an existing file is left as it is until the first row is due, so a job that fails
    to start leaves and destroys nothing.
    """
    output, kind = job.output, output_format(job)
    if output.path == STANDARD and output.upload is not None:
        raise ConfigError('output.upload: standard output ("-") is not kept; name a file in output.path')
    if output.path == STANDARD:
        if output.compare_plain or kind in ("parquet", "csv"):
            raise ConfigError(
                'output.path: "-" takes lines of JSON alone, without compare_plain; name a file'
            )
        return
    if kind == "parquet" or output.path.suffix.lower() == ".zst":
        import_arrow(f"output.path: writing {output.path}")
    paths = dict.fromkeys((output.path, rows_path(job), manifest_path(output.path)))
    for path in paths:  # before files are looked for: a pattern that is too wide may find folders, too
        if (pattern := pattern_of(job.input, path)) is not None:
            raise ConfigError(
                f"output.path: {path} would be a file of the input {pattern}, too; choose a path that this"
                " pattern does not fit, such as one in another folder"
            )
    sources = find_files(job.input)
    for path in paths:
        _check_path(job, path, sources)


def find_before(job: Job) -> Manifest | None:
    """The manifest of the rows that are kept; None where there are none. Raises ConfigError if there are
    rows that must not be replaced."""
    output, rows = job.output, rows_path(job)
    if output.path == STANDARD or output.overwrite:
        return None
    if not (rows.exists() and rows.stat().st_size):
        if rows == output.path or not output.path.exists():
            return None
        begun = read_manifest(output.path) if rows.exists() else None
        # An empty file with such a manifest: a job that was to replace the output ended before its first row.
        if begun is None or begun.done or not output.resume:
            raise AnotherJobsOutput(
                f"output.path: {output.path} exists, but {rows.name}, from which a job goes on, does not;"
                " start anew with --new (output.overwrite=true), or choose another output.path"
            )
        check_same(output.path, begun.settings, settings_that_matter(job))
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


def _check_path(job: Job, path: Path, sources: Sequence[Path]) -> None:
    if any(is_same(path, source) for source in sources):
        raise ConfigError(f"output.path: {path} is the input file; choose another path")
    trace = job.engine.trace
    if trace is not None and is_same(path, Path(trace)):
        raise ConfigError(f"output.path: {path} is engine.trace too; choose another path for one of them")
    place = Path(os.path.realpath(path))  # of a link, what it leads to; of one that leads to itself, a link
    if place.is_symlink() or (place.exists() and not place.is_file()):
        raise ConfigError(f"output.path: {path} is not a regular file; choose another path")
    if not place.exists():
        if path.is_symlink() and not place.parent.exists():
            raise ConfigError(
                f"output.path: {path} leads to {place}, in a folder that does not exist; make it, or choose"
                " another path"
            )
        # Of the folders that are missing, the first is made here.
        check_folder("output.path", next(folder for folder in place.parents if folder.exists()))
        return
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"output.path: cannot write {path}: {error.strerror}") from None


def error_of(outcome: Outcome) -> Outcome:
    """A RowError in place of outputs that failed."""
    is_failed = isinstance(outcome, RequestOutput) and outcome.error is not None
    return RowError("failed", outcome.error or "") if is_failed else outcome  # type: ignore[union-attr]


def output_row(
    row: Row | BadRow,
    outcome: Outcome,
    config: OutputConfig,
    split: Split = lambda token_ids, text, chat: None,
) -> dict[str, Any]:
    """The output row of an input row: its outputs, or what went wrong. split: a text by its tokens, for
    outputs with tiers."""
    outcome = error_of(outcome)
    if isinstance(outcome, RowError):
        body: dict[str, Any] = {"outputs": [], "usage": None, "error": {**asdict(outcome), "line": row.line}}
    else:
        num_new = sum(len(output.token_ids) for output in outcome.outputs)
        usage = {"prompt_tokens": len(outcome.prompt_token_ids), "completion_tokens": num_new}
        outputs = [_output_fields(output, config, split, row.is_chat) for output in outcome.outputs]
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


def _output_fields(
    output: CompletionOutput, config: OutputConfig, split: Split, is_chat: bool
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if config.token_ids:
        values["token_ids"] = output.token_ids
    if output.logprobs is not None:
        values["logprobs"] = [finite(asdict(entry)) for entry in output.logprobs]
    if output.tiers is not None:
        values["tiers"] = output.tiers
        if (pieces := split(output.token_ids, output.text, is_chat)) is not None:
            values["token_texts"] = pieces
    return values
