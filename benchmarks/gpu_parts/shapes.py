"""Llama-2-7B and Llama-3-8B shapes, random weights made on the device: what stages and rounds cost; with
SYNTHETIC acceptance, what they would give."""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts.engines import decode, make_engine, speed, steady
from benchmarks.gpu_parts.floors import bytes_read, round_against_stages
from benchmarks.gpu_parts.run import SYNTHETIC, Bench
from benchmarks.gpu_parts.subjects import random_decoder, shape
from benchmarks.gpu_parts.synthetic import Agreement, agreement_of_shares, expected, forced, use
from benchmarks.gpu_parts.timing import count_kernels
from ee_models.config import ModelConfig
from ee_models.decoder import Decoder
from hispec.config import CheckConfig, DraftConfig, SpeculativeConfig
from hispec.engine import Engine
from hispec.jobs.rates import plan_text
from hispec.sampling_params import SamplingParams
from hispec.stats import rate

# HiSpec's plan is N_d = 2, N_i = 4: K = 2, R = 2. It gives 39.7 % for single-layer speculation and 58.1 % for
# its own; which tier's proposals these are shares of, and whether a tier that has rejected one counts those
# after it, is not said. Here 39.7 % are the drafts that the check keeps (without a check: verify), 58.1 % the
# tentative tokens that verify keeps. `shares`: of all that were proposed, as acceptance is counted here and
# in LayerSkip; `per token`: of those whose predecessors were kept, which gives shorter runs.
DRAFT_RATE, TENTATIVE_RATE = 0.397, 0.581
PAPER, OTHER = "K = 2, R = 2 (the paper's)", "K = 1, R = 3"
FIGURE = "shares"


@dataclass(frozen=True)
class Shape:
    config: ModelConfig
    layers: tuple[int, int]  # of the draft's exit and of the check's
    figure: str


@dataclass(frozen=True)
class Sizes:
    length: int  # positions of a sequence: as many as one bucket of contexts has
    context: int
    tokens: int
    rounds: int
    groups: dict[int, int]  # rows: groups of as many requests per run
    repeats: int


SHAPES = {
    "Llama-2-7B": Shape(
        shape(4096, 11008, 32, 32, 32, 32000, 1e4), (4, 8), "plain_7b_floor_fraction"
    ),  # its exits: ours, an eighth and a quarter
    "Llama-3-8B": Shape(shape(4096, 14336, 32, 32, 8, 128256, 5e5), (3, 8), "plain_8b_floor_fraction"),
}
TINY_SHAPES = {
    "Llama-2-7B": Shape(shape(48, 96, 4, 6, 6, 120, 1e4), (1, 2), "plain_7b_floor_fraction"),
    "Llama-3-8B": Shape(shape(48, 128, 4, 6, 2, 260, 5e5), (1, 2), "plain_8b_floor_fraction"),
}


def run(bench: Bench, out: dict[str, Any]) -> None:
    sizes = (
        Sizes(160, 12, 10, 6, {1: 2, 3: 1}, 1)
        if bench.is_tiny
        else Sizes(512, 256, 128, 48, {1: 3, 8: 1, 32: 1}, 3)
    )
    out["label"], out["copy_bytes_per_s"] = SYNTHETIC, bench.bandwidth
    order = dict(
        reversed((TINY_SHAPES if bench.is_tiny else SHAPES).items())
    )  # the one with more figures first
    for name, chosen in order.items():
        measured = out[name] = {"label": SYNTHETIC}
        decoder = random_decoder(chosen.config, bench.device, torch.bfloat16, sizes.length)
        measured["weights_bytes"] = decoder.num_bytes
        bench.step(measured, "kernels", 5, partial(_kernels, bench, decoder, sizes))
        for rows in sizes.groups:
            bench.step(
                measured, f"batch {rows}", 20, partial(_batch, bench, decoder, name, chosen, sizes, rows)
            )
        del decoder
        bench.tidy()


def _speculative(chosen: Shape) -> dict[str, SpeculativeConfig]:
    low, high = chosen.layers
    draft, check = DraftConfig(kind="exit", layer=low), CheckConfig(kind="exit", layer=high)
    return {
        PAPER: SpeculativeConfig(draft=draft, check=check, num_draft_tokens=2, num_checks=2),
        OTHER: SpeculativeConfig(draft=draft, check=check, num_draft_tokens=1, num_checks=3),
        "two tiers, K = 2": SpeculativeConfig(draft=draft, num_draft_tokens=2),
    }


def readings(plan: SpeculativeConfig) -> dict[str, Agreement]:
    """The paper's rates as agreement of tiers, in both ways of reading them. Agreement is the exits': the
    same whatever K and R are."""
    shares = agreement_of_shares(DRAFT_RATE, TENTATIVE_RATE, 2, 2)
    found = {"shares": shares, "per token": Agreement(DRAFT_RATE, TENTATIVE_RATE)}
    return (
        found if plan.check is not None else {name: Agreement(0.0, one.check) for name, one in found.items()}
    )


def _kernels(bench: Bench, decoder: Decoder, sizes: Sizes) -> dict[str, Any]:
    """Of an eager plain round at batch 1."""
    engine = make_engine(decoder, rows=1, length=decoder.max_positions, graphs=False)
    request = engine.add_request(
        _context(decoder, sizes), SamplingParams(temperature=0.0, max_tokens=sizes.tokens, ignore_eos=True)
    )
    for _ in range(4):
        engine.step()
    counted = count_kernels(engine.step, bench.device)
    engine.abort([request], notify=False)
    engine.close()
    return {**counted, "kernels / layers": counted["kernels"] / decoder.config.num_layers}


