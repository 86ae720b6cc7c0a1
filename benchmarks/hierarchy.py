"""What three tiers are worth beside two, on a model with trained exits: the best plan of each kind, tuned on
some prompts and compared on others.

    python benchmarks/hierarchy.py MODEL --tune TUNE.jsonl --prompts HELD_OUT.jsonl [--batch-size 1 4 16]
    [--max-tokens 64] [--repeats 1] [--trees] [--no-timing] [--json FILE]

Both files are inputs of jobs, as benchmarks/prompts.py writes them, and share no prompt. Decoding is greedy.

1. The model's own answers to the tuning prompts are recorded, and the plans of `hispec profile` searched over
   them for the best of each kind: two tiers and three, drafts by an exit, by prompt lookup and by both, three
   tiers with a fixed number of checks and gated (check.continue_confidence). Once a pass costs what it reads,
   as a share of the weights (memory-bound), and at each batch size what it takes on this machine.
2. The answers to the held-out prompts are recorded, and the rounds of the memory-bound plans counted.
3. At each batch size plain decoding and the plans that are best on this machine decode the held-out prompts,
   as `hispec bench` does: each batch by all of them in turn. What was predicted of these prompts stands
   beside what came out.

"Best" is what the tuning prompts say. Figures are means over tasks, and intervals hold 95 % of bootstrap
means over prompts (batches, where these run together), drawn task by task: a task with a single one has none.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.markdown import table
from benchmarks.recorded import PASSES_ALONE, memory_bound, prompts_of, record_rows
from ee_models.errors import CheckpointError
from hispec.config import SpeculativeConfig
from hispec.errors import ConfigError, HiSpecError, build, shown
from hispec.jobs.bench import BenchOptions, run_bench
from hispec.jobs.bench_inputs import TokenIds, good_rows, task_of, warm_up
from hispec.jobs.bench_runs import make_groups
from hispec.jobs.confidence_interval import Paired, mean_ratio, ratio_interval
from hispec.jobs.rows import Row, count_rows
from hispec.jobs.schema import Job
from hispec.latency.profile_file import LatencyProfile
from hispec.llm import LLM
from hispec.measure.latency import measure_latency
from hispec.profile.candidates import find_candidates
from hispec.profile.options import ProfileOptions
from hispec.profile.plans import all_plans, drafter_of, short_text
from hispec.profile.predict import Prediction, Predictor, calibrate, search
from hispec.profile.recording import Recording
from hispec.profile.results import agreement
from hispec.profile.round_cost import PassTimes
from hispec.profile.timed_runs import Step, check_served, generate_in_steps
from hispec.sampling_params import SamplingParams
from hispec.utils.console import make_bar, percent
from hispec.utils.environment import busy_text, environment, hardware_text, watch_others
from hispec.utils.files import check_target, write_json

DRAFTERS = {"exit": "exit", "adapter": "exit", "tree": "tree", "ngram": "n-gram", "hybrid": "hybrid"}
BASELINE = "two-tier exit"  # the paper's
RECORDED_ROWS = 16


class Totals(NamedTuple):
    """What answers or batches give and take, each."""

    tokens: Sequence[float]
    cost: Sequence[float]


# ---- kinds of plans ----


def is_gated(plan: SpeculativeConfig) -> bool:
    return plan.check is not None and plan.check.continue_confidence is not None


def kind_of(plan: SpeculativeConfig | None) -> str:
    """Such as `three-tier hybrid, gated`."""
    if plan is None:
        return "plain"
    tiers = "two" if plan.check is None else "three"
    return f"{tiers}-tier {DRAFTERS[drafter_of(plan)]}{', gated' if is_gated(plan) else ''}"


KINDS = [
    "plain",
    *(f"two-tier {drafter}" for drafter in dict.fromkeys(DRAFTERS.values())),
    *(
        f"three-tier {drafter}{gate}"
        for drafter in dict.fromkeys(DRAFTERS.values())
        for gate in ("", ", gated")
    ),
]


def best_of_kinds(predictor: Predictor, plans: Sequence[SpeculativeConfig]) -> dict[str, Prediction]:
    """{kind: its fastest plan}, plain decoding first. Those with a fixed number of checks and gated ones are
    searched apart, so that neither takes the other's place among those that are refined."""
    best = {"plain": predictor.predict(None)}
    apart = [[plan for plan in plans if is_gated(plan) == gated] for gated in (False, True)]
    found = [each for group in apart for each in search(predictor, group)[0]]
    for each in sorted(found, key=lambda each: (-each.tokens_per_s, short_text(each.plan))):
        best.setdefault(kind_of(each.plan), each)
    return {kind: best[kind] for kind in KINDS if kind in best}


