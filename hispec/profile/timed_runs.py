"""Real runs of the engine: the target's own answers, and the timing of plans against each other."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..config import SpeculativeConfig
from ..engine import Engine
from ..errors import ConfigError, RequestError
from ..jobs.bench_inputs import TokenIds, generate, of_prompt, token_ids_of, warm_up
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


@dataclass
class PlanRuns:
    """Timed runs of one plan over all prompts, one task after the other, and what the engine counted in the
    last of them.

    tasks     {task: numbers of its prompts}
    seconds   of each run: {task: seconds}; outputs: of each run, of each prompt
    """

    speculative: SpeculativeConfig | None
    tasks: dict[str, list[int]]
    seconds: list[dict[str, float]] = field(default_factory=list)
    outputs: list[list[TokenIds]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s_runs(self) -> list[float]:
        return [
            sum(map(len, outputs)) / sum(seconds.values())
            for outputs, seconds in zip(self.outputs, self.seconds, strict=True)
        ]

    @property
    def tokens_per_s(self) -> float:
        """The geometric mean of the runs, as their noise is measured (`noise_of_repeats`)."""
        return statistics.geometric_mean(self.tokens_per_s_runs)

    @property
    def tokens_per_s_of_tasks(self) -> dict[str, float]:
        """{task: tokens per second}, geometric means of the runs."""
        return {
            task: statistics.geometric_mean(
                sum(len(outputs[number]) for number in numbers) / seconds[task]
                for outputs, seconds in zip(self.outputs, self.seconds, strict=True)
            )
            for task, numbers in self.tasks.items()
        }

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a row's round added to its output; those beyond the output's end are left out."""
        return self.stats["tokens"] / self.stats["rounds"]

    @property
    def tokens_per_full_pass(self) -> float:
        """Tokens per as many layers as the model has; without those of prompts, and of a draft model."""
        return (
            self.stats["tokens"]
            * self.stats["num_layers"]
            / (self.stats["layer_passes"] - self.stats["prefill_layer_passes"])
        )

    def num_identical(self, reference: Sequence[TokenIds]) -> int:
        """Prompts whose output is the reference's in every run."""
        return sum(
            all(outputs[at] == reference[at] for outputs in self.outputs) for at in range(len(reference))
        )


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
) -> list[PlanRuns]:
    """Runs every plan `repeats` times over all prompts, in turns, each time in another order, so that none
    always finds what the same one has left; `between` is called before each task of a run."""
    by_task: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        by_task.setdefault(task, []).append(number)
    runs = [PlanRuns(speculative, by_task) for speculative in plans]
    order, shuffled = list(runs), random.Random(0)
    with make_bar(repeats * len(runs), "plans", "run", progress) as bar:
        for _ in range(repeats):
            shuffled.shuffle(order)
            for run in order:
                llm.set_speculative(run.speculative)
                warm_up(
                    llm, prompts[:batch_size], sampling
                )  # every time: KV memory of a plan with other exits is new
                llm.set_speculative(run.speculative)  # again, for a drafter that has not seen anything
                llm.reset_stats()
                _time(llm, run, prompts, sampling, between)
                bar.update()
    return runs


def _time(
    llm: LLM,
    run: PlanRuns,
    prompts: Sequence[TokenIds],
    sampling: SamplingParams,
    between: Callable[[], None],
) -> None:
    """Adds one run: the prompts of each task together."""
    seconds: dict[str, float] = {}
    outputs: list[TokenIds] = [[]] * len(prompts)
    for task, numbers in run.tasks.items():
        taken = [prompts[number] for number in numbers]
        between()
        started = time.perf_counter()
        results = generate(llm, taken, sampling)
        seconds[task] = time.perf_counter() - started
        for number, result in zip(numbers, results, strict=True):
            outputs[number] = result
    run.seconds.append(seconds)
    run.outputs.append(outputs)
    run.stats = llm.stats()
