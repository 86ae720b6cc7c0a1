"""Inputs and answers of the benchmark and the profile: valid rows, warm-up, answers as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError, RequestError
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from .rows import BadRow, Row, read_rows
from .schema import Job

if TYPE_CHECKING:
    from ..llm import LLM

TokenIds = list[int]
ALL = "all"  # the task of rows whose metadata names none
_WARM_UP_TOKENS = 8


def good_rows(job: Job) -> list[Row]:
    """The job's rows. Raises ConfigError with all bad ones: a measurement needs input without errors."""
    rows = list(read_rows(job, job.input))
    bad = [row.message for row in rows if isinstance(row, BadRow)]
    if bad:
        raise ConfigError(f"{job.input.path}: a measurement needs input without errors:\n" + "\n".join(bad))
    return [row for row in rows if isinstance(row, Row)]


def task_of(row: Row) -> str:
    """`metadata.task` of the row; rows without one are a task of their own."""
    task = row.input.metadata.get("task") if isinstance(row.input.metadata, dict) else None
    return task if isinstance(task, str) else ALL


def warm_up(llm: LLM, prompts: Sequence[TokenIds], sampling: SamplingParams) -> None:
    """Generates a few tokens of each prompt, of different lengths, so that smaller batches are warm too."""
    longest = sampling.max_tokens or _WARM_UP_TOKENS
    each = [
        sampling.model_copy(update={"max_tokens": min(2 + number % _WARM_UP_TOKENS, longest)})
        for number in range(len(prompts))
    ]
    generate(llm, prompts, each)


def generate(
    llm: LLM, prompts: Sequence[TokenIds], sampling: SamplingParams | Sequence[SamplingParams]
) -> list[TokenIds]:
    """New tokens of each prompt. Raises RequestError with all that can't be served."""
    return token_ids_of(llm.generate(list(prompts), sampling, use_tqdm=False))


def token_ids_of(results: Sequence[RequestOutput]) -> list[TokenIds]:
    """The token ids of each result's one output. Raises RequestError with all that failed."""
    errors = [
        of_prompt(number, result.request_id, result.error)
        for number, result in enumerate(results)
        if result.error is not None
    ]
    if errors:
        raise RequestError("\n".join(errors))
    return [result.outputs[0].token_ids for result in results]


def of_prompt(number: int, request_id: str, message: str) -> str:
    """An error's message with the number of the prompt in place of the request's id."""
    return f"prompt {number}: {message.removeprefix(f'{request_id}: ')}"
