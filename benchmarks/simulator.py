"""The simulator against the engine: the same requests, arrivals and acceptance, on SmolLM2.

    python benchmarks/simulator.py [--prompts FILE.jsonl] [--requests N] [--rate R ...] [--rows N] [--max-tokens N] [--policy NAME] [--json FILE]

The engine serves prompts that come at Poisson times, with outputs of half to all of --max-tokens, greedy, and records a trace. What stages cost is
measured in the same process, on the idle engine, before and after; the profile is of both. Then the simulator serves the requests of the trace, which
come when they came, with the drafts that were kept as they were kept. Prints mean and p90 latency of both, and their ratios. Plans: plain decoding, and
prompt lookup. Prefix caching is off. On a machine that is busy with other programs the two need not agree: they were not timed at the same time.
"""
from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hispec.config import SchedulingConfig, SpeculativeConfig
from hispec.control.latency_file import LatencyProfile, save
from hispec.control.trace import read_trace
from hispec.environment import environment, hardware_text, is_busy
from hispec.errors import build
from hispec.jobs.load import load_job
from hispec.jobs.measure import TokenIds, good_rows
from hispec.llm import LLM
from hispec.measure.latency import measure_latency
from hispec.sampling_params import SamplingParams
from hispec.simulate.config import SimulationConfig
from hispec.simulate.run import simulate

CONFIGS = Path(__file__).parent.parent / "configs"
NUM_DRAFTS = 4
LOOKUP = {"draft": {"kind": "ngram", "ngram": {"max_size": 4, "min_size": 2, "tokens_per_match": None}}, "num_draft_tokens": NUM_DRAFTS}
PLANS: dict[str, SpeculativeConfig | None] = {"plain": None, "lookup": build(SpeculativeConfig, LOOKUP)}
WARM_UP = 4  # requests, one after the other, whose times do not count


def main() -> None:
    arguments = _arguments()
    job = load_job(CONFIGS / "quickstart.yaml", [f"input.path={arguments.prompts}"] if arguments.prompts else [])
    about, results = environment(), []
    for name, rate in itertools.product(PLANS, arguments.rate):
        with tempfile.TemporaryDirectory() as folder:
            result = {"plan": name, "rate": rate} | compare(job, name, rate, Path(folder), arguments)
        results.append(result)
        print(
            f"{name}, {rate:g}/s: engine {result['engine_mean_s']:.3f} s mean, {result['engine_p90_s']:.3f} s p90; simulator {result['simulated_mean_s']:.3f} s"
            f" and {result['simulated_p90_s']:.3f} s; ratio of means {result['ratio']:.3f}",
            flush=True,
        )
    print(hardware_text(about) + (f"; other programs were running (load {about['load']})" if is_busy(about) else ""))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"results": results, "environment": about}, indent=1) + "\n", encoding="utf-8")


def compare(job: Any, name: str, rate: float, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Mean and p90 latency of both, after the warm-up."""
    trace = folder / "trace.jsonl"
    settings = {"dtype": "float32", "max_num_seqs": arguments.rows, "max_model_len": 1024, "enable_prefix_caching": False, "trace": str(trace)}
    scheduling = SchedulingConfig(policy=arguments.policy)
    with LLM(job.model, speculative=PLANS[name], scheduling=scheduling, **settings) as llm:
        prompts = [llm.encode(row.prompt, chat=row.is_chat) for row in good_rows(job)]
        profile = profile_of(llm, arguments.rows)
        serve(llm, prompts, rate, arguments)
        profiles = [profile, profile_of(llm, arguments.rows)]
    requests = [each.latency_s for each in sorted(read_trace(trace).requests, key=lambda each: each.number)][WARM_UP:]
    simulated = [simulated_latencies(each, name, trace, folder, arguments) for each in profiles]
    mean = statistics.fmean(each["mean_s"] for each in simulated)
    engine = statistics.fmean(requests)
    return {
        "engine_mean_s": engine,
        "engine_p90_s": statistics.quantiles(requests, n=10)[-1],
        "simulated_mean_s": mean,
        "simulated_p90_s": statistics.fmean(each["p90_s"] for each in simulated),
        "simulated_before_s": simulated[0]["mean_s"],
        "simulated_after_s": simulated[1]["mean_s"],
        "ratio": mean / engine,
    }


def profile_of(llm: LLM, rows: int) -> LatencyProfile:
    return measure_latency(llm.decoder, (), max_num_seqs=rows, max_window=NUM_DRAFTS + 1)


def serve(llm: LLM, prompts: Sequence[TokenIds], rate: float, arguments: argparse.Namespace) -> None:
    """Open loop: a request is added when its time has come, at the next end of a step."""
    rng = random.Random(0)
    lengths = [rng.randint(-(-arguments.max_tokens // 2), arguments.max_tokens) for _ in range(WARM_UP + arguments.requests)]
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


def simulated_latencies(profile: LatencyProfile, name: str, trace: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    save(profile, folder / "latency.json")
    route = {"kind": "ngram", "most_drafts": NUM_DRAFTS, "acceptance": {"share": {"value": 0.5}}}
    control = {"kind": "plain"} if name == "plain" else {"kind": "fixed", "route": "lookup", "num_drafts": NUM_DRAFTS}
    num = WARM_UP + arguments.requests
    values = {
        "engine": {"max_num_seqs": arguments.rows},
        "latency": {"path": str(folder / "latency.json")},
        "routes": {"lookup": route},
        "requests": {"num": num, "warm_up": WARM_UP / num + 1e-9, "trace": str(trace)},
        "arrivals": {"kind": "recorded"},
        "systems": {"engine": {"control": control, "scheduling": {"policy": arguments.policy}}},
    }
    figures: dict[str, float] = simulate(build(SimulationConfig, values), progress=False)["loads"][0]["policies"]["engine"]
    return figures


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="rows with prompts (default: the quickstart's)")
    parser.add_argument("--requests", type=int, default=40, metavar="N")
    parser.add_argument("--rate", type=float, nargs="+", default=[0.5], metavar="R", help="requests per second")
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="max_num_seqs")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--policy", default="fcfs", choices=["fcfs", "sjf", "mlfq", "laps"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
