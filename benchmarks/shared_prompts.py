"""What a prefix cache is worth to prompts that come together: two engines, one without it, take turns.

    python benchmarks/shared_prompts.py MODEL --prompts prompts.jsonl [--limit N] [--quantization int8]
    [--batch-size 8] [--max-tokens 64] [--shots 5] [--json FILE]

Batches of two kinds, whose rows are given at once: as many outputs of one prompt as there are rows, and
prompts that begin with the same `--shots` others, as examples do. Two batches share no more than what a chat
template begins with. Ratios are of times, prompts included, with 95 % intervals over batches; outputs are
greedy, so that those of both engines are equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one, make_parser
from benchmarks.command import run
from benchmarks.markdown import table
from hispec import LLM, SamplingParams
from hispec.errors import ConfigError, build
from hispec.jobs.bench_inputs import TokenIds, generate, good_rows, warm_up
from hispec.jobs.confidence_interval import Paired, mean_ratio, ratio_interval
from hispec.jobs.rows import count_rows
from hispec.jobs.schema import Job
from hispec.utils.console import make_bar
from hispec.utils.environment import busy_text, environment, hardware_text, watch_others

WITH, WITHOUT = "with", "without"
SAME, SHOTS = "outputs of one prompt", "prompts after the same examples"


def make_batches(prompts: list[TokenIds], rows: int, shots: int) -> dict[str, list[list[TokenIds]]]:
    """By kind; without prompts that would make no whole batch."""
    size, same, after = shots + rows, [], []
    for start in range(0, len(prompts) - size + 1, size):
        examples = [token for prompt in prompts[start : start + shots] for token in prompt]
        after.append([examples + prompt for prompt in prompts[start + shots : start + size]])
        same.append([prompts[start + size - 1]] * rows)  # which no other batch begins with
    return {SAME: same, SHOTS: after}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError or CheckpointError."""
    jobs = {name: build(Job, _job_values(options, name == WITH)) for name in (WITHOUT, WITH)}
    count_rows(jobs[WITH].input)
    rows = good_rows(jobs[WITH])
    if len(rows) < (least := 2 * (options.shots + options.batch_size)):
        raise ConfigError(
            f"--prompts: {len(rows)} are too few for two batches of {options.batch_size} after"
            f" {options.shots}; take at least {least}, fewer --shots or a smaller --batch-size"
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    with ExitStack() as stack:
        llms = {name: stack.enter_context(closing(job.make_llm())) for name, job in jobs.items()}
        prompts = [llms[WITH].encode(row.prompt, chat=row.is_chat) for row in rows]
        for llm in llms.values():
            warm_up(llm, [prompts[-1][::-1]], sampling)  # begins as no prompt does, for the cache
        measured_on, others = environment(), watch_others()
        kinds = make_batches(prompts, options.batch_size, options.shots)
        found = {name: _run(llms, batches, sampling) for name, batches in kinds.items()}
    return {
        "benchmark": "shared_prompts",
        "environment": measured_on | {"others": others()},
        "options": {name: value for name, value in vars(options).items() if name not in ("prompts", "json")},
        "kinds": found,
    }


def _job_values(options: argparse.Namespace, has_cache: bool) -> dict[str, Any]:
    return {
        "model": options.model,
        "engine": {
            "quantization": options.quantization,
            "max_num_seqs": options.batch_size,
            "enable_prefix_caching": has_cache,
        },
        "input": {"path": str(options.prompts), "limit": options.limit},
        "output": {"path": "not-written.jsonl"},
    }


def _run(llms: dict[str, LLM], batches: list[list[TokenIds]], sampling: SamplingParams) -> dict[str, Any]:
    """By engine: tokens and seconds of each batch, and positions of prompts that were computed."""
    runs: dict[str, dict[str, Any]] = {name: {"tokens": [], "seconds": []} for name in llms}
    outputs: dict[str, list[TokenIds]] = {name: [] for name in llms}
    for llm in llms.values():
        llm.reset_stats()
    with make_bar(len(batches), "shared prompts", "batch", True) as bar:
        for turn, batch in enumerate(batches):
            for name in sorted(llms, reverse=turn % 2 == 1):
                began = time.perf_counter()
                new = generate(llms[name], batch, sampling)
                runs[name]["seconds"].append(time.perf_counter() - began)
                runs[name]["tokens"].append(sum(map(len, new)))
                outputs[name] += new
            bar.update()
    for name, llm in llms.items():
        runs[name]["prompt_positions_computed"] = llm.stats()["prefill_tokens"]
    equal = sum(one == other for one, other in zip(outputs[WITH], outputs[WITHOUT], strict=True))
    return {"equal_outputs": equal, "outputs": len(outputs[WITH]), **runs}


def print_result(result: dict[str, Any]) -> None:
    print(hardware_text(result["environment"]))
    if busy := busy_text(result["environment"]):
        print(f"{busy}: do not rely on these speeds.")
    titles = [
        "batches of",
        "tokens/s without",
        "with",
        "ratio",
        "95 %",
        "positions computed",
        "equal outputs",
    ]
    lines = []
    for kind, found in result["kinds"].items():
        ours, without = found[WITH], found[WITHOUT]
        paired = [Paired(*(each[key] for each in (ours, without) for key in ("tokens", "seconds")))]
        interval = ratio_interval(paired)
        speeds = [f"{sum(each['tokens']) / sum(each['seconds']):.1f}" for each in (without, ours)]
        computed = "{prompt_positions_computed:,}".format
        lines.append(
            [
                f"{result['options']['batch_size']} {kind}",
                *speeds,
                f"{mean_ratio(paired):.2f}",
                "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
                f"{computed(**ours)} of {computed(**without)}",
                f"{found['equal_outputs']}/{found['outputs']}",
            ]
        )
    print(*table(titles, lines), sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--batch-size", type=at_least_one, default=8)
    parser.add_argument("--max-tokens", type=at_least_one, default=64)
    parser.add_argument("--shots", type=at_least_one, default=5)
    return run("shared_prompts", parser.parse_args(arguments), measure, print_result)


if __name__ == "__main__":
    sys.exit(main())