def fastest(best: Mapping[str, Prediction], tiers: str) -> str:
    """The kind of the fastest plan of so many tiers: `two` or `three`."""
    return max((kind for kind in best if kind.startswith(tiers)), key=lambda kind: best[kind].tokens_per_s)


# ---- comparisons ----


def compared(ours: Totals, base: Totals, tasks: Sequence[str]) -> dict[str, Any]:
    """The mean over tasks of tokens per cost over the base's, and its interval (None where a task has a
    single entry)."""
    paired = [
        Paired(*([values[at] for at in numbers] for values in (*ours, *base)))
        for task in dict.fromkeys(tasks)
        for numbers in ([at for at, each in enumerate(tasks) if each == task],)
    ]
    interval = ratio_interval(paired)
    return {"ratio": mean_ratio(paired), "interval": None if interval is None else list(interval)}


def claims(
    held: Mapping[str, Totals], tasks: Sequence[str], tuned: Mapping[str, Prediction]
) -> dict[str, dict[str, Any]]:
    """The best three-tier plan over two-tier exits, which is the paper's comparison, and over the best
    two-tier plan of any drafter; which ones are best, the tuning prompts say."""
    three, two = fastest(tuned, "three"), fastest(tuned, "two")
    return {
        name: {"three_tier": three, "two_tier": base, **compared(held[three], held[base], tasks)}
        for name, base in (("over_exits", BASELINE), ("over_any", two))
    }


def plans_tuned(best: Mapping[str, Prediction]) -> dict[str, dict[str, Any]]:
    return {
        kind: {
            "plan": short_text(each.plan),
            "speculative": each.plan.model_dump() if each.plan is not None else None,
            "tuned": each.as_dict(),
        }
        for kind, each in best.items()
    }


# ---- inputs ----


def make_job(model: str, path: Path) -> Job:
    """The job whose input is at `path`; nothing is written to its output."""
    job = build(Job, {"model": model, "input": {"path": path}, "output": {"path": "unused"}})
    count_rows(job.input)
    return job


def text_of(row: Row) -> str:
    """What a prompt says, whether it is text or a conversation, without its layout."""
    content = row.input
    if content.messages is not None:
        text = "\n".join(message.content for message in content.messages)
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


# ---- this machine ----


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
    prompts: Prompts, latency: LatencyProfile, steps: Sequence[Step], batch_size: int, num_layers: int
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
        calibrate(steps, times, batch_size),
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
    with LLM(job.model, max_num_seqs=batch_size, enable_prefix_caching=False) as llm:
        candidates = find_candidates(llm.trained_exits, llm.decoder, None, must_be_trained=True)
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
    best = best_of_kinds(predictor_here(tune, latency, tune_steps, batch_size, num_layers), plans)
    predictor = predictor_here(held_out, latency, held_steps, batch_size, num_layers)
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


# ---- tables ----


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(*table(titles, rows), "", sep="\n")


def interval_text(found: Mapping[str, Any]) -> str:
    return "" if found["interval"] is None else "–".join(f"{bound:.2f}" for bound in found["interval"])


def print_agreement(found: Mapping[str, Any]) -> None:
    print("\n## Own greedy answers\n")
    tasks = list(found["tasks"])
    mean = ["mean"] if len(tasks) > 1 else []
    rows = []
    for exit_ in found["exits"]:
        shares = [exit_["tasks"][task] for task in tasks]
        shares += [statistics.fmean(shares)] * len(mean)
        rows.append([str(exit_["layer"]), *(percent(share) for share in shares)])
    print_table(["exit", *tasks, *mean], rows)


