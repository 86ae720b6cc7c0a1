"""The plans that are best on this machine, and what they take to decode other prompts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from benchmarks.hierarchy_plans import best_of_kinds, is_gated, plans_tuned
from benchmarks.hierarchy_ratios import Totals, claims, compared
from hispec.config import SpeculativeConfig
from hispec.engine import Engine
from hispec.jobs.bench import BenchOptions, make_llm, time_engines
from hispec.jobs.bench_inputs import TokenIds, warm_up
from hispec.jobs.bench_runs import Group
from hispec.jobs.rows import Row
from hispec.jobs.schema import Job
from hispec.latency.profile_file import LatencyProfile
from hispec.llm import LLM
from hispec.measure.latency import measure_latency
from hispec.measure.yardstick import Yardstick
from hispec.profile.candidates import find_candidates
from hispec.profile.options import ProfileOptions
from hispec.profile.predict import Predictor, calibrate
from hispec.profile.recording import Recording
from hispec.profile.round_cost import PassTimes
from hispec.profile.timed_runs import Step, generate_in_steps, one_engine
from hispec.sampling_params import SamplingParams
from hispec.utils.console import make_bar


class Prompts(NamedTuple):
    """Prompts with the model's own answers to them, and the groups in which they are decoded."""

    recording: Recording
    rows: list[Row]
    groups: list[Group]

    @property
    def tokens(self) -> list[TokenIds]:
        return [answer.prompt_token_ids for answer in self.recording.answers]


class PlainSteps(NamedTuple):
    """Steps of plain decoding, and passes that were timed between them."""

    steps: list[Step]
    meanwhile: Yardstick


def plain_steps(
    llm: LLM, prompts: Prompts, sampling: SamplingParams, meanwhile: Yardstick, what: str
) -> PlainSteps:
    """The steps of plain decoding, batch by batch."""
    steps, tokens = [], prompts.tokens
    with meanwhile, make_bar(len(tokens), what, "prompt", True) as bar:
        for group in prompts.groups:
            steps += generate_in_steps(
                llm, [tokens[at] for at in group.prompts], sampling, progress=False, between=meanwhile.measure
            )[1]
            bar.update(len(group.prompts))
    return PlainSteps(steps, meanwhile)


def predictor_here(
    prompts: Prompts,
    latency: LatencyProfile,
    plain: PlainSteps,
    batch_size: int,
    num_layers: int,
    engine: Engine,
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
        calibrate(
            plain.steps,
            times,
            batch_size,
            engine.max_run_ms,
            links,
            engine.max_prefill_tokens,
            plain.meanwhile.drift(latency.model()),
        ),
        batch_size,
        num_layers,
        groups=[np.array(group.prompts) for group in prompts.groups],
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
    with closing(make_llm(job, options)) as llm:
        yard = llm.decoder, tune.tokens, options.max_tokens, batch_size, window
        candidates = find_candidates(llm.engine.pretrained, None, must_be_trained=True)
        num_layers = llm.decoder.config.num_layers
        warm_up(llm, tune.tokens[:batch_size], sampling)
        tune_steps = plain_steps(llm, tune, sampling, Yardstick(*yard), "tuning")
        latency = measure_latency(
            llm.decoder,
            candidates.layers,
            candidates.exits,
            max_num_seqs=batch_size,
            max_window=window,
            max_context=max(len(answer.prompt_token_ids) + len(answer.token_ids) for answer in answers),
            progress=True,
        )
        if latency.is_static:  # a round is one graph, in which all that a gate would spare is computed
            plans = [plan for plan in plans if not is_gated(plan)]
        held_steps = plain_steps(llm, held_out, sampling, Yardstick(*yard), "held out")
        here = batch_size, num_layers, one_engine(llm), llm.decoder.passes is not None
        best = best_of_kinds(predictor_here(tune, latency, tune_steps, *here), plans)
        predictor = predictor_here(held_out, latency, held_steps, *here)
        others = {kind: each.plan for kind, each in best.items() if each.plan is not None}
        with Yardstick(*yard) as meanwhile:
            result = time_engines(
                llm,
                job,
                options.model_copy(update={"plans": others}),
                held_out.rows,
                between=meanwhile.measure,
            )
    # The machine's speed has changed since stages were timed, and is no fault of what was predicted.
    drift = meanwhile.drift(latency.model())
    predictor = predictor.during(drift)
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
        "drift": asdict(drift),
        "stages": latency.model_dump(mode="json", include={"stages", "is_static", "row_buckets"}),
    }
