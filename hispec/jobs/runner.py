"""Runs a job: keeps the engine fed from a file of any length, writes results, measures."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..config import EngineConfig
from ..errors import RequestError, cut
from ..outputs import RequestOutput
from ..utils.console import make_bar
from ..utils.environment import environment, watch_others
from .inputs import describe_input
from .manifest import Manifest, make_manifest
from .openai_batch import openai_row
from .output import (
    Outcome,
    RowError,
    check_output,
    error_of,
    find_before,
    output_format,
    output_row,
    rows_path,
)
from .rates import Rates
from .resume import Work, find_work, is_to_drop
from .rows import BadRow, Row, read_rows
from .schema import STANDARD, Job
from .tables import make_output
from .writer import RowWriter, drop_lines, hold

if TYPE_CHECKING:
    from ..llm import LLM

REQUESTS_PER_ROW = 4  # requests in the engine per row of its batch: enough that it never runs dry
RESULTS_WAITING_PER_ROW = 64  # results that may wait in memory for those of slower earlier prompts
WARM_UP_ROWS = 8
SECONDS_BETWEEN_RATES = 0.5  # that the bar shows: asking the engine for its counts takes time
MOST_REASONS = 1000  # different reasons of errors that are counted: there may be millions of rows
MOST_REASON = 200  # characters of each
_LINE = re.compile(r"^(?:[^:]+, )?line \d+: ")


@dataclass
class Timed:
    """One timed pass over the rows."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_results: int = 0
    num_errors: int = 0
    num_full: int = 0  # rows with an output that max_model_len ended
    reasons: Counter[str] = field(default_factory=Counter)  # of errors
    others: float | None = None  # cores that other programs kept busy meanwhile

    def count(self, outcome: Outcome, seconds: float) -> None:
        """Adds a row that ended `seconds` after the start."""
        self.seconds = seconds
        if isinstance(outcome, RowError) or outcome.error is not None:
            self.num_errors += 1
            reason = outcome.message if isinstance(outcome, RowError) else outcome.error
            reason = reason_of(reason or "")
            if reason in self.reasons or len(self.reasons) < MOST_REASONS:
                self.reasons[reason] += 1
            return
        self.num_results += 1
        self.num_full += any(output.is_full for output in outcome.outputs)
        self.prompt_tokens += len(outcome.prompt_token_ids)
        self.completion_tokens += sum(len(output.token_ids) for output in outcome.outputs)

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.seconds if self.seconds else 0.0


def reason_of(message: str) -> str:
    """What many messages have in common, for counting them: without the line."""
    return cut(_LINE.sub("", message), MOST_REASON)


@dataclass
class Comparison:
    """Plain decoding of the rows that a speculative pass has finished."""

    plain: Timed
    num_identical: int
    num_compared: int
    row_invariant: bool


@dataclass
class JobReport:
    """The results of a run. `resumed` rows were done before; the other numbers are of this run only."""

    job: Job
    num_rows: int
    resumed: int
    timed: Timed = field(default_factory=Timed)
    stats: dict[str, Any] = field(default_factory=dict)
    rates: Rates | None = None
    comparison: Comparison | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def all_failed(self) -> bool:
        """Whether all rows of this run failed."""
        return self.timed.num_errors > 0 and self.timed.num_results == 0


class JobInterrupted(KeyboardInterrupt):
    """Ctrl-C during a job; the message says what is done. The output file ends with a whole line."""


def run_job(job: Job, *, progress: bool = True) -> JobReport:
    """Runs every row of the job's input that is not done yet and writes its output; `progress` shows a bar
    on stderr.

    Raises ConfigError (before the model is loaded, wherever that is possible), CheckpointError, OutputError
    if the output can't be written any more, and JobInterrupted on Ctrl-C. Bad rows raise nothing: they are
    rows of the output.
    """
    check_output(job)
    with ExitStack() as stack:
        held = None
        if job.output.path != STANDARD and rows_path(job).exists():
            held = stack.enter_context(closing(hold(rows_path(job))))  # from before it is read
        before = find_before(job)
        work = find_work(job, keeps=before is not None)
        report = JobReport(job, work.num_rows, resumed=work.num_done)
        if before is not None and work.num_done == work.num_rows:
            _tidy_up(job, before, work, held)
            return report
        report.environment = environment()
        settings = {"enable_prefix_caching": False} if job.output.compare_plain else {}
        llm = stack.enter_context(closing(job.make_llm(**settings)))
        manifest = make_manifest(job, before, llm.fingerprints(job.speculative))
        manifest.input, manifest.rows = describe_input(job.input), work.num_rows
        _run(llm, job, report, work, held, manifest, progress)
    return report


