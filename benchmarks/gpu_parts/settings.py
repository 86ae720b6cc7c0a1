"""Settings to try on a GPU, by name and in one place: `python benchmarks/gpu.py --parts settings [--settings
tiles,warps,floor,product,reduced]`. What wins belongs in the constants that it stands for here.

tiles     fewest tiles of keys that a split of attention has (`_MIN_TILES`), at batch 1
warps     of a program of attention, at batch 1
floor     tokens of the vocabulary per program of the floor of top_p (`_CHUNK`), in sampled rounds
product   cuBLAS against our invariant product, for 1 to 16 rows, by shape
reduced   bfloat16 sums in cuBLAS in reduced precision, allowed and not: time, and outputs that differ from
          plain decoding's
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts.correctness import plans_for
from benchmarks.gpu_parts.engines import TokenIds, decode, grouped, make_engine
from benchmarks.gpu_parts.run import Bench
from benchmarks.gpu_parts.sampled import TEMPERATURE, TOP_P
from benchmarks.gpu_parts.shapes import SHAPES, TINY_SHAPES
from benchmarks.gpu_parts.subjects import Loaded, Texts, found_subject, loaded, texts_of
from ee_models.kernels import runs_triton
from ee_models.linear import Linear, PlainLinear
from hispec.runner.cuda_graphs import CudaGraphs

TILES, WARPS, CHUNKS, ROWS = (1, 2, 4), (2, 4, 8), (1024, 2048, 4096), (1, 2, 4, 8, 16)
NO_TRITON = "not tried: Triton's kernels do not run here"


def run(bench: Bench, out: dict[str, Any]) -> None:
    asked = [name for name in str(bench.options.get("settings") or "").split(",") if name]
    if unknown := set(asked) - set(SETTINGS):
        raise ValueError(f"--settings: {', '.join(sorted(unknown))}; there are {', '.join(SETTINGS)}")
    length = 160 if bench.is_tiny else 2048
    wanted = [name for name in SETTINGS if not asked or name in asked]
    if "product" in wanted:
        bench.step(out, "product", 10, partial(_products, bench))
    if wanted == ["product"]:
        return
    with found_subject(bench) as subject, loaded(bench, subject, "bfloat16", length) as model:
        out["model"] = subject.label
        texts = texts_of(bench, model, length // 2)
        for name in wanted:
            if name != "product":
                bench.step(out, name, 15, partial(SETTINGS[name], bench, model, texts, length))


# ---- attention ----


@contextmanager
def held(target: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute, for as long as it is tried."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def fewest_tiles(number: int) -> AbstractContextManager[None]:
    from ee_models.attention import triton_pages

    return held(triton_pages, "_MIN_TILES", number)


def warps(number: int) -> AbstractContextManager[None]:
    from ee_models.attention import triton_pages

    usual = triton_pages._launch_config

    def launch(*arguments: Any) -> Any:
        return replace(usual(*arguments), num_warps=number)

    return held(triton_pages, "_launch_config", launch)


def chunk(number: int) -> AbstractContextManager[None]:
    from hispec.sampling import floor_triton

    return held(floor_triton, "_CHUNK", number)


def _floor(bench: Bench, model: Loaded, texts: Texts, length: int) -> dict[str, Any]:
    """Milliseconds of a sampled plain round, of one row and of many."""
    if not runs_triton(bench.device):
        return {"skipped": NO_TRITON}
    found = bench.found
    for rows in (1, 32):
        prompts = grouped(texts.prompts, rows)[0]
        of_rows = found[f"batch {rows}"] = {}
        for value in CHUNKS:
            with chunk(value):
                of_rows[str(value)] = _ms(model, prompts, length, temperature=TEMPERATURE, top_p=TOP_P)
    return found


def _attention(
    setting: Callable[[int], Any],
    values: tuple[int, ...],
    bench: Bench,
    model: Loaded,
    texts: Texts,
    length: int,
) -> dict[str, Any]:
    """Milliseconds of a plain round at batch 1, at a short context and at a long one."""
    if not runs_triton(bench.device):
        return {"skipped": NO_TRITON}
    short = min(texts.prompts, key=len)
    long = (short * length)[: length - 64]
    found = bench.found
    for name, prompt in {"short": short, "long": long}.items():
        of_context = found[f"context {len(prompt)}, {name}"] = {}
        for value in values:
            with setting(value):
                of_context[str(value)] = _ms(model, [prompt], length)
    return found


def _ms(model: Loaded, prompts: list[TokenIds], length: int, **sampling: float) -> float:
    engine = make_engine(model.decoder, rows=len(prompts), length=length)
    try:
        return statistics.median(
            decode(engine, prompts, 48, while_full=True, **sampling).ms_per_round for _ in range(4)
        )
    finally:
        engine.close()


# ---- products ----


def _products(bench: Bench) -> dict[str, Any]:
    """Microseconds of each product by shape [out, in] and rows, in bfloat16, of several weights in turn: one
    alone would stay in the cache."""
    kinds: dict[str, Callable[..., Linear]] = {"library": PlainLinear}
    if runs_triton(bench.device):
        from ee_models.kernels.triton_linear import InvariantLinear

        kinds["own"] = InvariantLinear
    found = bench.found
    found |= {} if "own" in kinds else {"skipped": f"own: {NO_TRITON}"}
    for name, shape in (TINY_SHAPES if bench.is_tiny else SHAPES).items():
        config = shape.config
        sizes = {
            "qkv": (config.q_size + 2 * config.kv_size, config.hidden_size),
            "gate_up": (2 * config.intermediate_size, config.hidden_size),
            "down": (config.hidden_size, config.intermediate_size),
            "head": (config.vocab_size, config.hidden_size),
        }
        for which, (outputs, inputs) in sizes.items():
            copies = 2 if bench.is_tiny else max(2, min(8, (1 << 30) // (2 * outputs * inputs)))
            weights = [
                torch.randn(outputs, inputs, device=bench.device, dtype=torch.bfloat16) for _ in range(copies)
            ]
            for kind, make in kinds.items():
                linears = [make(weight, None) for weight in weights]
                for rows in ROWS:
                    x = torch.randn(rows, inputs, device=bench.device, dtype=torch.bfloat16)
                    ms = bench.clock.medians(
                        {kind: _captured(bench, lambda linears=linears, x=x: [each(x) for each in linears])},
                        samples=1 if bench.is_tiny else 5,
                        repeats=1 if bench.is_tiny else 5,
                    )[kind]
                    of_shape = found.setdefault(f"{name}, {which} {outputs} x {inputs}", {})
                    of_shape.setdefault(f"{rows} rows", {})[kind] = 1e3 * ms / copies
            del weights
            bench.tidy()
    return found


def _captured(bench: Bench, run: Callable[[], Any]) -> Callable[[], Any]:
    """`run`; on a GPU from a graph, as in a round: launches by Python take longer than small products."""
    if bench.device.type != "cuda":
        return run
    with torch.inference_mode():
        run()
        replay, _ = CudaGraphs(bench.device).capture(run)
    return replay


# ---- sums of bfloat16 ----


def reduced_precision(is_allowed: bool) -> AbstractContextManager[None]:
    return held(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", is_allowed)


def _reduced(bench: Bench, model: Loaded, texts: Texts, length: int) -> dict[str, Any]:
    """Of each: milliseconds of a plain round, and how many outputs of a three-tier plan differ from plain
    decoding's."""
    prompts, tokens = texts.prompts[: 2 if bench.is_tiny else 12], 8 if bench.is_tiny else 64
    plan = plans_for(model.subject)["exits, three tiers"]
    found: dict[str, Any] = {}
    for is_allowed in (True, False):
        with reduced_precision(is_allowed):
            outputs = []
            for speculative in (None, plan):
                engine = make_engine(
                    model.decoder, speculative, model.exits(speculative), rows=1, length=length
                )
                outputs.append([decode(engine, [prompt], tokens).outputs[0] for prompt in prompts])
                engine.close()
            found["allowed" if is_allowed else "not allowed"] = {
                "ms_per_round": _ms(model, [prompts[0]], length),
                "outputs": len(prompts),
                "differing": sum(one != other for one, other in zip(*outputs, strict=True)),
            }
    return found


SETTINGS: dict[str, Callable[..., Any]] = {
    "tiles": partial(_attention, fewest_tiles, TILES),
    "warps": partial(_attention, warps, WARPS),
    "floor": _floor,
    "product": _products,
    "reduced": _reduced,
}
