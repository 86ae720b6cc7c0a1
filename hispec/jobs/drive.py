"""Keeps an engine fed with rows, and counts what comes out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..config import EngineConfig
from ..errors import RequestError
from ..metrics.sample import Sample
from ..utils.environment import watch_others
from .output import Outcome, RowError
from .reasons import Reasons
from .rows import BadRow, Row, read_rows
from .schema import Job

if TYPE_CHECKING:
    from ..llm import LLM

REQUESTS_PER_ROW = 4  # requests in the engine per row of its batch: enough that it never runs dry
RESULTS_WAITING_PER_ROW = 64  # results that may wait in memory for those of slower earlier prompts
WARM_UP_ROWS = 8
SECONDS_BETWEEN_RATES = 0.5  # that the bar shows: asking the engine for its counts takes time


@dataclass
class Timed:
    """One timed pass over the rows.

    ttft_s, tpot_s  of each output, in seconds (docs/metrics.md)
    num_full        rows with an output that max_model_len ended
    others          cores that other programs kept busy meanwhile
    """

    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_results: int = 0
    num_full: int = 0
    ttft_s: Sample = field(default_factory=Sample)
    tpot_s: Sample = field(default_factory=Sample)
    reasons: Reasons = field(default_factory=Reasons)
    others: float | None = None

    @property
    def num_errors(self) -> int:
        return self.reasons.total

    def count(self, row: Row | BadRow, outcome: Outcome, seconds: float) -> None:
        """Adds a row that ended `seconds` after the start."""
        self.seconds = seconds
        if isinstance(row, BadRow):
            self.reasons.add(row, row.problem)
            return
        if isinstance(outcome, RowError) or outcome.error is not None:
            self.reasons.add(row, outcome.message if isinstance(outcome, RowError) else outcome.error or "")
            return
        self.num_results += 1
        self.num_full += any(output.is_full for output in outcome.outputs)
        self.prompt_tokens += len(outcome.prompt_token_ids)
        self.completion_tokens += sum(len(output.token_ids) for output in outcome.outputs)
        for metrics in (output.metrics for output in outcome.outputs):
            if metrics is not None and metrics.ttft_s is not None:
                self.ttft_s.add(metrics.ttft_s)
            if metrics is not None and metrics.tpot_s is not None:
                self.tpot_s.add(metrics.tpot_s)

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.seconds if self.seconds else 0.0


def drive(
    llm: LLM,
    rows: Iterable[Row | BadRow],
    engine: EngineConfig,
    finish: Callable[[Row | BadRow, Outcome], None],
    timed: Timed,
    bar: tqdm[Any],
    num_waiting: Callable[[], int] = lambda: 0,
    ends_s: float = math.inf,
) -> None:
    """Takes rows as the engine has room for them, and calls `finish` once for each, in the order in which
    they end.

    num_waiting   says how many finished rows are held back; while there are too many, no new row is taken
    ends_s        by time.perf_counter, when rows that have not ended are aborted, and no other is taken
    """
    source = iter(rows)
    num_rows = engine.max_num_seqs * llm.num_workers
    running: dict[str, Row] = {}
    exhausted, shown_at = False, 0.0
    started, others = time.perf_counter(), watch_others()

    def end(row: Row | BadRow, outcome: Outcome) -> None:
        finish(row, outcome)
        timed.count(row, outcome, time.perf_counter() - started)
        nonlocal shown_at
        if not bar.disable and timed.seconds >= shown_at:
            shown_at = timed.seconds + SECONDS_BETWEEN_RATES
            bar.set_postfix_str(_progress(llm, timed), refresh=False)
        bar.update()

    while running or not exhausted:
        if time.perf_counter() > ends_s:
            llm.abort(list(running))
            break
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
    if not bar.disable and timed.seconds:  # else the last lines would be of before the last rows
        bar.set_postfix_str(_progress(llm, timed), refresh=False)
    if llm.num_workers == 1:  # else workers would count among the others
        timed.others = others()


def _progress(llm: LLM, timed: Timed) -> str:
    """Speed, errors and acceptance so far, in words."""
    words = f"{timed.tokens_per_s:.1f} tokens/s, {timed.num_errors} errors"
    counts = llm.stats()
    if not counts["drafted"]:
        return words
    kept, gained = counts["draft_kept"] / counts["drafted"], counts["committed"] / counts["rounds"]
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
