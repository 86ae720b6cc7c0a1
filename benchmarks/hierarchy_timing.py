"""The plans that are best on this machine, and what they take to decode other prompts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.hierarchy_plans import best_of_kinds, plans_tuned
from benchmarks.hierarchy_ratios import Totals, claims, compared
from hispec.config import SpeculativeConfig
from hispec.jobs.bench import BenchOptions, run_bench
from hispec.jobs.bench_inputs import TokenIds, warm_up
from hispec.jobs.schema import Job
from hispec.latency.profile_file import LatencyProfile
from hispec.llm import LLM
from hispec.measure.latency import measure_latency
from hispec.profile.candidates import find_candidates
from hispec.profile.options import ProfileOptions
from hispec.profile.predict import Predictor, calibrate
from hispec.profile.recording import Recording
from hispec.profile.round_cost import PassTimes
from hispec.profile.timed_runs import Step, generate_in_steps
from hispec.sampling_params import SamplingParams
from hispec.utils.console import make_bar


class Prompts(NamedTuple):
    """Prompts with the model's own answers to them, and the batches in which they are decoded."""

    recording: Recording
    batches: list[list[int]]

    @property
    def tokens(self) -> list[TokenIds]:
        return [answer.prompt_token_ids for answer in self.recording.answers]


def plain_steps(llm: LLM, prompts: Prompts, sampling: SamplingParams, what: str) -> list[Step]:
    """The steps of plain decoding, batch by batch."""
    steps, tokens = [], prompts.tokens
    with make_bar(len(tokens), what, "prompt", True) as bar:
        for batch in prompts.batches:
            steps += generate_in_steps(llm, [tokens[at] for at in batch], sampling, progress=False)[1]
            bar.update(len(batch))
    return steps


def predictor_here(
    prompts: Prompts,
    latency: LatencyProfile,
    steps: Sequence[Step],
    batch_size: int,
    num_layers: int,
    max_run_ms: float,
    links: bool,
) -> Predictor:
    """What plans take for these prompts on this machine, the processing of prompts included."""
    context_len = round(
        statistics.fmean(
            len(answer.prompt_token_ids) + len(answer.token_ids) / 2 for answer in prompts.recording.answers
        )
    )
    times = PassTimes(latency.model(), context_len)
    return Predictor(
        prompts.recording,
        times,
        calibrate(steps, times, batch_size, max_run_ms, links),
        batch_size,
        num_layers,
        groups=[np.array(batch) for batch in prompts.batches],
    )


def measure(
    job: Job,
    options: BenchOptions,
    tune: Prompts,
    held_out: Prompts,
    plans: Sequence[SpeculativeConfig],
) -> dict[str, Any]:
    """The plans that are best here at this batch size, and what they take to decode the held-out prompts."""
    batch_size, window = options.batch_size, ProfileOptions().max_window
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    answers = [*tune.recording.answers, *held_out.recording.answers]
    numbers = {"dtype": job.engine.dtype, "quantization": job.engine.quantization}
    with LLM(job.model, max_num_seqs=batch_size, enable_prefix_caching=False, **numbers) as llm:
        candidates = find_candidates(llm.engine.pretrained, None, must_be_trained=True)
        num_layers = llm.decoder.config.num_layers
        warm_up(llm, tune.tokens[:batch_size], sampling)
        tune_steps = plain_steps(llm, tune, sampling, "tuning")
        latency = measure_latency(
            llm.decoder,
            candidates.layers,
            candidates.exits,
            max_num_seqs=batch_size,
            max_window=window,
            max_context=max(len(answer.prompt_token_ids) + len(answer.token_ids) for answer in answers),
            progress=True,
        )
        held_steps = plain_steps(llm, held_out, sampling, "held out")
        links = llm.decoder.passes is not None
    here = batch_size, num_layers, job.engine.max_run_ms, links
    best = best_of_kinds(predictor_here(tune, latency, tune_steps, *here), plans)
    predictor = predictor_here(held_out, latency, held_steps, *here)
    others = {kind: each.plan for kind, each in best.items() if each.plan is not None}
    result = run_bench(job, options.model_copy(update={"plans": others}))
    engines, tasks = result["engines"], [group["task"] for group in result["groups"]]
    total = {kind: Totals(each["group_tokens"], each["group_seconds"]) for kind, each in engines.items()}
    rounds = {
        kind: Totals(each["group_tokens"], each["group_decode_seconds"]) for kind, each in engines.items()
    }
    found = plans_tuned(best)
    for kind, each in best.items():
        predicted = predictor.predict(each.plan)
        found[kind] |= {
            "held_out": predicted.as_dict(),
            "tokens_per_s": engines[kind]["tokens_per_s"],
            "to_plain": compared(total[kind], total["plain"], tasks),
            "rounds_to_plain": compared(rounds[kind], rounds["plain"], tasks),
            "all_prompts": {
                "predicted": predicted.ratio_to_plain,
                "measured": result["ratio_to_plain"][kind],
                "difference": result["ratio_to_plain"][kind] / predicted.ratio_to_plain - 1.0,
            },
            "exact_match": result["exact_match"].get(kind),
            "groups": {
                "tokens": total[kind].tokens,
                "seconds": total[kind].cost,
                "decode_seconds": rounds[kind].cost,
            },
        }
    return {
        "groups": result["groups"],
        "plans": found,
        "claims": {"all": claims(total, tasks, best), "rounds": claims(rounds, tasks, best)},
        "row_invariant": result["row_invariant"],
        "environment": result["environment"],
        "stages": latency.model_dump(mode="json", include={"stages", "is_static", "row_buckets"}),
    }