def print_claims(found: Mapping[str, Mapping[str, Any]], what: Mapping[str, str]) -> None:
    print_table(
        [
            "three tiers over two",
            "three",
            "two",
            *(title for each in what.values() for title in (each, "95 %")),
        ],
        [
            [
                {"over_exits": "over exits", "over_any": "over the best of any drafter"}[name],
                first["three_tier"],
                first["two_tier"],
                *(
                    text
                    for of in what
                    for text in (f"{found[of][name]['ratio']:.3f}", interval_text(found[of][name]))
                ),
            ]
            for name, first in next(iter(found.values())).items()
        ],
    )


def print_counted(found: Mapping[str, Any]) -> None:
    print("## Counted rounds, a pass costs its share of the weights\n")
    print_table(
        [
            "best of",
            "tokens per cost of a full pass",
            "95 %",
            "tokens per full pass",
            "95 %",
            "tokens/round",
            "plan",
        ],
        [
            [
                kind,
                f"{each['per_cost']['ratio']:.3f}",
                interval_text(each["per_cost"]),
                f"{each['per_full_pass']['ratio']:.3f}",
                interval_text(each["per_full_pass"]),
                f"{each['held_out']['tokens_per_round']:.2f}",
                each["plan"],
            ]
            for kind, each in found["plans"].items()
        ],
    )
    print_claims(found["claims"], {"per_cost": "per cost", "per_full_pass": "per full pass"})


def print_measured(batch_size: str, found: Mapping[str, Any]) -> None:
    print(f"## Measured, batch {batch_size}\n")
    rows = []
    for kind, each in found["plans"].items():
        together, same = each["all_prompts"], each["exact_match"]
        rows.append(
            [
                kind,
                f"{each['tokens_per_s']:.1f}",
                f"{each['to_plain']['ratio']:.3f}",
                interval_text(each["to_plain"]) if kind != "plain" else "",
                f"{each['rounds_to_plain']['ratio']:.3f}",
                f"{together['predicted']:.3f}",
                f"{together['measured']:.3f}",
                f"{together['difference']:+.1%}",
                "/".join(map(str, same or ())),
                each["plan"],
            ]
        )
    titles = ["best of", "tokens/s", "× plain", "95 %", "rounds alone", "all prompts: predicted", "measured"]
    print_table([*titles, "difference", "same output", "plan"], rows)
    print_claims(found["claims"], {"all": "measured", "rounds": "rounds alone"})
    if not found["row_invariant"]:
        print("Rows do not keep their bits on this platform: outputs may differ at near-ties.\n")
    if (busy := busy_text(found["environment"])) is not None:
        print(f"{busy}: do not rely on these speeds.\n")


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
    with LLM(job.model, max_num_seqs=rows) as llm:
        candidates = find_candidates(llm.trained_exits, llm.decoder, None, must_be_trained=True)
        plans = all_plans(ProfileOptions(drafters=drafters), candidates, None)
        if all(plan.check is None for plan in plans):
            raise ConfigError(
                f"{job.model}: its exits, at {candidates.layers}, leave no room for a check tier; three tiers"
                " need one at layer 2 or above"
            )
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


def run(arguments: argparse.Namespace) -> dict[str, Any]:
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
    if arguments.json is not None:
        check_target("--json", arguments.json)
    tune_job, job = make_job(arguments.model, arguments.tune), make_job(arguments.model, arguments.prompts)
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
        both = [
            Prompts(of, [group.prompts for group in make_groups(rows, options.batch_size, by_batch=True)])
            for of, rows in ((tuning, tune), (recording, held_out))
        ]
        size = str(options.batch_size)
        result["measured"][size] = measure(job, options, *both, plans)
        keep()
        print_measured(size, result["measured"][size])
    return result


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
    parser.add_argument("--trees", action="store_true", help="search trees of an exit's drafts too")
    parser.add_argument("--no-timing", action="store_true", help="count rounds alone; nothing is timed")
    parser.add_argument("--json", type=Path, help="write everything, after each part")
    try:
        run(parser.parse_args(arguments))
    except (HiSpecError, CheckpointError) as error:
        print(f"hierarchy: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
