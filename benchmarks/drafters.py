"""What drafters, trees and checks are worth with a model's measured agreement, where no machine's noise
reaches.

    python benchmarks/drafters.py JOB.yaml [--profile FILE.json] [--max-tokens N] [--limit N] [--json FILE]

The target's own greedy answers to the job's prompts are recorded with what every exit and prompt lookup say
at each place, and the rounds of every plan are counted over them (`hispec.profile`), batch 1. A pass costs
what it reads: its layers and its head, as shares of the model's weights, whatever its width. That is a GPU at
a small batch. With --profile, passes cost what `hispec
profile --json` measured on its machine instead.

The last table makes a check exit better than it is: at a random share of the places where it is wrong it is
given the right token. It says how often the exit would have to be right for the best three-tier plan to be
1.05 times the best two-tier one, and how often it agrees now with prompt lookup where that is right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one
from benchmarks.command import check_results, exit_code
from benchmarks.recorded import PASSES_ALONE, check_three_tiers, memory_bound, record_rows
from hispec.config import NgramConfig, SpeculativeConfig
from hispec.errors import ConfigError, build
from hispec.jobs.bench_inputs import good_rows
from hispec.jobs.inputs import files_read
from hispec.jobs.load import load_job
from hispec.jobs.rows import count_rows
from hispec.latency.model import LatencyModel, stage_names
from hispec.latency.profile_file import StageCost
from hispec.llm import LLM
from hispec.profile.candidates import find_candidates
from hispec.profile.options import ProfileOptions
from hispec.profile.plans import all_plans, drafter_of, kind_of, short_text
from hispec.profile.predict import Calibration, Prediction, Predictor, best_of_each_kind, search
from hispec.profile.recording import NOTHING, Recording, Said
from hispec.profile.round_cost import PassTimes
from hispec.sampling_params import SamplingParams
from hispec.utils.files import parse_json, write_json

LOOKUP = NgramConfig(min_size=2, match_confidence=None)  # of those that plans use
WANTED = 1.05  # three tiers over two
SHARES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the wrong places of a check exit that are made right


def read_profile(path: Path) -> tuple[PassTimes, Calibration]:
    """Costs of passes and host time in a file of `hispec profile --json`. Raises ConfigError."""
    try:
        return measured(parse_json(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"--profile: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--profile: {path} is not what this version's `hispec profile --json` writes"
            f" ({type(error).__name__}: {error}); make it anew"
        ) from None


def measured(result: Mapping[str, Any]) -> tuple[PassTimes, Calibration]:
    """Costs of passes and host time of a profile's result."""
    costs, host_ms = result["costs"], float(result["calibration"]["host_ms"])
    stages = {
        name: build(StageCost, each, f"costs.stages.{name}").cost for name, each in costs["stages"].items()
    }
    latency = LatencyModel(stages, costs["is_static"], tuple(costs["row_buckets"]))
    times = PassTimes(latency, int(costs["context_len"]))
    return times, Calibration(1, None, times.of_pass(["plain"], 1), host_ms, 0.0)


def improved(recording: Recording, layer: int, share: float) -> Recording:
    """With the exit after `layer` right at `share` of the places where it is wrong; how sure it is stays as
    it was."""
    said = recording.exits[layer]
    wrong = (said.tokens != recording.truth) & (recording.truth != NOTHING)
    mended = wrong & (np.random.default_rng(0).random(len(wrong)) < share)
    ranked = said.ranked.copy()
    ranked[mended, 0] = recording.truth[mended]
    return Recording(
        recording.answers,
        {**recording.exits, layer: Said(ranked, said.probability)},
        recording.own,
        recording.looked_up,
    )