def _tidy_up(job: Job, before: Manifest, work: Work, held: Any) -> None:
    """What a run has left to do that was cut short after its last row."""
    rows, path = rows_path(job), job.output.path
    if work.rewrites:
        held, work.num_bytes = drop_lines(rows, held, work.num_bytes, partial(is_to_drop, job))
    if rows.stat().st_size != work.num_bytes:
        RowWriter(rows, work.num_bytes, held=held).close()
    if rows != path and (not path.exists() or path.stat().st_mtime_ns < rows.stat().st_mtime_ns):
        make_output(job)
    if (before.rows, before.done, before.finished is None) != (work.num_rows, work.num_done, False):
        before.rows = work.num_rows
        before.write(path, num_done=work.num_done, num_errors=work.num_failed)


def _run(
    llm: LLM, job: Job, report: JobReport, work: Work, held: Any, manifest: Manifest, progress: bool
) -> None:
    if job.output.compare_plain:
        llm.set_tracing(False)  # a trace is of the job's own pass
        for speculative in (None, job.speculative):
            llm.set_speculative(speculative)
            warm_up(llm, job)
        llm.set_tracing(True)
    digests: dict[int, bytes] = {}
    llm.reset_stats()
    path = job.output.path
    rows, output = rows_path(job), job.output
    if work.rewrites:
        held, work.num_bytes = drop_lines(rows, held, work.num_bytes, partial(is_to_drop, job))
    turns = work.turns() if output.order == "input" else None
    with RowWriter(rows, work.num_bytes, turns, output.sync_s, output.way_on, held) as writer:

        def note() -> None:
            if path != STANDARD:
                num_errors = work.num_failed + report.timed.num_errors
                manifest.write(path, num_done=work.num_done + writer.num_written, num_errors=num_errors)

        note()
        try:
            _write_rows(llm, job, report, work, writer, digests, progress)
        except KeyboardInterrupt:
            raise JobInterrupted(
                f"{work.num_done + writer.num_written} of {report.num_rows} rows are done, whole lines of"
                f" {rows_path(job)}; {job.output.way_on}"
            ) from None
        finally:
            with suppress(OSError):  # the rows say more than it
                note()
        try:
            make_output(job)
        except KeyboardInterrupt:
            raise JobInterrupted(
                f"all {report.num_rows} rows are done, in {rows_path(job)}; only {job.output.path} is not"
                " made of them yet, which the same command does"
            ) from None
    report.stats = llm.stats()
    report.rates = Rates.of(report.stats, job.speculative)
    if job.output.compare_plain and digests:
        try:
            report.comparison = _compare(llm, job, report, digests, progress)
        except KeyboardInterrupt:
            raise JobInterrupted(
                f"all {report.num_rows} rows are done, in {job.output.path}; only the comparison with plain"
                " decoding is not"
            ) from None


def _write_rows(
    llm: LLM,
    job: Job,
    report: JobReport,
    work: Work,
    writer: RowWriter,
    digests: dict[int, bytes],
    progress: bool,
) -> None:
    """The job's own pass: every row that is not done yet."""
    is_openai = output_format(job) == "openai"

    def finish(row: Row | BadRow, outcome: Outcome) -> None:
        if job.output.compare_plain and isinstance(outcome, RequestOutput):
            digests[row.index] = digest(outcome)
        outcome = error_of(outcome)
        if is_openai:
            writer.add(row.index, openai_row(row, outcome, job.model, llm.token_text))
        else:
            writer.add(row.index, output_row(row, outcome, job.output))

    rows = read_rows(job, job.input, work.done)
    with make_bar(report.num_rows, "rows", "row", progress, initial=report.resumed) as bar:
        drive(llm, rows, job.engine, finish, report.timed, bar, lambda: writer.num_waiting)