def _context(decoder: Decoder, sizes: Sizes) -> list[int]:
    generator = random.Random(0)
    return [generator.randrange(decoder.config.vocab_size) for _ in range(sizes.context)]


def _batch(
    bench: Bench, decoder: Decoder, name: str, chosen: Shape, sizes: Sizes, rows: int
) -> dict[str, Any]:
    """Stages and rounds as they are; then, acceptance forced, tokens per second in turn with plain
    decoding."""
    context, layers = _context(decoder, sizes), decoder.config.num_layers
    plans = {"plain": None, **_speculative(chosen)}
    engines = {
        key: make_engine(decoder, plan, rows=rows, length=decoder.max_positions)
        for key, plan in plans.items()
    }
    out = bench.found
    out |= {"plans": {key: plan_text(plan, layers) for key, plan in plans.items()}, "rounds": {}}
    try:
        for key in ("plain", PAPER):
            plan = plans[key]
            of_stages = round_against_stages(
                bench, decoder, [], plan.plan(layers) if plan else None, context, rows
            )
            most = decoder.max_positions - sizes.context
            in_engine = steady(bench, engines[key], [context] * rows, sizes.rounds, most)
            ratio = in_engine["round_ms"] / of_stages["sum_ms"]
            out["rounds"][key] = {**in_engine, **of_stages, "round / stages": ratio}
            bench.figure("host_gap_fraction", in_engine["host_gap"])
            bench.figure("round_vs_stage_floors", ratio)
        out["synthetic"] = _synthetic(bench, engines, plans, context, sizes, rows)
    finally:
        for engine in engines.values():
            engine.close()
    # A token's time in the engine, against what it has to read halfway through the answers.
    ms = 1e3 * rows / out["synthetic"]["tokens_per_s"]["plain"]
    floor = bytes_read(decoder, 0, layers, 1, rows, sizes.context + sizes.tokens // 2) / bench.bandwidth * 1e3
    out["plain_floor_fraction"] = floor / ms
    if rows == 1:
        bench.figure(chosen.figure, floor / ms)
        if name == "Llama-3-8B":
            ratios = out["synthetic"]["ratio_to_plain"]
            bench.figure(
                "synthetic_8b_vs_plain_b1", max(ratios[f"{key}, {FIGURE}"] for key in (PAPER, OTHER))
            )
    return out


def _synthetic(
    bench: Bench,
    engines: dict[str, Engine],
    plans: dict[str, SpeculativeConfig | None],
    context: list[int],
    sizes: Sizes,
    rows: int,
) -> dict[str, Any]:
    """Tokens per second of rounds alone, medians; each repeat has other seeds, and so other draws."""
    cases: dict[str, tuple[str, Agreement | None]] = {"plain": ("plain", None)}
    for key, plan in plans.items():
        if plan is not None:
            read = readings(plan) if key == PAPER else {FIGURE: readings(plan)[FIGURE]}
            cases |= {f"{key}, {reading}": (key, agreement) for reading, agreement in read.items()}
    speculations = {
        case: forced(engines[key], agreement)
        for case, (key, agreement) in cases.items()
        if agreement is not None
    }
    speeds: dict[str, list[float]] = {case: [] for case in cases}
    counted: dict[str, dict[str, Any]] = {}
    for repeat in range(sizes.repeats):
        for case, (key, _) in cases.items():
            engine = engines[key]
            if case in speculations:
                use(engine, speculations[case])
            if repeat == 0:
                decode(engine, [context] * rows, 8, while_full=True)  # captures
            engine.reset_stats()
            seeds = [1000 * repeat + rows * group for group in range(sizes.groups[rows])]
            speeds[case].append(
                speed(
                    [
                        decode(engine, [context] * rows, sizes.tokens, first_seed=seed, while_full=True)
                        for seed in seeds
                    ]
                )
            )
            _count(counted.setdefault(case, {}), engine.stats())
    medians = {case: statistics.median(values) for case, values in speeds.items()}
    return {
        "label": SYNTHETIC,
        "tokens_per_s": medians,
        "runs": speeds,
        "ratio_to_plain": {case: value / medians["plain"] for case, value in medians.items()},
        "agreement": {
            case: asdict(agreement) for case, (_, agreement) in cases.items() if agreement is not None
        },
        "expected": {
            case: _expected(plans[key], agreement)
            for case, (key, agreement) in cases.items()
            if agreement is not None
        },
        "found": {
            case: {
                "draft_share": rate(counts["draft_kept"], counts["drafted"]),
                "tentative_share": rate(counts["accepted"], counts["tentative"]),
                "tokens": rate(counts["committed"], counts["rounds"]),
            }
            for case, counts in counted.items()
        },
    }


def _expected(plan: SpeculativeConfig | None, agreement: Agreement) -> dict[str, float]:
    assert plan is not None
    return asdict(
        expected(agreement, plan.num_draft_tokens, plan.num_checks if plan.check is not None else 0)
    )


def _count(total: dict[str, Any], stats: dict[str, Any]) -> None:
    for name in ("drafted", "draft_kept", "tentative", "accepted", "committed", "rounds"):
        total[name] = total.get(name, 0) + stats[name]
