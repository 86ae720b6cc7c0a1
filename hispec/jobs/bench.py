"""The benchmark: the same prompts through several engines in one process, in interleaved runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ..config import Settings, SpeculativeConfig
from ..errors import ConfigError
from ..runner.plan_cache import MOST_KEPT
from ..sampling_params import SamplingParams
from ..stats import STAGES, stage_seconds
from ..utils.console import make_bar
from ..utils.environment import environment, peak_memory_bytes, watch_others
from .bench_inputs import TokenIds, generate, good_rows, warm_up
from .bench_runs import (
    Runs,
    keeps_outputs,
    make_groups,
    num_matches,
    ratio_intervals,
    ratios_by_task,
)
from .rates import Rates, add_counts, plan_text
from .rows import Row, count_rows
from .schema import Job

if TYPE_CHECKING:
    from ..llm import LLM
    from .hf_baseline import TransformersBaseline


_TIER_RATES = ("draft_kept", "looked_up_kept", "looked_up_share", "tentative_accepted")


class BenchOptions(Settings):
    """How to measure.

    repeats       timed runs of each engine; the median counts
    batch_size    prompts that run together, in every engine; at 1 each prompt is timed by itself, which gives
                  confidence intervals over prompts
    by_batch      prompts that run together are timed together, and by themselves, at every batch size: rows
                  whose outputs are short then stay empty until the longest has ended
    max_tokens    new tokens per prompt
    context       prompt tokens are repeated or cut to this length; None = as they are
    temperature   0 = greedy; above it, each prompt has a seed of its own, and transformers is left out
    transformers  measure transformers' `generate` too; it loads the model a second time
    plans         further plans, by name, such as the best two-tier one of a preset
    """

    repeats: Annotated[int, Field(ge=1)] = 3
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    by_batch: bool = False
    max_tokens: Annotated[int, Field(ge=1)] = 64
    context: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    transformers: bool = True
    plans: dict[str, SpeculativeConfig | None] = Field(default_factory=dict)


def plans_of(
    speculative: SpeculativeConfig | None, further: dict[str, SpeculativeConfig | None]
) -> dict[str, SpeculativeConfig | None]:
    """The engines besides transformers: {name: plan}. Two-tier is three-tier without its check tier, with as
    many drafts per round. Raises ConfigError if a further plan has the name of one of these."""
    plans: dict[str, SpeculativeConfig | None] = {"plain": None}
    if speculative is not None:
        plans["two_tier"] = speculative.model_copy(update={"check": None})
        if speculative.check is not None:
            plans["three_tier"] = speculative
    if taken := sorted({"transformers", *plans} & set(further)):
        raise ConfigError(f"--plan: the name {taken[0]!r} is taken; rename the file, which names the plan")
    return plans | further


def run_bench(job: Job, options: BenchOptions, *, progress: bool = True) -> dict[str, Any]:
    """Measures and returns what `--json` writes (docs/jobs.md).

    Raises ConfigError for a bad setting or input row, CheckpointError, and RequestError if a prompt can't be
    served.
    """
    count_rows(job.input)
    rows = good_rows(job)
    from ..loading.target_model import select_device

    # Now, so that its load is that of others.
    measured_on, others = environment(select_device(job.engine.device)), watch_others()
    with closing(make_llm(job, options)) as llm:
        result = time_engines(llm, job, options, rows, progress=progress)
        is_alone = llm.num_workers == 1  # else workers would count among the others
    return result | {"environment": measured_on | {"others": others() if is_alone else None}}


def make_llm(job: Job, options: BenchOptions) -> LLM:
    """The job's model with the settings of a benchmark. Without a prefix cache every run computes its
    prompts, as transformers does; a trace is of the job's own rows."""
    settings: dict[str, Any] = {
        "max_num_seqs": options.batch_size,
        "enable_prefix_caching": False,
        "trace": None,
    }
    if options.context is not None and job.engine.max_model_len is None:
        settings["max_model_len"] = options.context + options.max_tokens
    return job.make_llm(**settings)