def _compare(llm: LLM, job: Job, report: JobReport, digests: dict[int, bytes], progress: bool) -> Comparison:
    """The same rows through plain decoding, compared token for token."""
    llm.set_tracing(False)
    llm.set_speculative(None)
    timed = Timed()
    num_identical = 0

    def finish(row: Row | BadRow, outcome: Outcome) -> None:
        nonlocal num_identical
        num_identical += isinstance(outcome, RequestOutput) and digest(outcome) == digests[row.index]

    rows = (row for row in read_rows(job, job.input) if row.index in digests)
    with make_bar(len(digests), "plain", "row", progress) as bar:
        drive(llm, rows, job.engine, finish, timed, bar)
    return Comparison(timed, num_identical, len(digests), llm.row_invariant)


def drive(
    llm: LLM,
    rows: Iterable[Row | BadRow],
    engine: EngineConfig,
    finish: Callable[[Row | BadRow, Outcome], None],
    timed: Timed,
    bar: tqdm[Any],
    num_waiting: Callable[[], int] = lambda: 0,
) -> None:
    """Takes rows as the engine has room for them, and calls `finish` once for each, in the order in which
    they end.

    `num_waiting` says how many finished rows are held back; while there are too many, no new row is taken.
    """
    source = iter(rows)
    num_rows = engine.max_num_seqs * llm.num_workers
    running: dict[str, Row] = {}
    exhausted, shown_at = False, 0.0
    started, others = time.perf_counter(), watch_others()

    def end(row: Row | BadRow, outcome: Outcome) -> None:
        finish(row, outcome)
        timed.count(outcome, time.perf_counter() - started)
        nonlocal shown_at
        if not bar.disable and timed.seconds >= shown_at:
            shown_at = timed.seconds + SECONDS_BETWEEN_RATES
            bar.set_postfix_str(_progress(llm, timed), refresh=False)
        bar.update()

    while running or not exhausted:
        has_room = len(running) < REQUESTS_PER_ROW * num_rows
        holds_back = bool(running) and num_waiting() >= RESULTS_WAITING_PER_ROW * num_rows
        if exhausted or holds_back or not has_room:
            for result in llm.step():
                end(running.pop(result.request_id), result)
            continue
        row = next(source, None)
        if row is None:
            exhausted = True
        elif isinstance(row, BadRow):
            end(row, RowError("invalid_line", row.message))
        else:
            try:
                llm.add(row.prompt, row.sampling, row.request_id, chat=row.is_chat)
                running[row.request_id] = row
            except RequestError as error:
                end(row, RowError("refused", str(error).removeprefix(f"{row.request_id}: ")))
    if llm.num_workers == 1:  # else workers would count among the others
        timed.others = others()


def _progress(llm: LLM, timed: Timed) -> str:
    """Speed, errors and acceptance so far, in words."""
    words = f"{timed.tokens_per_s:.1f} tokens/s, {timed.num_errors} errors"
    counts = llm.stats()
    if not counts["drafted"]:
        return words
    kept, gained = counts["draft_accepted"] / counts["drafted"], counts["committed"] / counts["rounds"]
    return f"{words}, {kept:.0%} of drafts kept, {gained:.2f} tokens/round"


def warm_up(llm: LLM, job: Job) -> None:
    """Generates a few tokens of the first rows, so that compiling and first touches of memory are not timed.
    Each row is one token longer than the one before: the batch shrinks through all its sizes.
    """
    rows = [row for row in islice(read_rows(job, job.input), WARM_UP_ROWS) if isinstance(row, Row)]
    short = []
    for num_tokens, row in enumerate(rows, start=2):
        limits = {"n": 1, "max_tokens": num_tokens, "min_tokens": 0}
        short.append(replace(row, sampling=row.sampling.model_copy(update=limits)))
    with tqdm(disable=True) as bar:
        drive(llm, short, job.engine, lambda row, outcome: None, Timed(), bar)


def digest(result: RequestOutput) -> bytes:
    """Equal for equal token ids and reasons to stop: what two runs must agree in."""
    content = [(output.token_ids, output.finish_reason, output.stop_reason) for output in result.outputs]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).digest()
