"""What a pass costs on this CPU, and where a plain step's time goes. `python benchmarks/cpu.py [--json
FILE]`, about two minutes.

Every figure is a median over interleaved repeats in one process. Run it on an idle machine: torch's threads
wait for each other at every matrix product, so another busy process costs far more than its share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of
from ee_models.attention import select_backend
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec.config import EngineConfig
from hispec.engine import Engine
from hispec.loading.fetch import resolve_model
from hispec.sampling.sampler import Sampler
from hispec.sampling_params import SamplingParams
from hispec.utils.environment import environment, peak_memory_bytes

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def median_ms(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each function; they take turns, so that a slow moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def pass_view(rows: int, q_len: int, context: int) -> BatchView:
    """`rows` sequences of `context` positions in scattered blocks; the pass is over the last `q_len` of
    each."""
    max_blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(rows * max_blocks, generator=torch.Generator().manual_seed(0)).view(
        rows, max_blocks
    )
    positions = torch.arange(context - q_len, context).expand(rows, -1)
    return BatchView(
        positions.reshape(-1),
        slots_of(tables, positions, BLOCK_SIZE).reshape(-1),
        tables,
        torch.arange(0, rows * q_len + 1, q_len),
        q_len,
        context,
    )


def make_kv(decoder: Decoder, rows: int, context: int) -> PagedKV:
    config = decoder.config
    kv = PagedKV(
        config.num_layers,
        rows * -(-context // BLOCK_SIZE),
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        torch.float32,
        CPU,
    )
    kv.data.normal_(generator=torch.Generator().manual_seed(0))
    return kv


def measure_passes(decoder: Decoder, repeats: int) -> dict[str, Any]:
    """Milliseconds of passes over spans of layers, batch 1, context 128."""
    layers, kv = decoder.config.num_layers, make_kv(decoder, 1, 128)

    def whole(q_len: int, lo: int, hi: int, head: bool) -> Callable[[], Any]:
        view, hidden = pass_view(1, q_len, 128), torch.randn(q_len, decoder.config.hidden_size)
        return lambda: (
            decoder.run_layers(hidden.clone(), lo, hi, kv, view),
            decoder.logits(hidden, hi) if head else None,
        )

    spans = {f"all layers and head, {n} positions": whole(n, 0, layers, True) for n in (1, 4, 8, 16)}
    spans |= {
        "all layers, 1 position": whole(1, 0, layers, False),
        "half the layers, 1 position": whole(1, 0, layers // 2, False),
    }
    return median_ms(spans, repeats)


def measure_attention(decoder: Decoder, repeats: int) -> dict[str, Any]:
    """Milliseconds of one layer's attention, by backend."""
    found = {}
    for rows, q_len, context in (
        (1, 1, 512),
        (1, 8, 512),
        (1, 1, 1024),
        (16, 1, 512),
        (16, 1, 1024),
        (1, 256, 1024),
    ):
        kv, view = make_kv(decoder, rows, context), pass_view(rows, q_len, context)
        q = torch.randn(rows * q_len, decoder.config.num_heads, decoder.config.head_dim)
        calls = {}
        for name in ("sdpa", "numba"):
            backend = select_backend(name, CPU, torch.float32)
            prepared = backend.prepare(view, kv)
            calls[name] = lambda backend=backend, prepared=prepared, q=q, kv=kv: backend.attend(
                q, kv, 0, prepared
            )
        found[f"{rows} rows, q_len {q_len}, context {context}"] = median_ms(calls, repeats)
    return found


@contextmanager
def timed(decoder: Decoder, seconds: dict[str, float]) -> Any:
    """Adds up the time inside matrix products, attention and sampling."""

    def wrap(owner: Any, name: str, key: str) -> tuple[Any, str, Any]:
        original = getattr(owner, name)

        def timing(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds[key] = seconds.get(key, 0.0) + time.perf_counter() - start

        setattr(owner, name, timing)
        return owner, name, original

    linear = type(decoder.head)
    wrapped = [
        wrap(linear, "__call__", "matrix products"),
        wrap(type(decoder.attention), "attend", "attention"),
        wrap(Sampler, "choose", "sampling"),
    ]
    try:
        yield
    finally:
        for owner, name, original in wrapped:
            setattr(owner, name, original)


def measure_step(decoder: Decoder, steps: int) -> dict[str, float]:
    """Shares of a plain step at batch 1: medians. Every other step is timed inside; the whole is taken from
    those in between, so that the timers' own cost counts nowhere."""
    engine = Engine(decoder, EngineConfig(max_num_seqs=1, max_model_len=512))
    engine.add_request(
        list(range(100, 200)), SamplingParams(temperature=0.0, max_tokens=2 * steps + 8, ignore_eos=True)
    )
    for _ in range(6):
        engine.step()
    inside: dict[str, list[float]] = {}
    whole: list[float] = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - start)
        seconds: dict[str, float] = {}
        with timed(decoder, seconds):
            engine.step()
        for name, value in seconds.items():
            inside.setdefault(name, []).append(value)
    step = statistics.median(whole)
    shares = {name: statistics.median(values) / step for name, values in inside.items()}
    return {**shares, "all else": 1.0 - sum(shares.values()), "step_ms": step * 1e3}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    decoder = Decoder.load(
        open_checkpoint(resolve_model(arguments.model)), torch.float32, CPU, max_positions=2048
    )
    with torch.inference_mode():
        result = {
            "environment": environment(),
            "row_invariant": decoder.row_invariant,
            "pass_ms": measure_passes(decoder, arguments.repeats),
            "attention_ms": measure_attention(decoder, arguments.repeats),
            "step": measure_step(decoder, 60),
            "weights_bytes": decoder.num_bytes,
            "peak_resident_bytes": peak_memory_bytes(),
        }
    passes = result["pass_ms"]
    result["figures"] = {
        "8 positions / 1 position": (
            passes["all layers and head, 8 positions"] / passes["all layers and head, 1 positions"]
        ),
        "half the layers / all layers": (
            passes["half the layers, 1 position"] / passes["all layers, 1 position"]
        ),
        "share of a plain step outside matrix products, attention and sampling": result["step"]["all else"],
        **{
            f"sdpa / numba, {name}": times["sdpa"] / times["numba"]
            for name, times in result["attention_ms"].items()
        },
    }
    for name, value in (
        *result["environment"].items(),
        *passes.items(),
        *result["step"].items(),
        *result["figures"].items(),
    ):
        print(f"{name:75s} {value if isinstance(value, (str, int)) or value is None else f'{value:.3f}'}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