def time_engines(
    llm: LLM,
    job: Job,
    options: BenchOptions,
    rows: list[Row],
    *,
    progress: bool = True,
    between: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """As `run_bench`, with a model that `make_llm` has loaded; without the environment. `between` is called
    before each turn of an engine."""
    prompts = [_fit(llm.encode(row.prompt, chat=row.is_chat), options.context) for row in rows]
    sampling = SamplingParams(
        temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=job.sampling.ignore_eos
    )
    with_transformers = options.transformers and options.temperature == 0.0
    seeds = {tuple(prompt): number for number, prompt in enumerate(prompts)}

    def decode(taken: list[TokenIds]) -> list[TokenIds]:
        return generate(
            llm, taken, [sampling.model_copy(update={"seed": seeds[tuple(prompt)]}) for prompt in taken]
        )

    groups = make_groups(rows, options.batch_size, by_batch=options.by_batch)
    plans = plans_of(job.speculative, options.plans)
    runs = {name: Runs(groups) for name in (["transformers"] if with_transformers else []) + list(plans)}
    captures = "graph_bytes" in llm.memory()
    for speculative in plans.values() if captures else ():
        llm.set_speculative(speculative)  # KV of all their exits is there before any is captured
    for speculative in plans.values():
        llm.set_speculative(speculative)
        if captures and not _learns(speculative):
            # Whatever numbers of rows and lengths come: a capture takes as long as many rounds.
            for group in groups:
                decode([prompts[number] for number in group.prompts])
        else:
            warm_up(llm, prompts[: options.batch_size], sampling)
    # Transformers' copy of the model comes only now: the peak is the engine's own.
    memory = {"peak_resident_bytes": peak_memory_bytes(), **llm.memory()}
    baseline = _baseline(job, options, prompts) if with_transformers else None
    order = list(runs)
    # Groups that an engine decodes before it is another one's turn.
    numbers = list(range(len(groups)))
    turns = [[number] for number in numbers] if _takes_turns(llm, options, plans) else [numbers]
    with make_bar(options.repeats * len(turns) * len(order), None, "run", progress) as bar:
        for repeat in range(options.repeats):
            for run in runs.values():
                run.begin_run()
            for turn, numbers in enumerate(turns):
                first = (repeat + turn) % len(order)  # none is always first, or always after the same one
                for name in order[first:] + order[:first]:
                    bar.set_description_str(name)
                    if name != "transformers":
                        llm.set_speculative(plans[name])
                        llm.reset_stats()
                    between()
                    for number in numbers:
                        if name == "transformers":
                            assert baseline is not None
                            runs[name].time(number, prompts, baseline.generate)
                        else:
                            runs[name].time(number, prompts, decode, lambda: _decode_s(llm))
                    if name != "transformers":
                        runs[name].stats = add_counts(runs[name].stats, llm.stats())
                    bar.update()
    return _result(job, options, prompts, plans, runs, llm.num_workers) | {
        "memory": memory,
        "row_invariant": llm.row_invariant,
    }


def _decode_s(llm: LLM) -> float:
    """Seconds of rounds so far; of several workers, which have theirs at once, the mean."""
    return float(llm.stats()["round_s"]) / llm.num_workers


def _learns(plan: SpeculativeConfig | None) -> bool:
    """Whether what it does hangs on the prompts before: then these must not be those that are timed."""
    return keeps_outputs(plan) or (plan is not None and plan.control == "goodput")


def _is_timed_apart(options: BenchOptions) -> bool:
    """Whether prompts, or batches of them, are timed by themselves."""
    return options.batch_size == 1 or options.by_batch


def _takes_turns(llm: LLM, options: BenchOptions, plans: dict[str, SpeculativeConfig | None]) -> bool:
    """Whether engines take turns prompt by prompt, or batch by batch, which cancels the machine's drift. Not
    where a change of plan loses what later prompts would find: earlier outputs, or graphs of more plans than
    are kept."""
    keeps_graphs = "graph_bytes" not in llm.memory() or len(plans) <= MOST_KEPT
    return _is_timed_apart(options) and keeps_graphs and not any(map(keeps_outputs, plans.values()))


def _result(
    job: Job,
    options: BenchOptions,
    prompts: list[TokenIds],
    plans: dict[str, SpeculativeConfig | None],
    runs: dict[str, Runs],
    num_workers: int,
) -> dict[str, Any]:
    engines: dict[str, Any] = {}
    acceptance: dict[str, Any] = {}
    for name, run in runs.items():
        engines[name] = {
            "tokens_per_s": run.median_tokens_per_s(),
            "tokens_per_s_runs": run.tokens_per_s(),
            "seconds_runs": [sum(seconds) for seconds in run.seconds],
            "tokens": sum(map(len, run.outputs[0])),
        }
        engines[name]["group_tokens"], engines[name]["group_seconds"] = run.by_group()
        if name in plans:
            engines[name]["group_decode_seconds"] = run.by_group(decode=True)[1]
            rates = asdict(Rates.of(run.stats, plans[name]))
            # Stats are of all runs and workers, `stage_s` of one of each, as the seconds beside it.
            *pass_s, round_s = (
                run.stats[key] / (options.repeats * num_workers)
                for key in (*(f"{stage}_pass_s" for stage in STAGES), "round_s")
            )
            engines[name]["stage_s"] = stage_seconds(pass_s, round_s)
            tiers = {key: rates.pop(key) for key in _TIER_RATES}
            engines[name]["decode_tokens_per_s"] = run.median_tokens_per_s(decode=True)
            engines[name] |= {"plan": plan_text(plans[name], run.stats["num_layers"]), **rates}
            if plans[name] is not None:
                acceptance[name] = tiers
    lengths = list(map(len, prompts))

    def over_plain(key: str, names: Iterable[str]) -> dict[str, float]:
        return {name: engines[name][key] / engines["plain"][key] for name in names}

    return {
        "model": job.model,
        "options": options.model_dump(),
        "speculative": job.speculative.model_dump() if job.speculative else None,
        "prompts": {
            "num": len(prompts),
            "tokens_min": min(lengths),
            "tokens_median": statistics.median(lengths),
            "tokens_max": max(lengths),
        },
        "groups": [asdict(group) for group in runs["plain"].groups],
        "engines": engines,
        "ratio_to_plain": over_plain("tokens_per_s", engines),
        "decode_ratio_to_plain": over_plain("decode_tokens_per_s", plans),
        "ratio_by_task": ratios_by_task(runs),
        "ratio_interval": ratio_intervals(runs) if _is_timed_apart(options) else {},
        "decode_ratio_by_task": ratios_by_task({name: runs[name] for name in plans}, decode=True),
        "exact_match": {
            name: num_matches(run, runs["plain"]) for name, run in runs.items() if name != "plain"
        },
        "acceptance": acceptance,
    }


def _fit(prompt: TokenIds, length: int | None) -> TokenIds:
    """`prompt`, repeated and cut to `length` tokens."""
    if length is None or not prompt:
        return prompt
    return (prompt * -(-length // len(prompt)))[:length]


def _baseline(job: Job, options: BenchOptions, prompts: list[TokenIds]) -> TransformersBaseline:
    from ..loading.known_models import resolve_model
    from ..loading.target_model import open_model, select_device, select_dtype
    from .hf_baseline import TransformersBaseline

    device = select_device(job.engine.device)
    dtype = select_dtype(job.engine, open_model(job.model), device)
    baseline = TransformersBaseline(
        resolve_model(job.model),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        batch_size=options.batch_size,
        max_tokens=options.max_tokens,
        ignore_eos=job.sampling.ignore_eos,
    )
    baseline.generate(prompts[:1])
    return baseline
