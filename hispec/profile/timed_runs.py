"""Real runs of the engine: the target's own answers, and the timing of plans against each other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config import SpeculativeConfig
from ..engine import Engine
from ..errors import ConfigError, RequestError
from ..jobs.bench_inputs import TokenIds, generate, of_prompt, token_ids_of, warm_up
from ..jobs.bench_runs import Group, Runs
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from ..utils.console import make_bar

if TYPE_CHECKING:
    from ..llm import LLM


_BETWEEN = 8  # steps from one call of `between` to the next


@dataclass(frozen=True)
class Step:
    """One step of the engine: prompt positions that it computed, and rows of its round."""

    seconds: float
    prefill_tokens: int
    rows: int


def check_served(llm: LLM, prompts: Sequence[TokenIds], sampling: SamplingParams) -> None:
    """Raises RequestError with every prompt that can never be served; computes nothing."""
    errors = []
    for number, prompt in enumerate(prompts):
        request_id = f"profile-{number}"
        try:
            llm.add(prompt, sampling, request_id)
        except RequestError as error:
            errors.append(of_prompt(number, request_id, str(error)))
        llm.abort([request_id])
    if errors:
        raise RequestError("\n".join(errors))


def generate_in_steps(
    llm: LLM,
    prompts: Sequence[TokenIds],
    sampling: SamplingParams,
    *,
    progress: bool,
    between: Callable[[], None] = lambda: None,
) -> tuple[list[TokenIds], list[Step]]:
    """As `generate`, with the time of every step of the engine, each of one round; `between` is called now
    and then, and its time is none of theirs."""
    if not isinstance(llm.engine, Engine):
        raise ConfigError("steps are timed with workers=1")
    ids = [f"profile-{number}" for number in range(len(prompts))]
    done: dict[str, RequestOutput] = {}
    steps: list[Step] = []
    try:
        for request_id, prompt in zip(ids, prompts, strict=True):
            llm.add(prompt, sampling, request_id)
        before = llm.stats()
        with make_bar(len(prompts), "answers", "prompt", progress) as bar, llm.engine.single_rounds():
            while llm.has_unfinished():
                if len(steps) % _BETWEEN == 0:
                    between()
                started = time.perf_counter()
                finished = llm.step()
                seconds = time.perf_counter() - started
                after = llm.stats()
                steps.append(
                    Step(
                        seconds,
                        after["prefill_tokens"] - before["prefill_tokens"],
                        after["rounds"] - before["rounds"],
                    )
                )
                before = after
                done |= {result.request_id: result for result in finished}
                bar.update(len(finished))
    finally:
        llm.abort(ids)
    return token_ids_of([done[request_id] for request_id in ids]), steps


def time_plans(
    llm: LLM,
    plans: Sequence[SpeculativeConfig | None],
    prompts: Sequence[TokenIds],
    tasks: Sequence[str],
    sampling: SamplingParams,
    repeats: int,
    *,
    batch_size: int,
    progress: bool,
    between: Callable[[], None] = lambda: None,
) -> list[Runs]:
    """Runs every plan `repeats` times over all prompts, those of each task together, in turns, each time in
    another order, so that none always finds what the same one has left; `between` is called before each task
    of a run."""
    by_task: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        by_task.setdefault(task, []).append(number)
    groups = [Group(task, numbers) for task, numbers in by_task.items()]
    runs = [Runs(groups) for _ in plans]
    order, shuffled = list(zip(plans, runs, strict=True)), random.Random(0)
    with make_bar(repeats * len(runs), "plans", "run", progress) as bar:
        for _ in range(repeats):
            shuffled.shuffle(order)
            for plan, run in order:
                llm.set_speculative(plan)
                # Every time: KV memory of a plan with other exits is new.
                warm_up(llm, prompts[:batch_size], sampling)
                llm.set_speculative(plan)  # again, for a drafter that has not seen anything
                llm.reset_stats()
                run.begin_run()
                for number in range(len(groups)):
                    between()
                    run.time(number, prompts, partial(generate, llm, sampling=sampling))
                run.stats = llm.stats()
                bar.update()
    return runs