def best(predictions: Sequence[Prediction], wanted: Callable[[SpeculativeConfig], bool]) -> Prediction:
    """The fastest of those that are `wanted`; `predictions` has the fastest first."""
    return next(
        prediction for prediction in predictions if prediction.plan is not None and wanted(prediction.plan)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument(
        "--profile", type=Path, help="what `hispec profile --json` wrote: passes cost what it measured"
    )
    parser.add_argument("--max-tokens", type=at_least_one, default=64)
    parser.add_argument("--limit", type=at_least_one)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    return exit_code("drafters", lambda: run(options))


def run(arguments: argparse.Namespace) -> None:
    """Counts, prints, and writes --json."""
    job = load_job(arguments.job, [] if arguments.limit is None else [f"input.limit={arguments.limit}"])
    check_results(arguments, read=files_read(job))
    profile = None if arguments.profile is None else read_profile(arguments.profile)
    count_rows(job.input)
    rows = good_rows(job)
    with LLM(job.model, **{**job.engine.model_dump(), "max_num_seqs": 16}) as llm:
        candidates = find_candidates(llm.engine.pretrained, None, must_be_trained=True)
        plans = all_plans(ProfileOptions(), candidates, None)
        check_three_tiers(job.model, candidates, plans)
        times, calibration = profile or (memory_bound(llm.decoder, candidates.exits), PASSES_ALONE)
        if profile is not None:
            times.of_pass(stage_names(candidates.layers, (), False), 1)  # a profile of these exits
        sampling = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
        recording = record_rows(llm, rows, candidates, plans, sampling)
        num_layers = llm.decoder.config.num_layers

    def predictor(of: Recording) -> Predictor:
        return Predictor(of, times, calibration, 1, num_layers)

    found, num_plans = search(predictor(recording), plans)
    kinds = dict.fromkeys(kind_of(prediction.plan) for prediction in found if prediction.plan is not None)
    result: dict[str, Any] = {
        "costs": "memory-bound" if arguments.profile is None else str(arguments.profile),
        "answers": len(recording.answers),
        "plans": num_plans,
    }
    print(
        f"{result['answers']} answers, {int(recording.lengths.sum())} tokens; {num_plans} plans; passes cost"
        f" {result['costs']}"
    )
    print(f"{'best of':22s} {'x plain':>8s} {'tokens/round':>13s}  plan")
    result["best_of_kind"] = {}
    for kind in kinds:
        (prediction,) = best_of_each_kind(
            (one for one in found if one.plan is not None and kind_of(one.plan) == kind), 1
        )
        result["best_of_kind"][kind] = prediction.as_dict()
        print(
            f"{kind:22s} {prediction.ratio_to_plain:8.3f} {prediction.tokens_per_round:13.3f} "
            f" {short_text(prediction.plan)}"
        )

    def is_exit(plan: SpeculativeConfig) -> bool:
        return drafter_of(plan) in ("exit", "adapter") and plan.check is None

    tree, chain = (
        best(found, lambda plan: drafter_of(plan) == "tree" and plan.check is None),
        best(found, is_exit),
    )
    two, three = (
        best(found, lambda plan: plan.check is None),
        best(found, lambda plan: plan.check is not None),
    )
    result["tree_gain"] = tree.ratio_to_plain / chain.ratio_to_plain - 1.0
    result["three_to_two"] = three.ratio_to_plain / two.ratio_to_plain
    print(
        f"a tree of an exit's drafts over its best chain: {result['tree_gain']:+.1%}; three tiers over two,"
        f" any drafter: {result['three_to_two']:.3f}"
    )
    copied = recording.looked_up[LOOKUP]
    right = (copied.counts > 0) & (copied.tokens[:, 0] == recording.truth)
    print(
        f"\n{'check exit':>10s} {'right now':>10s} {f'for {WANTED}':>10s}"
        f" {'where prompt lookup is right':>30s}"
    )
    result["needed"] = {}
    for layer in candidates.layers:
        of_layer = [
            plan
            for plan in plans
            if plan.check is not None
            and plan.check.layer == layer
            and drafter_of(plan) in ("ngram", "hybrid")
        ]
        if not of_layer:
            continue
        now, needed = recording.agreement(recording.exits[layer].tokens), None
        for share in SHARES:
            better = improved(recording, layer, share)
            if search(predictor(better), of_layer)[0][0].ratio_to_plain >= WANTED * two.ratio_to_plain:
                needed = better.agreement(better.exits[layer].tokens)
                break
        agreed = (recording.exits[layer].tokens == recording.truth)[right]
        agrees = float(agreed.mean()) if right.any() else None
        result["needed"][layer] = {
            "agreement": now,
            "for_three_tiers": needed,
            "where_lookup_is_right": agrees,
        }
        print(
            f"{layer:10d} {now:10.1%} {'never' if needed is None else f'{needed:.0%}':>10s}"
            f" {'nowhere' if agrees is None else f'{agrees:.1%}':>30s}"
        )
    if arguments.json is not None:
        write_json(arguments.json, result)


if __name__ == "__main__":
    sys.exit(main())
