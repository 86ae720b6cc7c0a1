"""Real runs of the engine: the target's own answers, and the timing of plans against each other."""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..config import SpeculativeConfig
from ..errors import ConfigError, RequestError
from ..jobs.rows import BadRow, Row, read_rows
from ..jobs.schema import Job
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..llm import LLM

TokenIds = list[int]
ALL = "all"  # the task of rows whose metadata names none
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Step:
    """One step of the engine: prompt positions that it computed, and rows of its round."""

    seconds: float
    prefill_tokens: int
    rows: int


@dataclass
class PlanRuns:
    """Timed runs of one plan over all prompts, and what the engine counted in the last of them."""

    speculative: SpeculativeConfig | None
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[TokenIds]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s_runs(self) -> list[float]:
        return [sum(map(len, outputs)) / seconds for outputs, seconds in zip(self.outputs, self.seconds, strict=True)]

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self.tokens_per_s_runs)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a row's round added to its output; those beyond the output's end are left out."""
        return self.stats["tokens"] / self.stats["rounds"]

    def num_identical(self, reference: Sequence[TokenIds]) -> int:
        """Prompts whose output is the reference's in every run."""
        return sum(all(outputs[at] == reference[at] for outputs in self.outputs) for at in range(len(reference)))


def profile_rows(job: Job) -> list[Row]:
    """The job's rows. Raises ConfigError with all bad ones."""
    rows = list(read_rows(job, job.input))
    bad = [row.message for row in rows if isinstance(row, BadRow)]
    if bad:
        raise ConfigError(f"{job.input.path}: a profile needs input without errors:\n" + "\n".join(bad))
    return [row for row in rows if isinstance(row, Row)]


def task_of(row: Row) -> str:
    """`metadata.task` of the row; rows without one are a task of their own."""
    task = row.input.metadata.get("task") if isinstance(row.input.metadata, dict) else None
    return task if isinstance(task, str) else ALL


def warm_up(llm: LLM, prompts: Sequence[TokenIds], sampling: SamplingParams) -> None:
    """A few tokens of each, all of different lengths, so that smaller batches are met too before anything is timed."""
    longest = sampling.max_tokens or _WARM_UP_TOKENS
    each = [sampling.model_copy(update={"max_tokens": min(2 + number % _WARM_UP_TOKENS, longest)}) for number in range(len(prompts))]
    generate(llm, prompts, each)


def generate(llm: LLM, prompts: Sequence[TokenIds], sampling: SamplingParams | Sequence[SamplingParams]) -> list[TokenIds]:
    """New tokens of each prompt. Raises RequestError with all that can't be served."""
    return _token_ids(llm.generate(list(prompts), sampling, use_tqdm=False))


def check_served(llm: LLM, prompts: Sequence[TokenIds], sampling: SamplingParams) -> None:
    """Raises RequestError with every prompt that can never be served; computes nothing."""
    errors = []
    for number, prompt in enumerate(prompts):
        request_id = f"profile-{number}"
        try:
            llm.add(prompt, sampling, request_id)
        except RequestError as error:
            errors.append(_of_prompt(number, request_id, str(error)))
        llm.abort([request_id])
    if errors:
        raise RequestError("\n".join(errors))


def generate_in_steps(llm: LLM, prompts: Sequence[TokenIds], sampling: SamplingParams, *, progress: bool) -> tuple[list[TokenIds], list[Step]]:
    """As `generate`, with the time of every step of the engine."""
    ids = [f"profile-{number}" for number in range(len(prompts))]
    done: dict[str, RequestOutput] = {}
    steps = []
    try:
        for request_id, prompt in zip(ids, prompts, strict=True):
            llm.add(prompt, sampling, request_id)
        before = llm.stats()
        with tqdm(total=len(prompts), desc="answers", unit="prompt", disable=not progress, file=sys.stderr, dynamic_ncols=True) as bar:
            while llm.has_unfinished():
                started = time.perf_counter()
                finished = llm.step()
                seconds = time.perf_counter() - started
                after = llm.stats()
                steps.append(Step(seconds, after["prefill_tokens"] - before["prefill_tokens"], after["rounds"] - before["rounds"]))
                before = after
                done |= {result.request_id: result for result in finished}
                bar.update(len(finished))
    finally:
        llm.abort(ids)
    return _token_ids([done[request_id] for request_id in ids]), steps


def _token_ids(results: Sequence[RequestOutput]) -> list[TokenIds]:
    errors = [_of_prompt(number, result.request_id, result.error) for number, result in enumerate(results) if result.error is not None]
    if errors:
        raise RequestError("\n".join(errors))
    return [result.outputs[0].token_ids for result in results]


def _of_prompt(number: int, request_id: str, message: str) -> str:
    return f"prompt {number}: {message.removeprefix(f'{request_id}: ')}"


def time_plans(
    llm: LLM, plans: Sequence[SpeculativeConfig | None], prompts: Sequence[TokenIds], sampling: SamplingParams, repeats: int, *, batch_size: int, progress: bool
) -> list[PlanRuns]:
    """Runs every plan `repeats` times over all prompts, in turns: nobody is always first, or always after the same one."""
    runs = [PlanRuns(speculative) for speculative in plans]
    with tqdm(total=repeats * len(runs), desc="plans", unit="run", disable=not progress, file=sys.stderr, dynamic_ncols=True) as bar:
        for repeat in range(repeats):
            turn = repeat % len(runs)
            for run in runs[turn:] + runs[:turn]:
                llm.set_speculative(run.speculative)
                warm_up(llm, prompts[:batch_size], sampling)  # every time: KV memory of a plan with other exits is new
                llm.reset_stats()
                started = time.perf_counter()
                outputs = generate(llm, prompts, sampling)
                run.seconds.append(time.perf_counter() - started)
                run.outputs.append(outputs)
                run.stats = llm.stats()
                bar.update()
    return runs
