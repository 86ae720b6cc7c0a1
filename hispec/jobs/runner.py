"""Runs a job: finds what is left to do, has it done, writes results, and goes on where it was cut short."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..outputs import RequestOutput
from ..utils.console import make_bar
from ..utils.environment import environment
from .drive import Timed, drive, warm_up
from .inputs import describe_input
from .manifest import Manifest, make_manifest
from .openai_batch import openai_row
from .output import (
    Outcome,
    check_output,
    error_of,
    find_before,
    output_row,
    rows_path,
    settle_format,
)
from .rates import Rates, sum_counts
from .resume import Work, find_work, is_to_drop
from .rows import BadRow, Row, read_rows
from .schema import STANDARD, Job, output_format
from .tables import make_output
from .upload import Upload
from .writer import RowWriter, drop_lines, hold

if TYPE_CHECKING:
    from ..llm import LLM


@dataclass
class Comparison:
    """Plain decoding of the rows that a speculative pass has finished."""

    plain: Timed
    num_identical: int
    num_compared: int
    row_invariant: bool


@dataclass
class JobReport:
    """The results of a run. `resumed` rows were done before, `failed_before` of them with errors; the other
    numbers are of this run only."""

    job: Job
    num_rows: int
    resumed: int
    failed_before: int = 0
    timed: Timed = field(default_factory=Timed)
    stats: dict[str, Any] = field(default_factory=dict)
    rates: Rates | None = None
    comparison: Comparison | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def all_failed(self) -> bool:
        """Whether all rows of the job failed, those done before included."""
        return self.failed_before + self.timed.num_errors == self.num_rows > 0


class JobInterrupted(KeyboardInterrupt):
    """Ctrl-C during a job; the message says what is done. The output file ends with a whole line."""


def run_job(job: Job, *, progress: bool = True, on_loaded: Callable[[], None] | None = None) -> JobReport:
    """Runs every row of the job's input that is not done yet and writes its output; `progress` shows a bar
    on stderr; on_loaded is called once the model is there.

    Raises ConfigError (before the model is loaded, wherever that is possible), CheckpointError, OutputError
    if the output can't be written any more, and JobInterrupted on Ctrl-C. Bad rows raise nothing: they are
    rows of the output.
    """
    check_output(job)
    job = settle_format(job)
    with ExitStack() as stack:
        held, upload = None, None
        if job.output.upload is not None:
            upload = Upload(job)
            upload.restore()
        if job.output.path != STANDARD and rows_path(job).exists():
            held = stack.enter_context(closing(hold(rows_path(job))))  # from before it is read
        before = find_before(job)
        work = find_work(job, keeps=before is not None)
        report = JobReport(job, work.num_rows, work.num_done, work.num_done_failed)
        run = _Run(job, work, report, held, upload, progress)
        if before is not None and work.num_done == work.num_rows:
            run.tidy_up(before)
            return report
        inputs = describe_input(work.extent)
        from ..loading.target_model import select_device

        report.environment = environment(select_device(job.engine.device))
        settings = {"enable_prefix_caching": False} if job.output.compare_plain else {}
        llm = stack.enter_context(closing(job.make_llm(**settings)))
        if on_loaded is not None:
            on_loaded()
        manifest = make_manifest(job, before, llm.fingerprints(job.speculative))
        manifest.input, manifest.rows = inputs, work.num_rows
        run.do_rows(llm, manifest)
    return report


def make_row(job: Job, llm: LLM, row: Row | BadRow, outcome: Outcome) -> dict[str, Any]:
    """What is written of a row."""
    if output_format(job) == "openai":
        return openai_row(row, error_of(outcome), job.model, llm.token_bytes)
    return output_row(row, outcome, job.output, llm.split_text)


@dataclass
class _Run:
    """A job whose work is known.

    held      the file of rows, if it was there
    digests   of the rows that plain decoding is to be compared with
    """

    job: Job
    work: Work
    report: JobReport
    held: Any
    upload: Upload | None
    progress: bool
    digests: dict[int, bytes] = field(default_factory=dict)

    def tidy_up(self, before: Manifest) -> None:
        """What a run has left to do that was cut short after its last row."""
        job, work = self.job, self.work
        rows, path = rows_path(job), job.output.path
        if work.rewrites:
            self._rewrite()
        if rows.stat().st_size != work.num_bytes:
            RowWriter(rows, work.num_bytes, held=self.held).close()
        if rows != path and (not path.exists() or path.stat().st_mtime_ns < rows.stat().st_mtime_ns):
            make_output(job)
        if (before.rows, before.done, before.finished is None) != (work.num_rows, work.num_done, False):
            before.rows = work.num_rows
            before.write(path, num_done=work.num_done, num_errors=work.num_done_failed)
        self._finish_upload()

    def do_rows(self, llm: LLM, manifest: Manifest) -> None:
        """Every row that is not done yet, and what is made of all."""
        job, work, report, output = self.job, self.work, self.report, self.job.output
        if output.compare_plain:
            llm.set_tracing(False)  # a trace is of the job's own pass
            for speculative in (None, job.speculative):
                llm.set_speculative(speculative)
                warm_up(llm, job)
            llm.set_tracing(True)
        llm.reset_stats()
        path, rows = output.path, rows_path(job)
        if work.rewrites:
            self._rewrite()
        elif self.upload is not None and output.overwrite:
            self.upload.restart()
        turns = work.turns() if output.order == "input" else None
        with RowWriter(rows, work.num_bytes, turns, output.sync_s, output.way_on, self.held) as writer:

            def note() -> None:
                if path != STANDARD:
                    num_errors = work.num_done_failed + report.timed.num_errors
                    manifest.write(path, num_done=work.num_done + writer.num_written, num_errors=num_errors)

            note()
            try:
                with self.upload or nullcontext():
                    self._write_rows(llm, writer)
            except KeyboardInterrupt:
                where = "standard output" if path == STANDARD else rows
                raise JobInterrupted(
                    f"{work.num_done + writer.num_written} of {report.num_rows} rows are done, whole lines of"
                    f" {where}; {output.way_on}"
                ) from None
            finally:
                with suppress(Exception):  # of an engine that failed
                    manifest.counts = sum_counts(manifest.counts, llm.stats())
                with suppress(OSError):  # the rows say more than it
                    note()
            with self._after_all_rows(rows, f"{path} is not made of them yet; {output.way_on}"):
                make_output(job)
        self._finish_upload()
        report.stats = llm.stats()
        report.rates = Rates.of(report.stats, job.speculative)
        if output.compare_plain and self.digests:
            with self._after_all_rows(path, "the comparison with plain decoding is not"):
                report.comparison = self._compare(llm)

    @contextmanager
    def _after_all_rows(self, where: Path, what: str) -> Iterator[None]:
        """Raises JobInterrupted on Ctrl-C, which says where the rows are, and what is not done."""
        try:
            yield
        except KeyboardInterrupt:
            raise JobInterrupted(f"all {self.work.num_rows} rows are done, in {where}; only {what}") from None

    def _rewrite(self) -> None:
        """Takes those rows out of the output that are done again."""
        job, work = self.job, self.work
        if self.upload is not None:
            self.upload.restart()
        is_dropped, way_on = partial(is_to_drop, job), job.output.way_on
        self.held, work.num_bytes = drop_lines(rows_path(job), self.held, work.num_bytes, is_dropped, way_on)

    def _finish_upload(self) -> None:
        if self.upload is not None:
            output = self.job.output
            what = f"{output.upload} is not made of them yet; {output.way_on}"
            with self._after_all_rows(rows_path(self.job), what):
                self.upload.finish()

    def _write_rows(self, llm: LLM, writer: RowWriter) -> None:
        """The job's own pass: every row that is not done yet."""
        job, work, report = self.job, self.work, self.report

        def finish(row: Row | BadRow, outcome: Outcome) -> None:
            if job.output.compare_plain and isinstance(outcome, RequestOutput):
                self.digests[row.index] = digest(outcome)
            writer.add(row.index, make_row(job, llm, row, outcome))
            if self.upload is not None:
                self.upload.check()

        rows = read_rows(job, job.input, work.done, work.extent)
        with make_bar(report.num_rows, "rows", "row", self.progress, initial=report.resumed) as bar:
            drive(llm, rows, job.engine, finish, report.timed, bar, lambda: writer.num_waiting)

    def _compare(self, llm: LLM) -> Comparison:
        """The same rows through plain decoding, compared token for token."""
        job, digests = self.job, self.digests
        llm.set_tracing(False)
        llm.set_speculative(None)
        llm.reset_stats()  # the bar shows what this pass keeps: no drafts
        timed = Timed()
        num_identical = 0

        def finish(row: Row | BadRow, outcome: Outcome) -> None:
            nonlocal num_identical
            num_identical += isinstance(outcome, RequestOutput) and digest(outcome) == digests[row.index]

        rows = (row for row in read_rows(job, job.input, extent=self.work.extent) if row.index in digests)
        with make_bar(len(digests), "plain", "row", self.progress) as bar:
            drive(llm, rows, job.engine, finish, timed, bar)
        return Comparison(timed, num_identical, len(digests), llm.row_invariant)


def digest(result: RequestOutput) -> bytes:
    """Equal for equal token ids and reasons to stop: what two runs must agree in."""
    content = [(output.token_ids, output.finish_reason, output.stop_reason) for output in result.outputs]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).digest()
