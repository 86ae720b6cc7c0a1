"""Kernels of a round on a GPU, by plan and stage: a table for docs/performance/gpu.md. No GPU is needed.

    python benchmarks/kernel_counts.py [--layers 30] [--rows 2] [--names PLAN] [--json FILE]

The model has SmolLM2-135M's number of layers and random weights, and is as narrow as can be: how many kernels
a round has does not depend on its width.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports triton
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.arguments import at_least_one
from benchmarks.command import check_results, exit_code
from benchmarks.gpu_parts.subjects import random_decoder, shape
from benchmarks.kernel_counter import BETWEEN, ROUND, KernelCounter, as_on_a_gpu, on_triton
from benchmarks.markdown import table
from hispec.config import EngineConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.errors import build
from hispec.sampling_params import SamplingParams
from hispec.utils.files import write_json

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=64)
WAYS = {"greedy": GREEDY, "sampled": SAMPLED}
_WARM_UP, _ROUNDS = 3, 2  # steps that are not counted, rounds that are


@dataclass(frozen=True)
class Counts:
    """Kernels of a round on the average: of the model; besides, by stage; and how often each stage runs."""

    model: float
    beside: dict[str, float]
    runs: dict[str, float]
    names: dict[str, dict[str, float]]

    @property
    def total(self) -> float:
        return self.model + sum(self.beside.values())


def plans(num_layers: int) -> dict[str, dict[str, Any] | None]:
    """Fields of SpeculativeConfig of each plan, None = plain. Exits lie where SmolLM2's do, or as high for
    their model."""
    draft, check = max(1, num_layers * 4 // 30), max(2, num_layers // 2)
    ngram = {"min_size": 1, "max_size": 3}
    return {
        "plain": None,
        "two-tier exit, K = 2": {"draft": {"layer": draft}, "num_draft_tokens": 2},
        "two-tier n-gram, K = 4": {"draft": {"kind": "ngram", "ngram": ngram}, "num_draft_tokens": 4},
        "two-tier hybrid, K = 2": {
            "draft": {"kind": "hybrid", "layer": draft, "exit": "exit", "ngram": ngram},
            "num_draft_tokens": 2,
        },
        "three-tier exit, K = 2, R = 2": {
            "draft": {"layer": draft},
            "check": {"layer": check},
            "num_draft_tokens": 2,
            "num_checks": 2,
        },
    }


def count(values: dict[str, Any] | None, num_layers: int, params: SamplingParams, num_rows: int) -> Counts:
    """The kernels of one round of `num_rows` rows, one after the other without a request that comes or
    goes."""
    config = shape(32, 32, num_layers, 2, 2, 64, 1e5)
    with torch.inference_mode(False), as_on_a_gpu():
        decoder = on_triton(random_decoder(config, torch.device("cpu"), torch.bfloat16, 256))
        engine = Engine(
            decoder,
            EngineConfig(max_num_seqs=num_rows, max_model_len=256, block_size=256, num_kv_blocks=num_rows),
            None if values is None else build(SpeculativeConfig, values),
            eos_token_ids=(),
            is_static=True,
        )
        for row in range(num_rows):
            engine.add_request([3 + row, 5, 7, 3 + row, 5], params)
        counter = KernelCounter()
        with counter.watching():
            for _ in range(_WARM_UP):
                engine.step()
            counter.clear()
            while counter.runs[ROUND] < _ROUNDS:
                engine.step()
        return _counts(counter)


def _counts(counter: KernelCounter) -> Counts:
    rounds = counter.runs[ROUND]
    model = sum(num for (_, is_model), num in counter.kernels.items() if is_model)
    beside: Counter[str] = Counter()
    names: dict[str, dict[str, float]] = {}
    for (stage, is_model), num in counter.kernels.items():
        beside[stage] += 0 if is_model else num
    for (stage, name), num in counter.names.items():
        names.setdefault(stage, {})[name] = num / rounds
    return Counts(
        model / rounds,
        {stage: num / rounds for stage, num in beside.items()},
        {stage: num / rounds for stage, num in counter.runs.items()},
        names,
    )


def report(counts: dict[tuple[str, str], Counts]) -> list[str]:
    """Lines of Markdown: a row per plan and way of choosing; each stage as runs x kernels of one run."""
    stages = list(dict.fromkeys(stage for each in counts.values() for stage in each.beside))
    stages.sort(key=lambda stage: (stage == BETWEEN, stage == ROUND))
    lines = []
    for (plan, way), each in counts.items():
        cells = []
        for stage in stages:
            num, runs = each.beside.get(stage, 0.0), each.runs.get(stage, 1.0)
            times = "" if runs == 1 else f"{runs:g} × "
            cells.append(f"{times}{num / runs:.3g}" if num else "")
        beside = sum(each.beside.values())
        lines.append([plan, way, f"{each.total:g}", f"{each.model:g}", f"{beside:g}", *cells])
    return table(["plan", "choice", "kernels", "layers and heads", "beside", *stages], lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--layers", type=at_least_one, default=30)
    parser.add_argument("--rows", type=at_least_one, default=2)
    parser.add_argument("--names", metavar="PLAN", help="name the kernels of this plan, by stage, instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.names not in (None, *plans(args.layers)):
        parser.error(f"--names {args.names!r} must be one of {', '.join(plans(args.layers))}")
    return exit_code("kernel_counts", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Counts, prints, and writes --json."""
    check_results(args)
    chosen = {name: each for name, each in plans(args.layers).items() if args.names in (None, name)}
    counts = {
        (plan, way): count(values, args.layers, params, args.rows)
        for plan, values in chosen.items()
        for way, params in WAYS.items()
    }
    if args.names:
        for (_, way), each in counts.items():
            for stage, names in each.names.items():
                print(f"{way}, {stage} ({each.runs.get(stage, 1):g} a round): {names}")
    else:
        print("\n".join(report(counts)))
    if args.json:
        result = [{"plan": plan, "choice": way, **asdict(each)} for (plan, way), each in counts.items()]
        write_json(args.json, result)


if __name__ == "__main__":
    sys.exit(main())
