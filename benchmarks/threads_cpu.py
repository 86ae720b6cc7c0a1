"""One process on all cores of this CPU beside workers that share them: what threads cost that share every
pass, and what memory workers take.

    python benchmarks/threads_cpu.py MODEL --prompts prompts.jsonl [--limit N] [--quantization int8]
    [--workers N] [--batch-size 64] [--max-tokens 64] [--repeats 3] [--json FILE]

Plain decoding, greedy, the end of a text ignored. The one process has --batch-size rows, each of --workers
(default: auto) its share of them. They take turns over all prompts, the one process first in every other.
Tokens per second are medians of the repeats, prompts included. Memory is that of all processes of the
workers' LLM, this one among them, before the other one is loaded: a page of several processes counts for each
in part (PSS; Linux).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one, make_parser
from benchmarks.command import run
from benchmarks.markdown import table
from hispec.config import EngineConfig
from hispec.errors import ConfigError, build
from hispec.jobs.bench_inputs import generate, good_rows
from hispec.jobs.rows import count_rows
from hispec.jobs.schema import Job
from hispec.utils.environment import environment, hardware_text
from hispec.utils.memory import proportional_bytes

ONE = "one process"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError for what cannot be measured, before a model is loaded."""
    given = {"model": options.model, "input": {"path": options.prompts}, "output": {"path": "unused"}}
    job = build(Job, given)
    count_rows(job.input)
    prompts = [(row.prompt, row.is_chat) for row in good_rows(job)[: options.limit]]
    from hispec import LLM, SamplingParams
    from hispec.workers.pool import WorkerPool
    from hispec.workers.shares import make_shares

    settings = {"quantization": options.quantization, "device": "cpu", "enable_prefix_caching": False}
    number = len(make_shares(options.workers or "auto", build(EngineConfig, settings)))
    if min(len(prompts), options.batch_size) < number or number < 2:
        raise ConfigError(
            f"{len(prompts)} prompts and --batch-size={options.batch_size}: there must be two workers or"
            f" more, and one of each for each of {number}"
        )
    rows = -(-options.batch_size // number)
    # Before anything is loaded, so that its load is that of others. No `others` follow: `watch_others` takes
    # off the time of this process alone, and would count the workers among other programs.
    measured_on = environment()
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    with LLM(options.model, workers=number, max_num_seqs=rows, **settings) as workers:
        assert isinstance(workers.engine, WorkerPool)
        token_ids = [workers.encode(prompt, chat=is_chat) for prompt, is_chat in prompts]
        generate(workers, token_ids, params)  # to warm up, and to touch memory
        pids = {"parent": os.getpid(), **workers.engine.pids()}
        memory = {
            "of_processes": {name: proportional_bytes(pid) for name, pid in pids.items()},
            **workers.memory(),
        }
        with LLM(options.model, max_num_seqs=options.batch_size, **settings) as one:
            generate(one, token_ids[: options.batch_size], params)
            order = [(ONE, one), (f"{number} workers", workers)]
            runs: dict[str, list[float]] = {name: [] for name, _ in order}
            for _ in range(options.repeats):
                for name, llm in order:
                    start = time.perf_counter()
                    num_tokens = sum(map(len, generate(llm, token_ids, params)))
                    runs[name].append(num_tokens / (time.perf_counter() - start))
                order.reverse()
    return {
        "benchmark": "threads_cpu",
        "environment": measured_on,
        "prompts": len(prompts),
        "workers": number,
        "options": {
            "batch_size": options.batch_size,
            "max_tokens": options.max_tokens,
            "model": options.model,
        }
        | settings,
        "tokens_per_s": runs,
        "memory": memory,
    }


def print_result(result: dict[str, Any]) -> None:
    of_one = statistics.median(result["tokens_per_s"][ONE])
    rows = [
        [name, f"{statistics.median(runs):.1f}", f"{statistics.median(runs) / of_one:.2f}"]
        for name, runs in result["tokens_per_s"].items()
    ]
    print(hardware_text(result["environment"]))
    print(*table(["", "tokens/s", f"of {ONE}"], rows), sep="\n")
    memory = result["memory"]
    parts = {name: size for name, size in memory["of_processes"].items() if size is not None}
    parts |= {
        "all": sum(parts.values()),
        "of that weights": memory["weights_bytes"],
        "KV": memory["kv_bytes"],
    }
    print(", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in parts.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=at_least_one, metavar="N")
    parser.add_argument("--batch-size", type=at_least_one, default=64)
    parser.add_argument("--max-tokens", type=at_least_one, default=64)
    parser.add_argument("--repeats", type=at_least_one, default=3)
    options = parser.parse_args(arguments)
    return run("threads_cpu", options, measure, print_result)


if __name__ == "__main__":
    sys.exit(main())
