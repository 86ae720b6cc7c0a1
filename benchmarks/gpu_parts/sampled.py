"""Sampled rounds, as people ask for them: what temperature 0.8 and top_p 0.95 add to a greedy round, plain
and three-tier."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts.correctness import plans_for
from benchmarks.gpu_parts.engines import decode, grouped, make_engine, speed
from benchmarks.gpu_parts.run import Bench
from benchmarks.gpu_parts.shapes import SHAPES, TINY_SHAPES
from benchmarks.gpu_parts.subjects import (
    Loaded,
    Texts,
    found_subject,
    loaded,
    random_decoder,
    random_prompts,
    texts_of,
)
from ee_models.decoder import Decoder
from hispec.config import CheckConfig, DraftConfig, SpeculativeConfig

TEMPERATURE, TOP_P = 0.8, 0.95
WAYS = {"greedy": (0.0, 1.0), "sampled": (TEMPERATURE, TOP_P)}
SHAPE = "Llama-3-8B"  # the one of the larger vocabulary


def run(bench: Bench, out: dict[str, Any]) -> None:
    out["sampling"] = {"temperature": TEMPERATURE, "top_p": TOP_P}
    length, tokens = (160, 8) if bench.is_tiny else (512, 64)
    batches = (1, 2) if bench.is_tiny else (1, 32)
    chosen = (TINY_SHAPES if bench.is_tiny else SHAPES)[SHAPE]
    decoder = random_decoder(chosen.config, bench.device, torch.bfloat16, length)
    low, high = chosen.layers
    plan = SpeculativeConfig(
        draft=DraftConfig(layer=low), check=CheckConfig(layer=high), num_draft_tokens=2, num_checks=2
    )
    prompts = random_prompts(4, decoder.config.vocab_size, 10, 60)
    for rows in batches:
        bench.step(
            out,
            f"{SHAPE} shape, batch {rows}",
            20,
            partial(_rounds, bench, decoder, plan, [], prompts, rows, length, tokens),
        )
    del decoder
    bench.tidy()
    with found_subject(bench) as subject, loaded(bench, subject, "bfloat16", length) as model:
        texts = texts_of(bench, model, length - tokens - 32)
        out["model"] = subject.label
        for rows in batches:
            bench.step(
                out, f"batch {rows}", 15, partial(_of_model, bench, model, texts, rows, length, tokens)
            )


def _of_model(
    bench: Bench, model: Loaded, texts: Texts, rows: int, length: int, tokens: int
) -> dict[str, Any]:
    plan = plans_for(model.subject)["exits, three tiers"]
    return _rounds(bench, model.decoder, plan, model.exits(plan), texts.prompts, rows, length, tokens)


def _rounds(
    bench: Bench,
    decoder: Decoder,
    plan: SpeculativeConfig,
    exits: Any,
    prompts: list[list[int]],
    rows: int,
    length: int,
    tokens: int,
) -> dict[str, Any]:
    """Milliseconds of a round and tokens per second, in turn: medians over repeats of two groups each."""
    groups = grouped(prompts, rows)[:2]
    engines = {
        "plain": make_engine(decoder, rows=rows, length=length),
        "three_tier": make_engine(decoder, plan, exits, rows=rows, length=length),
    }
    runs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    try:
        for repeat in range(2 if bench.is_tiny else 4):
            for name, engine in engines.items():
                for way, (temperature, top_p) in WAYS.items():
                    decoded = [
                        decode(engine, group, tokens, temperature=temperature, top_p=top_p, while_full=True)
                        for group in groups
                    ]
                    if repeat:  # the first captures
                        ms = statistics.mean(each.ms_per_round for each in decoded)
                        runs.setdefault((name, way), []).append((ms, speed(decoded)))
    finally:
        for engine in engines.values():
            engine.close()
    found: dict[str, Any] = {}
    for name in engines:
        ms, rates = (
            {way: statistics.median(run[at] for run in runs[name, way]) for way in WAYS} for at in (0, 1)
        )
        found[name] = {
            "ms_per_round": ms,
            "tokens_per_s": rates,
            "sampled / greedy": ms["sampled"] / ms["greedy"],
        }
    found["three_tier / plain"] = {
        way: found["three_tier"]["tokens_per_s"][way] / found["plain"]["tokens_per_s"][way] for way in WAYS
    }
    return found
