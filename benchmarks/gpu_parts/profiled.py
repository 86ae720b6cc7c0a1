"""What a round's graph consists of: kernels by count and by time of one replay, at batch 1. Mend the largest
first."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts.correctness import plans_for
from benchmarks.gpu_parts.engines import make_engine
from benchmarks.gpu_parts.run import Bench
from benchmarks.gpu_parts.sampled import TEMPERATURE, TOP_P
from benchmarks.gpu_parts.subjects import Loaded, found_subject, loaded, texts_of
from benchmarks.gpu_parts.timing import count_kernels
from hispec.config import SpeculativeConfig
from hispec.sampling_params import SamplingParams

WARM_STEPS = 6  # by then a request is ready, and its graph is captured


def run(bench: Bench, out: dict[str, Any]) -> None:
    length = 160 if bench.is_tiny else 512
    with found_subject(bench) as subject, loaded(bench, subject, "bfloat16", length) as model:
        out["model"] = subject.label
        plans = plans_for(subject)
        cases: dict[str, tuple[SpeculativeConfig | None, float]] = {
            "plain": (None, 0.0),
            "exits, checked 2 x 2": (plans["exits, three tiers"], 0.0),
            "n-gram, checked": (plans["n-grams, three tiers"], 0.0),
            "plain, sampled": (None, TEMPERATURE),
        }
        prompt = max(texts_of(bench, model, length // 2).prompts, key=len)
        for name, (plan, temperature) in cases.items():
            bench.step(out, name, 10, partial(_replay, bench, model, prompt, plan, temperature, length))


def _replay(
    bench: Bench,
    model: Loaded,
    prompt: list[int],
    plan: SpeculativeConfig | None,
    temperature: float,
    length: int,
) -> dict[str, Any]:
    engine = make_engine(model.decoder, plan, model.exits(plan), rows=1, length=length)
    try:
        engine.add_request(
            prompt,
            SamplingParams(
                temperature=temperature,
                top_p=TOP_P if temperature else 1.0,
                seed=0,
                max_tokens=length - len(prompt) - 1,
                ignore_eos=True,
            ),
        )
        for _ in range(WARM_STEPS):
            engine.step()
        graphs = engine._rounds.graphs
        assert graphs is not None and len(graphs) == 1, "the round is not one graph"
        (replay,) = graphs.replays
        with torch.inference_mode():
            replay()
            counted = count_kernels(replay, bench.device)
            ms = bench.clock.ms(replay, 2 if bench.is_tiny else 20)
    finally:
        engine.close()
    return {**counted, "ms": ms, "kernels / layers": counted["kernels"] / model.decoder.config.num_layers}
