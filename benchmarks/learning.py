"""What guesses gain that are learnt while a job runs, and how soon: engines take turns, batch by batch.

    python benchmarks/learning.py MODEL --prompts prompts.jsonl [--limit N] [--quantization int8]
    [--dtype bfloat16] [--batch-size 1] [--max-tokens 128] [--num-draft-tokens 8] [--confidence 0.2]
    [--learn-tokens 1000000] [--parts 4] [--json FILE]

Every engine is one of its own, greedy, without a prefix cache: plain decoding; prompt lookup (matches of four
to two tokens); the same with guesses by the n-grams that come with the model, if there are any; with guesses
that are learnt, nothing being counted beforehand; with both. Prompts are served in order, so that the first
of the `--parts` was served by an engine that had learnt nothing. Ratios are over plain decoding of the same
prompts, prompts' own time included, with 95 % intervals (prompts, or batches of them, drawn anew).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one, make_parser
from benchmarks.command import run
from benchmarks.markdown import table
from ee_models.checkpoint.ngram_file import Ngrams, NgramsError, save_ngrams
from hispec import LLM, SamplingParams
from hispec.config import SpeculativeConfig
from hispec.errors import ConfigError, build
from hispec.jobs.bench_inputs import TokenIds, generate, good_rows, warm_up
from hispec.jobs.confidence_interval import Paired, mean_ratio, ratio_interval
from hispec.jobs.rows import count_rows
from hispec.jobs.schema import Job
from hispec.loading.ngram_tables import NgramTables
from hispec.utils.console import make_bar
from hispec.utils.environment import busy_text, environment, hardware_text, watch_others

PLAIN = "plain"
FEW_TOKENS = 10_000


def plans(
    options: argparse.Namespace, comes_with_ngrams: bool, none: Path
) -> dict[str, dict[str, Any] | None]:
    """The plan of each engine. none: a folder of n-grams that say nothing."""

    def lookup(**guesses: Any) -> dict[str, Any]:
        sizes = {"max_size": 4, "min_size": 2, "match_confidence": None, **guesses}
        return {"draft": {"kind": "ngram", "ngram": sizes}, "num_draft_tokens": options.num_draft_tokens}

    guess, learn = {"guess_confidence": options.confidence}, {"learn_tokens": options.learn_tokens}
    found: dict[str, dict[str, Any] | None] = {PLAIN: None, "lookup": lookup()}
    if comes_with_ngrams:
        found["counted"] = lookup(**guess)
    found["learnt"] = lookup(**guess, **learn, guess_path=str(none))
    if comes_with_ngrams:
        found["both"] = lookup(**guess, **learn)
    return found


def comes_with_ngrams(llm: LLM) -> bool:
    try:
        NgramTables(llm.trained_exits).file(None)
    except NgramsError:
        return False
    return True


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError or CheckpointError."""
    # Wrong settings are told before a model is loaded.
    build(SpeculativeConfig, plans(options, True, Path("none"))["both"])
    job = build(Job, _job_values(options))
    count_rows(job.input)
    rows = good_rows(job)
    if len(rows) < 2 * options.parts * options.batch_size:
        raise ConfigError(
            f"--prompts: {len(rows)} are too few for {options.parts} parts of two batches of"
            f" {options.batch_size}; take more, fewer parts or a smaller batch"
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    with ExitStack() as stack:
        llms = {PLAIN: stack.enter_context(closing(job.make_llm()))}
        prompts = [llms[PLAIN].encode(row.prompt, chat=row.is_chat) for row in rows]
        none = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hispec-learning-"))) / "none"
        never = {1: Ngrams(np.array([[0]]), np.array([0]), np.array([1], np.uint8))}
        vocabulary = llms[PLAIN].decoder.config.vocab_size
        save_ngrams(none, options.model, vocabulary, never, recipe={}, data={}, held_out={})
        for name, plan in plans(options, comes_with_ngrams(llms[PLAIN]), none).items():
            if name != PLAIN:
                llms[name] = stack.enter_context(closing(job.make_llm()))
                llms[name].set_speculative(plan)
            warm_up(llms[name], prompts[-options.batch_size :], sampling)
        measured_on, others = environment(), watch_others()
        runs, rounds = _run(llms, prompts, sampling, options.batch_size)
    return {
        "benchmark": "learning",
        "environment": measured_on | {"others": others()},
        "prompts": len(prompts),
        "options": {name: value for name, value in vars(options).items() if name not in ("prompts", "json")},
        "rounds": rounds,
        "equal_outputs": {
            name: sum(a == b for a, b in zip(of_engine["outputs"], runs[PLAIN]["outputs"], strict=True))
            for name, of_engine in runs.items()
        },
        "batches": {
            name: {key: of_engine[key] for key in ("tokens", "seconds")} for name, of_engine in runs.items()
        },
    }


def _job_values(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": options.model,
        "engine": {
            "quantization": options.quantization,
            "dtype": options.dtype,
            "max_num_seqs": options.batch_size,
            "enable_prefix_caching": False,  # else the second engine's prompts would be there
        },
        "input": {"path": str(options.prompts), "limit": options.limit},
        "output": {"path": "not-written.jsonl"},
    }


def _run(
    llms: dict[str, LLM], prompts: list[TokenIds], sampling: SamplingParams, batch_size: int
) -> tuple[dict[str, dict[str, list[Any]]], dict[str, int]]:
    runs: dict[str, dict[str, list[Any]]] = {
        name: {"tokens": [], "seconds": [], "outputs": []} for name in llms
    }
    for llm in llms.values():
        llm.reset_stats()
    starts, order = range(0, len(prompts), batch_size), list(llms)
    with make_bar(len(starts), "learning", "batch", True) as bar:
        for turn, start in enumerate(starts):
            first = turn % len(order)  # none is always first, or always after the same one
            for name in order[first:] + order[:first]:
                began = time.perf_counter()
                outputs = generate(llms[name], prompts[start : start + batch_size], sampling)
                runs[name]["seconds"].append(time.perf_counter() - began)
                runs[name]["tokens"].append(sum(map(len, outputs)))
                runs[name]["outputs"] += outputs
            bar.update()
    return runs, {name: llm.stats()["rounds"] for name, llm in llms.items()}


def ratios(result: dict[str, Any], name: str) -> list[tuple[float, tuple[float, float] | None]]:
    """Of an engine over plain decoding: of all batches, then of each part."""
    ours, plain, parts = result["batches"][name], result["batches"][PLAIN], result["options"]["parts"]
    size = len(ours["tokens"])
    places = [slice(None), *(slice(i * size // parts, (i + 1) * size // parts) for i in range(parts))]
    paired = [
        [Paired(*(each[key][place] for each in (ours, plain) for key in ("tokens", "seconds")))]
        for place in places
    ]
    return [(mean_ratio(each), ratio_interval(each)) for each in paired]


def print_result(result: dict[str, Any]) -> None:
    parts, tokens = result["options"]["parts"], result["batches"][PLAIN]["tokens"]
    print(hardware_text(result["environment"]))
    if busy := busy_text(result["environment"]):
        print(f"{busy}: do not rely on these speeds.")
    if sum(tokens) < FEW_TOKENS:
        print(f"Learning begins at some 2,000 tokens: {sum(tokens)} are too few to tell what it gains.")
    print(f"{result['prompts']} prompts, {sum(tokens)} new tokens; the same as plain decoding's:")
    print(", ".join(f"{name} {equal}" for name, equal in result["equal_outputs"].items()))
    titles = ["", "tokens/s", "x plain", "95 %", *(f"part {i + 1}" for i in range(parts)), "rounds/token"]
    lines = []
    for name, of_engine in result["batches"].items():
        (ratio, interval), *of_parts = ratios(result, name)
        told = "" if interval is None or name == PLAIN else f"{interval[0]:.2f}-{interval[1]:.2f}"
        speed = sum(of_engine["tokens"]) / sum(of_engine["seconds"])
        rounds = result["rounds"][name] / sum(of_engine["tokens"])
        by_part = [f"{part:.2f}" for part, _ in of_parts]
        lines.append([name, f"{speed:.1f}", f"{ratio:.2f}", told, *by_part, f"{rounds:.3f}"])
    print(*table(titles, lines), sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-size", type=at_least_one, default=1)
    parser.add_argument("--max-tokens", type=at_least_one, default=128)
    parser.add_argument("--num-draft-tokens", type=at_least_one, default=8)
    parser.add_argument("--confidence", type=float, default=0.2)
    parser.add_argument("--learn-tokens", type=int, default=1_000_000)
    parser.add_argument("--parts", type=at_least_one, default=4)
    options = parser.parse_args(arguments)
    return run("learning", options, measure, print_result)


if __name__ == "__main__":
    sys.exit(main())
