"""What a job costs beside `LLM.generate` of the same prompts: reading, checking, writing, its bar.

    python benchmarks/job_speed.py MODEL --prompts prompts.jsonl [--limit N] [--quantization int8]
    [--batch-size 32] [--max-tokens 64] [--repeats 3] [--json FILE]

Plain decoding, greedy, the end of a text ignored. Both use one model, loaded before, and take turns:
generate() gets all prompts, a job reads them from the file and writes its rows to a temporary one, put on the
disk every second. Tokens per second, prompts included, are medians of the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one, make_parser
from benchmarks.command import run
from benchmarks.markdown import table
from benchmarks.recorded import prompts_of
from hispec import LLM
from hispec.errors import ConfigError, build
from hispec.jobs.bench_inputs import good_rows, token_ids_of
from hispec.jobs.rows import count_rows
from hispec.jobs.runner import run_job
from hispec.jobs.schema import Job
from hispec.profile.timed_runs import check_served
from hispec.utils.environment import environment, hardware_text, watch_others


class Shared(LLM):
    """An LLM that a job may close without an end to it."""

    def close(self) -> None: ...


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError, CheckpointError, or RequestError with the prompts that cannot be served."""
    runs: dict[str, list[float]] = {"LLM.generate": [], "job": []}
    engine = {"quantization": options.quantization, "max_num_seqs": options.batch_size}
    measured_on, others = environment(), watch_others()  # now, so that its load is that of others
    with tempfile.TemporaryDirectory(prefix="hispec-job-speed-") as folder, ExitStack() as stack:
        values = {
            "model": options.model,
            # Else the second turn would find the first one's prompts.
            "engine": engine | {"enable_prefix_caching": False},
            "sampling": {"temperature": 0.0, "max_tokens": options.max_tokens, "ignore_eos": True},
            "input": {"path": str(options.prompts), "limit": options.limit},
            "output": {"path": f"{folder}/out.jsonl", "overwrite": True},
        }
        job = build(Job, values)
        count_rows(job.input)
        rows = good_rows(job)
        if len({row.is_chat for row in rows}) > 1:
            raise ConfigError(
                f"--prompts: {options.prompts} has conversations and other prompts; one kind each"
            )
        prompts: list[Any] = [row.prompt for row in rows]
        sampling = [row.sampling for row in rows]
        llm = Shared(job.model, **job.engine.model_dump())
        stack.callback(LLM.close, llm)
        check_served(llm, prompts_of(llm, rows), rows[0].sampling)
        generate = llm.chat if rows[0].is_chat else llm.generate
        object.__setattr__(job, "make_llm", lambda **_: llm)  # a job loads its own
        generate(prompts[: options.batch_size], sampling[: options.batch_size])  # to warm up
        for turn in range(options.repeats):
            for name in sorted(runs, reverse=turn % 2 == 0):
                started = time.perf_counter()
                if name == "job":
                    num_tokens = run_job(job).timed.completion_tokens
                else:
                    num_tokens = sum(map(len, token_ids_of(generate(prompts, sampling))))
                runs[name].append(num_tokens / (time.perf_counter() - started))
    return {
        "benchmark": "job_speed",
        "environment": measured_on | {"others": others()},
        "prompts": len(rows),
        "options": {"model": options.model, "max_tokens": options.max_tokens} | engine,
        "tokens_per_s": runs,
    }


def print_result(result: dict[str, Any]) -> None:
    medians = {name: statistics.median(runs) for name, runs in result["tokens_per_s"].items()}
    rows = [
        [name, f"{speed:.1f}", f"{speed / medians['LLM.generate']:.3f}"] for name, speed in medians.items()
    ]
    print(hardware_text(result["environment"]))
    print(*table(["", "tokens/s", "of LLM.generate"], rows), sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--batch-size", type=at_least_one, default=32)
    parser.add_argument("--max-tokens", type=at_least_one, default=64)
    parser.add_argument("--repeats", type=at_least_one, default=3)
    options = parser.parse_args(arguments)
    return run("job_speed", options, measure, print_result)


if __name__ == "__main__":
    sys.exit(main())
