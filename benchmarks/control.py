"""What `control: goodput` is worth beside every fixed plan, on SmolLM2 with the exits that come with HiSpec.

    python benchmarks/control.py [--prompts FILE.jsonl] [--batch-sizes 1 4 16] [--max-tokens N] [--repeats N]
    [--limit N] [--json FILE]

Closed loop: at batch B there are B requests in flight, and a new one enters when one ends. Greedy. Requests
are the prompts in turn, with outputs of half to all of --max-tokens, so that they do not end together. A run
is timed from when B requests are in flight until they are no longer. One process; in each repeat every plan
runs once, another one first each time; medians are compared. Before each timed run the plan answers a few
requests untimed, to warm its caches; the controlled one, the first time, until it has had --warm-up seconds
to learn. Prefix caching is off. Prints tokens/s by batch and plan, and of goodput: its ratio to the best and
worst fixed plan, and the controller's own time as a share of that of rounds. Fails where an output is not
plain decoding's although rows keep their bits.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one, not_negative
from benchmarks.command import check_results, exit_code
from hispec.config import SpeculativeConfig
from hispec.control.candidates import CAUTIOUS
from hispec.errors import build
from hispec.jobs.bench_inputs import TokenIds, good_rows, token_ids_of
from hispec.jobs.load import load_job, load_preset
from hispec.jobs.rows import count_rows
from hispec.llm import LLM
from hispec.outputs import RequestOutput
from hispec.sampling_params import SamplingParams
from hispec.utils.environment import busy_text, environment, hardware_text
from hispec.utils.files import write_json

CONFIGS = Path(__file__).parent.parent / "configs"
GOODPUT = "goodput"
LOOKUP = {"max_size": 3, "min_size": 1, "match_confidence": None}
HYBRID = {"kind": "hybrid", "layer": 4, "ngram": LOOKUP, "exit": "adapter", "num_exit_tokens": 2}
CHECK = {"kind": "adapter", "layer": 7, "confidence": 0.9}


def plans(with_goodput: bool) -> dict[str, SpeculativeConfig | None]:
    """What is compared, by name. The controlled one may choose among the tiers of all others."""
    longer = {"max_size": 4, "min_size": 2, "match_confidence": None}
    given: dict[str, Any] = {
        "ngram, cautious": {"draft": {"kind": "ngram", "ngram": CAUTIOUS}, "num_draft_tokens": 4},
        "ngram": {"draft": {"kind": "ngram", "ngram": LOOKUP}, "num_draft_tokens": 4},
        "hybrid": {"draft": HYBRID, "num_draft_tokens": 6, "num_checks": 1, "draft_confidence": 0.2},
        "hybrid, three tiers": {
            "draft": HYBRID | {"ngram": longer},
            "check": CHECK,
            "num_draft_tokens": 6,
            "num_checks": 1,
            "draft_confidence": 0.2,
        },
    }
    if with_goodput:
        choices = {"control": "goodput", "goodput": {"drafters": ["ngram", "hybrid", "adapter"]}}
        given[GOODPUT] = {
            "draft": HYBRID,
            "check": CHECK,
            "num_draft_tokens": 6,
            "num_checks": 2,
            "draft_confidence": 0.2,
            **choices,
        }
    return {
        "plain": None,
        "kangaroo": load_preset(CONFIGS / "kangaroo_smollm2.yaml").speculative,
        **{name: build(SpeculativeConfig, values, name) for name, values in given.items()},
    }


@dataclass(frozen=True)
class Run:
    """Seconds and tokens while B requests were in flight, the controller's own seconds over those of rounds
    (None: nothing was controlled), and every request's output."""

    seconds: float
    tokens: int
    control_share: float | None
    outputs: list[TokenIds]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def sizes(max_tokens: int) -> itertools.cycle[int]:
    """Lengths of outputs, in turn: half to all of max_tokens."""
    return itertools.cycle(max(1, max_tokens * eighths // 8) for eighths in (8, 5, 7, 4, 6))


def closed_loop(llm: LLM, prompts: Sequence[TokenIds], batch_size: int, max_tokens: int) -> Run:
    """Answers all prompts, `batch_size` at a time."""
    lengths = sizes(max_tokens)
    waiting = deque((f"request-{at}", prompt, next(lengths)) for at, prompt in enumerate(prompts))
    outputs: dict[str, RequestOutput] = {}
    num_live = 0
    timed: tuple[float, dict[str, Any]] | None = None
    llm.reset_stats()
    before = llm.stats()
    started = time.perf_counter()
    while waiting or num_live:
        while waiting and num_live < batch_size:
            name, prompt, length = waiting.popleft()
            llm.add(prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True), name)
            num_live += 1
        for output in llm.step():
            outputs[output.request_id] = output
            num_live -= 1
        if timed is None and num_live + len(waiting) < batch_size:
            timed = time.perf_counter() - started, llm.stats()
    assert timed is not None
    seconds, after = timed
    return Run(
        seconds,
        after["tokens"],
        control_share(before, after),
        token_ids_of([outputs[f"request-{at}"] for at in range(len(prompts))]),
    )


def control_share(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """The controller counts since it was made, the engine's clock of rounds since the last reset."""
    if "overhead_s" not in after.get("control", {}):
        return None
    return (after["control"]["overhead_s"] - before["control"]["overhead_s"]) / (
        after["round_s"] - before["round_s"]
    )


def warm_up(llm: LLM, prompts: Sequence[TokenIds], batch_size: int, max_tokens: int, seconds: float) -> None:
    """At least one short batch, and batches until `seconds` are over."""
    started = time.perf_counter()
    closed_loop(llm, prompts[:batch_size], batch_size, 8)
    while time.perf_counter() - started < seconds:
        closed_loop(llm, prompts, batch_size, max_tokens)


def measure(
    llm: LLM, prompts: Sequence[TokenIds], batch_size: int, arguments: argparse.Namespace
) -> dict[str, list[Run]]:
    """Every plan's runs at one batch size."""
    compared = plans(not arguments.fixed_only)
    num_requests = max(arguments.least_requests, 2 * batch_size)
    asked = list(itertools.islice(itertools.cycle(prompts), num_requests))
    found: dict[str, list[Run]] = {name: [] for name in compared}
    names = list(compared)
    for repeat in range(arguments.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            llm.set_speculative(compared[name])
            # What the controller has learnt is kept while other plans run.
            warm_up(
                llm,
                asked,
                batch_size,
                arguments.max_tokens,
                arguments.warm_up if name == GOODPUT and repeat == 0 else 0.0,
            )
            found[name].append(closed_loop(llm, asked, batch_size, arguments.max_tokens))
            print(
                f"batch {batch_size}, repeat {repeat}: {name} {found[name][-1].tokens_per_s:.1f} tokens/s",
                file=sys.stderr,
            )
    return found


def summary(found: dict[str, list[Run]]) -> dict[str, Any]:
    """Of one batch size: speeds by plan, ratios of goodput, outputs that are not plain's."""
    speeds = {name: statistics.median(run.tokens_per_s for run in runs) for name, runs in found.items()}
    plain = found["plain"][0].outputs
    fixed = {name: speed for name, speed in speeds.items() if name != GOODPUT}

    def num_different(runs: Sequence[Run]) -> int:
        return sum(ours != theirs for run in runs for ours, theirs in zip(run.outputs, plain, strict=True))

    result: dict[str, Any] = {
        "tokens_per_s": speeds,
        "tokens_per_s_runs": {name: [run.tokens_per_s for run in runs] for name, runs in found.items()},
        "different_outputs": {name: num_different(runs) for name, runs in found.items()},
        "best_fixed": max(fixed, key=lambda name: fixed[name]),
        "worst_fixed": min(fixed, key=lambda name: fixed[name]),
        "goodput": None,
    }
    if GOODPUT in found:
        shares = [run.control_share for run in found[GOODPUT] if run.control_share is not None]
        result["goodput"] = {
            "to_best": speeds[GOODPUT] / max(fixed.values()),
            "to_worst": speeds[GOODPUT] / min(fixed.values()),
            "control_share": statistics.median(shares) if shares else None,
        }
    return result


def print_summary(batch_size: int, result: dict[str, Any]) -> None:
    print(f"\nbatch {batch_size:<22d} {'tokens/s':>9s} {'x plain':>8s} {'x best':>8s}")
    speeds = result["tokens_per_s"]
    for name, speed in sorted(speeds.items(), key=lambda item: -item[1]):
        different = (
            f"  {result['different_outputs'][name]} outputs differ"
            if result["different_outputs"][name]
            else ""
        )
        print(
            f"{name:28s} {speed:9.1f} {speed / speeds['plain']:8.2f}"
            f" {speed / speeds[result['best_fixed']]:8.2f}{different}"
        )
    if (goodput := result["goodput"]) is not None:
        share = "not counted" if goodput["control_share"] is None else f"{goodput['control_share']:.2%}"
        print(
            f"goodput / best fixed ({result['best_fixed']}) {goodput['to_best']:.3f}, / worst"
            f" ({result['worst_fixed']}) {goodput['to_worst']:.3f}; control's share of rounds' time: {share}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--prompts", type=Path, default=CONFIGS / "quickstart_prompts.jsonl", help="rows as of a job's input"
    )
    parser.add_argument("--limit", type=at_least_one, help="use the first N prompts")
    parser.add_argument("--batch-sizes", type=at_least_one, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=at_least_one, default=40, help="of a request's output, at most")
    parser.add_argument(
        "--least-requests",
        type=at_least_one,
        default=12,
        help="requests of a run, at least; 2 B if that is more",
    )
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument(
        "--warm-up",
        type=not_negative,
        default=40.0,
        help="seconds that the controlled plan has to learn at each batch size",
    )
    parser.add_argument("--fixed-only", action="store_true", help="leave the controlled plan out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    return exit_code("control", lambda: run(options))


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, and writes --json -> 1 where an output is not plain decoding's, though it must be."""
    check_results(arguments)
    measured_on = environment()  # now, so that its load is that of others
    limit = [] if arguments.limit is None else [f"input.limit={arguments.limit}"]
    job = load_job(CONFIGS / "quickstart.yaml", [f"input.path={arguments.prompts.absolute()}", *limit])
    count_rows(job.input)
    rows = good_rows(job)
    with LLM(
        arguments.model,
        dtype="float32",
        max_num_seqs=max(arguments.batch_sizes),
        max_model_len=2048,
        enable_prefix_caching=False,
    ) as llm:
        prompts = [llm.encode(row.prompt, chat=row.is_chat) for row in rows]
        results = {
            batch_size: summary(measure(llm, prompts, batch_size, arguments))
            for batch_size in arguments.batch_sizes
        }
        invariant = llm.row_invariant
    print(
        f"{arguments.model}: {len(prompts)} prompts, outputs of up to {arguments.max_tokens} tokens, greedy,"
        f" medians of {arguments.repeats} runs"
    )
    print(hardware_text(measured_on))
    for batch_size, result in results.items():
        print_summary(batch_size, result)
    if (busy := busy_text(measured_on)) is not None:
        print(f"{busy}: do not rely on these speeds.")
    if arguments.json is not None:
        options = {
            name: value for name, value in vars(arguments).items() if name not in ("json", "prompts")
        } | {"prompts": arguments.prompts.name}
        configs = {
            name: plan.model_dump() if plan else None
            for name, plan in plans(not arguments.fixed_only).items()
        }
        content = {
            "environment": measured_on,
            "options": options,
            "row_invariant": invariant,
            "plans": configs,
            "batches": results,
        }
        write_json(arguments.json, content)
    return int(
        invariant
        and any(count for result in results.values() for count in result["different_outputs"].values())
    )


if __name__ == "__main__":
    sys.exit(main())
