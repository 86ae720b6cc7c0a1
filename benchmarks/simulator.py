"""The simulator against the engine: the same requests, arrivals and acceptance, on SmolLM2.

    python benchmarks/simulator.py [--prompts FILE.jsonl] [--requests N] [--rate R ...] [--rows N]
    [--max-tokens N] [--policy NAME] [--plans NAME ...]
                                   [--json FILE]

The engine serves prompts that come at Poisson times, with outputs of half to all of --max-tokens, greedy, and
records a trace. What stages cost is measured in the same process, on the idle engine, before and after; the
mean of both counts. Then the simulator serves the requests of the trace, which come when they came, with the
drafts that were kept as they were kept. Prints mean and p90 latency of both, and their ratios. Plans: plain
decoding, and prompt lookup. Prefix caching is off.

*drift* is what rounds of the engine took over what the profile says of them: 1 on an idle machine. The ratio
without it is of a simulator whose costs are all scaled by that one number, and so says what is left: the
simulator's own error.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import above_zero, at_least_one
from benchmarks.command import check_results, exit_code
from hispec.config import SchedulingConfig, SpeculativeConfig
from hispec.errors import build
from hispec.jobs.bench_inputs import TokenIds, good_rows
from hispec.jobs.inputs import files_read
from hispec.jobs.load import load_job
from hispec.jobs.rows import Row, count_rows
from hispec.jobs.schema import Job
from hispec.latency.fit import Point, fit
from hispec.latency.model import Linear
from hispec.llm import LLM
from hispec.measure.latency import measure_latency
from hispec.sampling_params import SamplingParams
from hispec.simulate.config import SimulationConfig
from hispec.simulate.distributions import Floats
from hispec.simulate.row_state import T_ROUND_S, T_ROUNDS
from hispec.simulate.run import Experiment
from hispec.trace.writer import read_trace
from hispec.utils.environment import busy_text, environment, hardware_text
from hispec.utils.files import write_json

CONFIGS = Path(__file__).parent.parent / "configs"
NUM_DRAFTS = 4
LOOKUP = {
    "draft": {"kind": "ngram", "ngram": {"max_size": 4, "min_size": 2, "match_confidence": None}},
    "num_draft_tokens": NUM_DRAFTS,
}
PLANS: dict[str, SpeculativeConfig | None] = {"plain": None, "lookup": build(SpeculativeConfig, LOOKUP)}
WARM_UP = 4  # requests, one after the other, whose times do not count


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    return exit_code("simulator", lambda: run(options))


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints, and writes --json."""
    job = load_job(
        CONFIGS / "quickstart.yaml", [f"input.path={arguments.prompts}"] if arguments.prompts else []
    )
    check_results(arguments, read=files_read(job))
    count_rows(job.input)
    rows = good_rows(job)
    about, results = environment(), []
    for name, rate in itertools.product(arguments.plans, arguments.rate):
        with tempfile.TemporaryDirectory() as folder:
            result = {"plan": name, "rate": rate} | compare(job, rows, name, rate, Path(folder), arguments)
        results.append(result)
        rounds = [
            result[key] for key in ("engine_rounds", "simulated_rounds", "simulated_rounds_without_drift")
        ]
        print(
            f"{name}, {rate:g}/s: engine {result['engine_mean_s']:.3f} s mean, {result['engine_p90_s']:.3f} s"
            f" p90; simulator {result['simulated_mean_s']:.3f} s and {result['simulated_p90_s']:.3f} s; ratio"
            f" of means {result['ratio']:.3f}; drift {result['drift']:.3f}, ratio without it"
            f" {result['ratio_without_drift']:.3f}; {rounds} rounds",
            flush=True,
        )
    print(hardware_text(about))
    if (busy := busy_text(about)) is not None:
        print(f"{busy}: do not rely on these times.")
    if arguments.json is not None:
        write_json(arguments.json, {"results": results, "environment": about})


