"""What three tiers are worth beside two, on a model with trained exits: the best plan of each kind, tuned on
some prompts and compared on others.

    python benchmarks/hierarchy.py MODEL --tune TUNE.jsonl --prompts HELD_OUT.jsonl [--batch-size 1 4 16]
    [--max-tokens 64] [--repeats 1] [--dtype bfloat16] [--quantization int8] [--exact-verify]
    [--trees] [--no-timing] [--json FILE]

Both files are inputs of jobs, as benchmarks/prompts.py writes them, and share no prompt. Decoding is greedy.

1. The model's own answers to the tuning prompts are recorded, and the plans of `hispec profile` searched over
   them for the best of each kind: two tiers and three, drafts by an exit, by prompt lookup and by both, three
   tiers with a fixed number of checks and gated (check.continue_confidence; on a GPU, where rounds are graphs
   as a whole and a gate spares nothing, in counted rounds alone). Once a pass costs what it reads,
   as a share of the weights (memory-bound), and at each batch size what it takes on this machine.
2. The answers to the held-out prompts are recorded, and the rounds of the memory-bound plans counted.
3. At each batch size plain decoding and the plans that are best on this machine decode the held-out prompts,
   as `hispec bench` does: each batch by all of them in turn. What is predicted of these prompts, at the
   speed that the machine has meanwhile (passes through the whole model, timed between turns), stands beside
   what came out.

"Best" is what the tuning prompts say. Figures are means over tasks, and intervals are bootstrap ones of 95 %
over prompts (batches, where these run together), drawn task by task: a task with a single one has none.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.command import check_results, exit_code
from benchmarks.hierarchy_plans import best_of_kinds, plans_tuned
from benchmarks.hierarchy_ratios import Totals, claims, compared
from benchmarks.hierarchy_tables import print_agreement, print_counted, print_measured
from benchmarks.hierarchy_timing import Prompts, measure
from benchmarks.recorded import PASSES_ALONE, check_three_tiers, memory_bound, prompts_of, record_rows
from hispec.config import SpeculativeConfig
from hispec.errors import ConfigError, build, shown
from hispec.jobs.bench import BenchOptions
from hispec.jobs.bench_inputs import good_rows, task_of
from hispec.jobs.bench_runs import make_groups
from hispec.jobs.rows import Row, count_rows
from hispec.jobs.schema import Job
from hispec.llm import LLM
from hispec.profile.candidates import find_candidates
from hispec.profile.options import ProfileOptions
from hispec.profile.plans import all_plans
from hispec.profile.predict import Prediction, Predictor
from hispec.profile.recording import Recording
from hispec.profile.results import agreement
from hispec.profile.timed_runs import check_served
from hispec.sampling_params import SamplingParams
from hispec.utils.environment import environment, hardware_text, watch_others
from hispec.utils.files import write_json

RECORDED_ROWS = 16
NUMBERS = "dtype", "quantization", "exact_verify"  # settings of the engine that decide the model's numbers
# On a GPU: of ten plans, at all numbers of rows, so that none is captured anew while it is timed.
GRAPHS = {"max_graphs": 1024, "max_graph_bytes": 16 << 30}


# ---- inputs ----


def make_job(model: str, path: Path, **engine: Any) -> Job:
    """The job whose input is at `path`, with settings of the engine; nothing is written to its output."""
    about = {"model": model, "input": {"path": path}, "output": {"path": "unused"}}
    job = build(Job, about | {"engine": engine})
    count_rows(job.input)
    return job


def text_of(row: Row) -> str:
    """What a prompt says, whether it is text or a conversation, without its layout."""
    content = row.input
    if content.messages is not None:
        # None is said where an assistant only calls tools.
        text = "\n".join(message.content or "" for message in content.messages)
    else:
        text = str(row.prompt)
    return " ".join(text.split())


def check_apart(tune: Sequence[Row], held_out: Sequence[Row]) -> None:
    """Raises ConfigError if prompts stand in both files."""
    known = {text_of(row): row for row in tune}
    if shared := [row for row in held_out if text_of(row) in known]:
        first = shared[0]
        raise ConfigError(
            f"--prompts: {len(shared)} of {len(held_out)} prompts are also in --tune, the first in line"
            f" {first.line} (there in line {known[text_of(first)].line}): {shown(text_of(first))}; plans are"
            " tuned on other prompts than they are measured on, so take them out of one of the files"
        )


# ---- counted rounds ----


def count(predictor: Predictor, best: Mapping[str, Prediction], tasks: Sequence[str]) -> dict[str, Any]:
    """The rounds of these plans, answer by answer.

    per_cost        committed tokens per cost of a full pass
    per_full_pass   the same where a full pass is as many layers as the model has, and heads are free
    """
    plans = plans_tuned(best)
    by_cost, by_layers = {}, {}
    for kind, each in best.items():
        rounds = predictor.by_answer(each.plan)
        tokens = [one.tokens for one in rounds]
        num_layers = predictor.num_layers
        by_cost[kind] = Totals(tokens, [one.ms for one in rounds])
        by_layers[kind] = Totals(tokens, [one.layers / num_layers for one in rounds])
        each_costs_one = Totals(tokens, tokens)
        plans[kind] |= {
            "held_out": predictor.predict(each.plan).as_dict(),
            "per_cost": compared(by_cost[kind], each_costs_one, tasks),
            "per_full_pass": compared(by_layers[kind], each_costs_one, tasks),
            "answers": {
                "tokens": tokens,
                "rounds": [one.rounds for one in rounds],
                "cost": by_cost[kind].cost,
                "full_passes": by_layers[kind].cost,
            },
        }
    return {
        "plans": plans,
        "claims": {"per_cost": claims(by_cost, tasks, best), "per_full_pass": claims(by_layers, tasks, best)},
    }


# ---- the program ----


def about(rows: Sequence[Row], recording: Recording) -> dict[str, Any]:
    return {
        "tasks": [task_of(row) for row in rows],
        "lines": [row.line for row in rows],
        "prompt_tokens": [len(answer.prompt_token_ids) for answer in recording.answers],
        "answer_tokens": recording.lengths.tolist(),
    }


def record_and_count(
    job: Job, tune: Sequence[Row], held_out: Sequence[Row], options: BenchOptions, trees: bool
) -> tuple[dict[str, Any], Recording, Recording, list[SpeculativeConfig]]:
    """The first two steps: what they found, both recordings, and the plans that were searched."""
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    drafters = ("exit", "ngram", "hybrid", *(("tree",) if trees else ()))
    rows = min(RECORDED_ROWS, max(len(tune), len(held_out)))
    numbers = job.engine.model_dump(include=set(NUMBERS))
    with LLM(job.model, max_num_seqs=rows, **numbers) as llm:
        candidates = find_candidates(llm.engine.pretrained, None, must_be_trained=True)
        plans = all_plans(ProfileOptions(drafters=drafters), candidates, None)
        check_three_tiers(job.model, candidates, plans)
        check_served(llm, prompts_of(llm, [*tune, *held_out]), sampling)
        tuning = record_rows(llm, tune, candidates, plans, sampling)
        recording = record_rows(llm, held_out, candidates, plans, sampling)
        times, num_layers = memory_bound(llm.decoder, candidates.exits), llm.decoder.config.num_layers
    best = best_of_kinds(Predictor(tuning, times, PASSES_ALONE, 1, num_layers), plans)
    tasks = [answer.task for answer in recording.answers]
    found = {
        "exits": candidates.as_dict(),
        "num_layers": num_layers,
        "num_plans": len(plans),
        "prompts": {"tune": about(tune, tuning), "held_out": about(held_out, recording)},
        "agreement": agreement(recording, candidates, ProfileOptions().max_drafts),
        "counted": count(Predictor(recording, times, PASSES_ALONE, 1, num_layers), best, tasks),
    }
    return found, tuning, recording, plans


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints, and writes --json after each part."""
    sizes = dict.fromkeys(arguments.batch_size)
    each_options = [
        build(
            BenchOptions,
            {
                "batch_size": size,
                "by_batch": True,
                "max_tokens": arguments.max_tokens,
                "repeats": arguments.repeats,
                "transformers": False,
            },
        )
        for size in sizes
    ]
    check_results(arguments)
    numbers = {name: getattr(arguments, name) for name in NUMBERS}
    tune_job, job = (
        make_job(arguments.model, path, **numbers, **GRAPHS) for path in (arguments.tune, arguments.prompts)
    )
    tune, held_out = good_rows(tune_job), good_rows(job)
    check_apart(tune, held_out)
    measured_on, others = environment(), watch_others()
    result: dict[str, Any] = {
        "model": arguments.model,
        "date": datetime.date.today().isoformat(),
        "environment": measured_on,
        "options": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()
        },
    }

    def keep() -> None:
        result["environment"] = measured_on | {"others": others()}
        if arguments.json is not None:
            write_json(arguments.json, result)

    found, tuning, recording, plans = record_and_count(job, tune, held_out, each_options[0], arguments.trees)
    result |= found
    keep()
    print(
        f"{arguments.model}: {len(held_out)} prompts, plans tuned on {len(tune)} others; greedy, up to"
        f" {arguments.max_tokens} new tokens; {hardware_text(measured_on)}"
    )
    print_agreement(result["agreement"])
    print_counted(result["counted"])
    result["measured"] = {}
    for options in () if arguments.no_timing else each_options:
        tune_on, compare_on = (
            Prompts(of, rows, make_groups(rows, options.batch_size, by_batch=True))
            for of, rows in ((tuning, tune), (recording, held_out))
        )
        size = str(options.batch_size)
        result["measured"][size] = measure(job, options, tune_on, compare_on, plans)
        keep()
        print_measured(size, result["measured"][size], result["environment"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tune", type=Path, required=True, help="prompts that plans are chosen by")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts that they are compared on")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of each plan (default: 1)")
    parser.add_argument(
        "--exact-verify", action="store_true", help="as engine.exact_verify of a job: bits on a GPU"
    )
    parser.add_argument("--trees", action="store_true", help="search trees of an exit's drafts too")
    parser.add_argument("--dtype", default="auto", help="as engine.dtype of a job (default: auto)")
    parser.add_argument("--quantization", help="as engine.quantization of a job (default: none)")
    parser.add_argument("--no-timing", action="store_true", help="count rounds alone; nothing is timed")
    parser.add_argument("--json", type=Path, help="write everything, after each part")
    options = parser.parse_args(arguments)
    return exit_code("hierarchy", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
