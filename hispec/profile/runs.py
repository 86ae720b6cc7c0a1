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
from ..errors import RequestError
from ..jobs.measure import TokenIds, generate, of_prompt, token_ids_of, warm_up
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..llm import LLM


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
    return token_ids_of([done[request_id] for request_id in ids]), steps


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
