"""Real runs of the engine: the target's own answers, and the timing of plans against each other."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import SpeculativeConfig
from ..engine import Engine
from ..errors import ConfigError, RequestError
from ..jobs.bench_inputs import TokenIds, generate, of_prompt, token_ids_of, warm_up
from ..jobs.bench_runs import Group, Runs, keeps_outputs
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from ..utils.console import make_bar

if TYPE_CHECKING:
    from ..llm import LLM


_BETWEEN = 4  # steps from one call of `between` to the next
_COUNTED = "tokens", "rounds", "layer_passes", "prefill_layer_passes"
_ONE_ROUND_MS = 1e-9  # as engine.max_run_ms: a round is a call of its own


@dataclass(frozen=True)
class Step:
    """One step of the engine: prompt positions that it computed, and rows of its rounds.

    rounds   that it had
    is_call  whether these were one call, without the host between their passes; else one that went stage by
             stage
    pass_s   seconds of such a call that were passes; 0.0: not measured
    """

    seconds: float
    prefill_tokens: int
    rows: int
    rounds: int = 1
    is_call: bool = False
    pass_s: float = 0.0


def one_engine(llm: LLM) -> Engine:
    """Raises ConfigError if there are several."""
    if not isinstance(llm.engine, Engine):
        raise ConfigError("steps are timed with workers=1")
    return llm.engine


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
    """As `generate` with plain decoding, with the time of every step of the engine, of which some are calls
    of several rounds, some of one, and some go stage by stage, in turns; `between` is called now and then,
    and its time is none of theirs."""
    engine = one_engine(llm)
    ids = [f"profile-{number}" for number in range(len(prompts))]
    done: dict[str, RequestOutput] = {}
    steps: list[Step] = []
    most_ms = engine.max_run_ms
    turns = itertools.cycle((0.0, _ONE_ROUND_MS, most_ms) if most_ms > 0.0 else (0.0,))
    try:
        for request_id, prompt in zip(ids, prompts, strict=True):
            llm.add(prompt, sampling, request_id)
        before = llm.stats()
        with make_bar(len(prompts), "answers", "prompt", progress) as bar:
            while llm.has_unfinished():
                if len(steps) % _BETWEEN == 0:
                    between()
                with engine.running_together(max_run_ms := next(turns)):
                    started = time.perf_counter()
                    finished = llm.step()
                    seconds = time.perf_counter() - started
                after = llm.stats()
                steps.append(_step(seconds, before, after, is_call=max_run_ms > 0.0))
                before = after
                done |= {result.request_id: result for result in finished}
                bar.update(len(finished))
    finally:
        llm.abort(ids)
    return token_ids_of([done[request_id] for request_id in ids]), steps


def _step(seconds: float, before: Mapping[str, Any], after: Mapping[str, Any], is_call: bool) -> Step:
    """What a step of plain decoding did, by the stats before and after it."""
    prefill_tokens, row_rounds, layers, pass_s = (
        after[name] - before[name] for name in ("prefill_tokens", "rounds", "layer_passes", "verify_pass_s")
    )
    rounds = (layers - after["prefill_layer_passes"] + before["prefill_layer_passes"]) // after["num_layers"]
    return Step(
        seconds,
        prefill_tokens,
        row_rounds // max(1, rounds),
        max(1, rounds),
        is_call and rounds > 0,
        pass_s if is_call else 0.0,
    )


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
    """Runs every plan `repeats` times over all prompts, those of each task together. Plans take turns task by
    task, which cancels the machine's drift; run by run where a change would lose what later tasks find,
    earlier outputs or captured graphs. Each time in another order, so that none always finds what the same
    one has left. `between` is called before each task of a run."""
    by_task: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        by_task.setdefault(task, []).append(number)
    groups = [Group(task, numbers) for task, numbers in by_task.items()]
    runs, of_all = [Runs(groups) for _ in plans], list(range(len(groups)))
    order, shuffled = list(zip(plans, runs, strict=True)), random.Random(0)
    takes_turns = "graph_bytes" not in llm.memory() and not any(map(keeps_outputs, plans))
    turns = [[number] for number in of_all] if takes_turns else [of_all]

    def ready(plan: SpeculativeConfig | None) -> None:
        llm.set_speculative(plan)
        warm_up(llm, prompts[:batch_size], sampling)

    with make_bar(repeats * len(turns) * len(runs), "plans", "run", progress) as bar:
        for plan in plans if takes_turns else ():  # KV memory of a plan with more exits is new
            ready(plan)
        for _ in range(repeats):
            for run in runs:
                run.begin_run()
                run.stats = {}
            for turn in turns:
                shuffled.shuffle(order)
                for plan, run in order:
                    if not takes_turns:
                        ready(plan)
                    llm.set_speculative(plan)  # outputs that a drafter keeps are those of the run
                    llm.reset_stats()
                    for number in turn:
                        between()
                        run.time(number, prompts, partial(generate, llm, sampling=sampling))
                    run.stats = _sum_counted(run.stats, llm.stats())
                    bar.update()
    return runs


def _sum_counted(total: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """What is read of a run's stats, of one in parts."""
    counts = {name: total.get(name, 0) + part[name] for name in _COUNTED}
    return {**counts, "num_layers": part["num_layers"]}
