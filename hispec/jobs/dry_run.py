"""What a job would do: all rows checked, time and memory estimated from a few of them, nothing written."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tqdm import tqdm

from ..errors import RequestError
from ..trace.lines import check_replaced
from ..utils.console import count, make_bar, make_console, make_table
from ..workers.ray_cluster import check_engine
from .drive import Timed, drive, warm_up
from .manifest import make_manifest
from .output import Outcome, check_output, find_before, settle_format
from .reasons import Reasons
from .resume import Work, find_work
from .rows import BadRow, Row, read_rows
from .runner import make_row
from .schema import Job
from .writer import line_of

if TYPE_CHECKING:
    from ..llm import LLM

SAMPLE_S = 20.0  # seconds that the sample may take


@dataclass
class DryRun:
    """num_rows, num_done, failed_before   of the input; done before; of these, with errors
    reasons        of rows that cannot be served
    num_good       rows that would be done, with prompt_tokens and, at most, max_tokens in all, but for
                   num_unlimited of them, which may fill the context
    sample         rows that were done to measure, and num_tried, how many were begun
    seconds        estimated for all rows, at least, if some of the sample did not end in time; None if none
                   of it did
    output_bytes   likewise
    memory         bytes by purpose
    """

    job: Job
    num_rows: int
    num_done: int
    failed_before: int = 0
    reasons: Reasons = field(default_factory=Reasons)
    num_good: int = 0
    prompt_tokens: int = 0
    max_tokens: int = 0
    num_unlimited: int = 0
    num_tried: int = 0
    sample: Timed = field(default_factory=Timed)
    seconds: float | None = None
    output_bytes: float | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def all_failed(self) -> bool:
        """Whether all rows of the job have failed, or will."""
        return self.failed_before + self.reasons.total == self.num_rows > 0


def dry_run(job: Job, *, progress: bool = True) -> DryRun:
    """Checks every row that is not done with the model's own tokenizer and limits, and decodes a few. Raises
    what `run_job` raises before it writes."""
    check_output(job)
    job = settle_format(job)
    before = find_before(job)
    work = find_work(job, keeps=before is not None)
    found = DryRun(job, work.num_rows, work.num_done, work.num_done_failed)
    if work.num_done == work.num_rows:
        return found
    _check_trace(job)
    with closing(job.make_llm(trace=None)) as llm:  # one that is there is of rows that were done
        make_manifest(job, before, llm.fingerprints(job.speculative))
        rows = list(_sample(llm, job, found, work, progress))
        found.memory = llm.memory()
        _measure(llm, job, found, rows)
    return found


def _check_trace(job: Job) -> None:
    """Raises ConfigError for a trace that a run would not write."""
    if job.engine.trace is None:
        return
    if job.ray is not None:
        check_engine(job.engine)
    elif job.workers == 1:
        check_replaced(Path(job.engine.trace))


def _sample(llm: LLM, job: Job, found: DryRun, work: Work, progress: bool) -> list[Row]:
    """Checks all rows -> as many as run together, spread over the good ones."""
    wanted, step, seen = job.engine.max_num_seqs * llm.num_workers, 1, 0
    sample: list[Row] = []
    with make_bar(found.num_rows, "checking", "row", progress, initial=found.num_done) as bar:
        for row in read_rows(job, job.input, work.done, work.extent):
            bar.update()
            if isinstance(row, BadRow):
                found.reasons.add(row, row.problem)
                continue
            if (refusal := _refusal(llm, row, found)) is not None:
                found.reasons.add(row, refusal)
                continue
            if seen % step == 0:
                sample.append(row)
                if len(sample) == 2 * wanted:  # every second of them from here on
                    sample, step = sample[::2], 2 * step
            seen += 1
    return sample[:wanted]


def _refusal(llm: LLM, row: Row, found: DryRun) -> str | None:
    """Why the engine would refuse a row; None for a good one, whose tokens are counted."""
    try:
        num_prompt = len(llm.encode(row.prompt, chat=row.is_chat))
        llm.add(row.prompt, row.sampling, row.request_id, chat=row.is_chat)
    except RequestError as error:
        return str(error).removeprefix(f"{row.request_id}: ")
    llm.abort(row.request_id)
    found.num_good += 1
    found.prompt_tokens += num_prompt
    found.num_unlimited += row.sampling.max_tokens is None
    found.max_tokens += row.sampling.n * (row.sampling.max_tokens or 0)
    return None


def _measure(llm: LLM, job: Job, found: DryRun, rows: list[Row]) -> None:
    """Decodes `rows` together, for SAMPLE_S at most, and extends what was seen to all good rows."""
    if not rows:
        return
    warm_up(llm, job)
    found.num_tried, num_bytes = len(rows), 0

    def finish(row: Row | BadRow, outcome: Outcome) -> None:
        nonlocal num_bytes
        num_bytes += len(line_of(make_row(job, llm, row, outcome)))

    # A step of workers waits for a request that ends: it is woken just after the time at which all are to.
    timer = threading.Timer(SAMPLE_S + 0.1, llm.wake)
    timer.start()
    with tqdm(disable=True) as bar:
        try:
            drive(llm, rows, job.engine, finish, found.sample, bar, ends_s=time.perf_counter() + SAMPLE_S)
        finally:
            timer.cancel()
    if ended := found.sample.num_results:
        # The last rows of a sample run alone; those of a job do not, so that this is rather too long. Nobody
        # knows how long those are that had not ended: all take the time that they have had, at least.
        seconds = found.sample.seconds if ended == len(rows) else max(SAMPLE_S, found.sample.seconds)
        found.seconds = seconds / len(rows) * found.num_good
        found.output_bytes = num_bytes / ended * found.num_good


def print_dry_run(found: DryRun, file: IO[str] | None = None) -> None:
    """What was found, on stdout unless `file` is given."""
    table = make_table("")
    table.show_header = False
    table.add_column(overflow="fold")
    lines = {
        "rows": f"{found.num_rows}: {found.num_good} to do, {found.reasons.total} that cannot be served,"
        f" {found.num_done} done before"
    }
    if found.reasons.total:
        lines["errors"] = "\n".join(found.reasons.lines(5))
    if found.num_good:
        lines["tokens"] = f"{found.prompt_tokens} in prompts, at most {found.max_tokens} new"
        if found.num_unlimited:
            without = count(found.num_unlimited, "row")
            lines["tokens"] += f", besides those of {without} without max_tokens"
    if found.seconds is not None and found.output_bytes is not None:
        ended, what = found.sample.num_results, "about"
        seen = f"from {count(ended, 'row')} decoded in {found.sample.seconds:.1f} s"
        if ended < found.num_tried:
            what, seen = "at least", f"as {ended} of {found.num_tried} rows ended within {SAMPLE_S:.0f} s"
        lines["time"] = f"{what} {_duration(found.seconds)}, {seen}"
        lines["output"] = f"{what} {found.output_bytes / 1e6:.1f} MB in {found.job.output.path}"
    elif found.num_good:
        lines["time"] = f"not known: none of the rows tried ended within {SAMPLE_S:.0f} s"
    if found.memory:
        parts = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {value / 1e6:.0f} MB"
            for name, value in found.memory.items()
            if value >= 1e6
        ]
        lines["memory"] = ", ".join(parts) or "below 1 MB"
    for name, value in lines.items():
        table.add_row(name, value)
    make_console(file).print(table)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