def compare(
    job: Job, rows: Sequence[Row], name: str, rate: float, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Mean and p90 latency of both, after the warm-up."""
    trace = folder / "trace.jsonl"
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": arguments.rows,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "trace": str(trace),
    }
    scheduling = SchedulingConfig(policy=arguments.policy)
    with LLM(job.model, speculative=PLANS[name], scheduling=scheduling, **settings) as llm:
        prompts = [llm.encode(row.prompt, chat=row.is_chat) for row in rows]
        points = points_of(llm, arguments.rows)
        serve(llm, prompts, rate, arguments)
        points += points_of(llm, arguments.rows)
    recorded = read_trace(trace)
    latencies = [each.e2e_s for each in sorted(recorded.requests, key=lambda each: each.number)][WARM_UP:]
    engine = statistics.fmean(latencies)
    round_s = sum(each.seconds for each in recorded.rounds if each.seconds is not None)
    costs = {name: each.cost for name, each in fit(points).items()}
    found, num_rounds, simulated_round_s = simulated(costs, 1.0, name, trace, arguments)
    timed = sum(each.rounds for each in recorded.rounds if each.seconds is not None)
    drift = (round_s / timed) / (simulated_round_s / num_rounds)
    scaled, num_scaled, _ = simulated(costs, drift, name, trace, arguments)
    return {
        "engine_mean_s": engine,
        "engine_p90_s": float(np.percentile(latencies, 90)),
        "simulated_mean_s": float(found.mean()),
        "simulated_p90_s": float(np.percentile(found, 90)),
        "ratio": float(found.mean()) / engine,
        "drift": drift,
        "ratio_without_drift": float(scaled.mean()) / engine,
        "engine_rounds": sum(each.rounds for each in recorded.rounds),
        "simulated_rounds": num_rounds,
        "simulated_rounds_without_drift": num_scaled,
    }


def points_of(llm: LLM, rows: int) -> list[Point]:
    """Passes timed now."""
    profile = measure_latency(llm.decoder, (), max_num_seqs=rows, max_window=NUM_DRAFTS + 1)
    return [Point(**each.model_dump()) for each in profile.points]


def serve(llm: LLM, prompts: Sequence[TokenIds], rate: float, arguments: argparse.Namespace) -> None:
    """Open loop: a request is added when its time has come, at the next end of a step."""
    rng = random.Random(0)
    lengths = [
        rng.randint(-(-arguments.max_tokens // 2), arguments.max_tokens)
        for _ in range(WARM_UP + arguments.requests)
    ]
    asked = list(zip(itertools.cycle(prompts), lengths, strict=False))
    for at, (prompt, length) in enumerate(asked):
        if at == WARM_UP:
            started = due = time.perf_counter()
        if at >= WARM_UP:
            due += rng.expovariate(rate)
            while (now := time.perf_counter()) < due:
                if llm.has_unfinished():
                    llm.step()
                else:
                    time.sleep(min(due - now, 0.01))
        llm.add(prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True), f"request-{at}")
        while at < WARM_UP and llm.has_unfinished():
            llm.step()
    while llm.has_unfinished():
        llm.step()
    print(f"served {arguments.requests} requests in {time.perf_counter() - started:.1f} s", file=sys.stderr)


def simulated(
    costs: dict[str, Linear], factor: float, name: str, trace: Path, arguments: argparse.Namespace
) -> tuple[Floats, int, float]:
    """Latencies after the warm-up; rounds, and seconds of all of them. factor: of all costs."""
    stages = {}
    for stage, cost in costs.items():
        fields = {name: factor * ms for name, ms in vars(cost).items() if name != "knots"}
        stages[stage] = fields | {"knots": [[tokens, factor * ms] for tokens, ms in cost.knots]}
    control = (
        {"kind": "plain"}
        if name == "plain"
        else {"kind": "fixed", "route": "lookup", "num_drafts": NUM_DRAFTS}
    )
    values = {
        "engine": {"max_num_seqs": arguments.rows},
        "latency": {"stages": stages},
        "routes": {
            "lookup": {"kind": "ngram", "most_drafts": NUM_DRAFTS, "acceptance": {"share": {"value": 0.5}}}
        },
        "requests": {"num": WARM_UP + arguments.requests, "warm_up": 0.0, "trace": str(trace)},
        "arrivals": {"kind": "recorded"},
        "systems": {"engine": {"control": control, "scheduling": {"policy": arguments.policy}}},
    }
    config = build(SimulationConfig, values)
    run = Experiment(config).run(config.systems["engine"], 1.0, None, 0, lambda _: None)
    latencies = run.outcomes.finished_s - run.outcomes.arrival_s
    return latencies[WARM_UP:], int(run.totals[T_ROUNDS]), float(run.totals[T_ROUND_S])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="rows with prompts (default: the quickstart's)"
    )
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--requests", type=at_least_one, default=40, metavar="N")
    parser.add_argument(
        "--rate", type=above_zero, nargs="+", default=[0.5], metavar="R", help="requests per second"
    )
    parser.add_argument("--rows", type=at_least_one, default=4, metavar="N", help="max_num_seqs")
    parser.add_argument("--max-tokens", type=at_least_one, default=48, metavar="N")
    parser.add_argument("--policy", default="fcfs", choices=["fcfs", "sjf", "mlfq", "laps"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
