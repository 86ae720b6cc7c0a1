"""What a pass costs on this CPU, with weights in float32, bfloat16 and int8, and where a plain step's time
goes: `python benchmarks/cpu.py [--json FILE]`, about four minutes.

Every figure is a median over interleaved repeats in one process. Run it on an idle machine: threads wait for
each other at every matrix product, so another busy process costs more than its share; how much, the last
figures say.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one
from benchmarks.command import run
from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of
from ee_models.attention import select_backend
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.kernels.threads import KernelThreads
from hispec.config import EngineConfig
from hispec.engine import Engine
from hispec.loading.fetch import resolve_model
from hispec.loading.target_model import load_decoder
from hispec.sampling_params import SamplingParams
from hispec.utils.environment import environment, peak_memory_bytes

CPU = torch.device("cpu")
BLOCK_SIZE = 16
_UNTIMED, _TIMED = 6, 3  # calls of a turn


def median_ms(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each function over `repeats` calls. They take turns, so that a slow moment hits
    all alike, and each is called some times before it is timed: a large cache takes as many passes to hold
    one model's weights again, as it would where no other model runs."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(-(-repeats // _TIMED)):
        for name, function in functions.items():
            for _ in range(_UNTIMED):
                function()
            for _ in range(_TIMED):
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


def make_kv(decoder: Decoder, rows: int, context: int, dtype: torch.dtype | None = None) -> PagedKV:
    """Of random numbers; dtype: None = as the decoder keeps them."""
    config, num_blocks = decoder.config, rows * -(-context // BLOCK_SIZE)
    shape = BLOCK_SIZE, config.num_kv_heads, config.head_dim
    kv = PagedKV(config.num_layers, num_blocks, *shape, dtype or decoder.kv_dtype, CPU)
    slots = torch.arange(num_blocks * BLOCK_SIZE)
    numbers = torch.randn(len(slots), *shape[1:], generator=torch.Generator().manual_seed(0))
    for layer in range(config.num_layers):
        kv.write(layer, slots, numbers, numbers)
    return kv


def whole_pass(
    decoder: Decoder,
    sizes: tuple[int, int, int],
    hi: int,
    head: bool = True,
    kv_dtype: torch.dtype | None = None,
) -> Callable[[], Any]:
    """A pass through layers 0 to hi over (rows, tokens of each, context)."""
    rows, q_len, context = sizes
    kv, view = make_kv(decoder, rows, context, kv_dtype), pass_view(rows, q_len, context)
    hidden = torch.randn(rows * q_len, decoder.config.hidden_size)
    return lambda: (
        decoder.run_layers(hidden.clone(), 0, hi, kv, view),
        decoder.logits(hidden, hi) if head else None,
    )


def measure_passes(decoders: dict[str, Decoder], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of passes with context 128, by pass and weights."""
    layers = next(iter(decoders.values())).config.num_layers
    widths = ((1, 1), (1, 4), (1, 8), (1, 16), (8, 1), (16, 1), (16, 4), (64, 1))
    passes = {f"{rows} x {q_len} tokens, and head": (rows, q_len, layers, True) for rows, q_len in widths}
    passes |= {"1 x 1 tokens, all layers": (1, 1, layers, False)}
    passes |= {"1 x 1 tokens, half the layers": (1, 1, layers // 2, False)}
    return {
        name: median_ms(
            {kind: whole_pass(decoder, (rows, q_len, 128), hi, head) for kind, decoder in decoders.items()},
            repeats,
        )
        for name, (rows, q_len, hi, head) in passes.items()
    }


def measure_kv(decoder: Decoder, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of passes of one model, head included, by what its keys and values are kept in."""
    layers, kinds = decoder.config.num_layers, {"bfloat16": torch.bfloat16, "int8": torch.int8}
    return {
        f"{rows} x {q_len} tokens, context {context}": median_ms(
            {
                name: whole_pass(decoder, (rows, q_len, context), layers, kv_dtype=dtype)
                for name, dtype in kinds.items()
            },
            repeats,
        )
        for rows, q_len, context in ((1, 1, 512), (8, 1, 512), (8, 3, 512), (32, 1, 512), (64, 1, 512))
    }


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
def timed(seconds: list[float]) -> Iterator[None]:
    """Appends the time inside each call of compiled code on several threads: all layers of a pass, and the
    head."""
    original = KernelThreads.run

    def timing(*args: Any) -> None:
        start = time.perf_counter()
        original(*args)
        seconds.append(time.perf_counter() - start)

    with patch.object(KernelThreads, "run", timing):
        yield


def measure_step(decoder: Decoder, rows: int, tokens: int, max_run_ms: float) -> dict[str, float]:
    """Milliseconds of a token of each of `rows` rows, decoded plainly, median and mean over steps, and the
    share outside of layers and head, of medians. Every other step is timed inside; the whole is taken from
    those in between, so that the timers' own cost counts nowhere."""
    engine = Engine(decoder, EngineConfig(max_num_seqs=rows, max_model_len=512, max_run_ms=max_run_ms))
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 64, ignore_eos=True)
    for _ in range(rows):
        engine.add_request(list(range(100, 200)), params)
    for _ in range(6):
        engine.step()
    inside, whole, done = [], [], 0
    while done < tokens:
        start = time.perf_counter()
        num_tokens = len(engine.step()[0].token_ids)
        whole.append((time.perf_counter() - start) / num_tokens)
        seconds: list[float] = []
        with timed(seconds):
            deltas = engine.step()
        inside.append(sum(seconds) / len(deltas[0].token_ids))
        done += num_tokens + len(deltas[0].token_ids)
    step = statistics.median(whole)
    return {
        "step_ms": step * 1e3,
        "mean_ms": statistics.mean(whole) * 1e3,
        "share outside of layers and head": 1 - statistics.median(inside) / step,
    }


@contextmanager
def busy_program() -> Iterator[None]:
    """Another program computes all the time, on one core."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError or CheckpointError for a model that cannot be loaded."""
    checkpoint = open_checkpoint(resolve_model(options.model))
    kinds = {
        "float32": EngineConfig(dtype="float32"),
        "bfloat16": EngineConfig(dtype="bfloat16"),
        "int8": EngineConfig(quantization="int8"),
    }
    decoders = {
        name: load_decoder(checkpoint, config, CPU, max_positions=2048) for name, config in kinds.items()
    }
    with torch.inference_mode():
        result: dict[str, Any] = {
            "environment": environment(),
            "row_invariant": {name: decoder.row_invariant for name, decoder in decoders.items()},
            "pass_ms": measure_passes(decoders, options.repeats),
            "kv_ms": measure_kv(decoders["int8"], options.repeats),
            "attention_ms": measure_attention(decoders["float32"], options.repeats),
            "step": {
                f"{name}, {rows} rows, {how}": measure_step(decoder, rows, 160, max_run_ms)
                for rows in (1, 16)
                for name, decoder in decoders.items()
                for how, max_run_ms in (("a token a step", 0.0), ("several", 50.0))
            },
            "step beside a busy program": {},
            "weights_bytes": {name: decoder.num_bytes for name, decoder in decoders.items()},
            "peak_resident_bytes": peak_memory_bytes(),
        }
        with busy_program():
            for rows in (1, 16):
                found = measure_step(decoders["int8"], rows, 300, 50.0)
                result["step beside a busy program"][f"int8, {rows} rows"] = {"mean_ms": found["mean_ms"]}
    passes = result["pass_ms"]
    result["figures"] = {
        **{
            f"float32 / {kind}, {name}": ms["float32"] / ms[kind]
            for kind in ("bfloat16", "int8")
            for name, ms in passes.items()
        },
        **{
            f"8 positions / 1, {name}": passes["1 x 8 tokens, and head"][name]
            / passes["1 x 1 tokens, and head"][name]
            for name in decoders
        },
        **{
            f"KV in bfloat16 / int8, {name}": times["bfloat16"] / times["int8"]
            for name, times in result["kv_ms"].items()
        },
        **{
            f"sdpa / numba, {name}": times["sdpa"] / times["numba"]
            for name, times in result["attention_ms"].items()
        },
    }
    return result


def print_result(result: dict[str, Any]) -> None:
    beside = {f"{name}, busy": values for name, values in result["step beside a busy program"].items()}
    kv = {f"int8, KV, {name}": values for name, values in result["kv_ms"].items()}
    tables = {**result["attention_ms"], **result["pass_ms"], **kv, **result["step"], **beside}
    for name, value in (
        *result["environment"].items(),
        *((f"{name}: {of}", value) for name, values in tables.items() for of, value in values.items()),
        *result["figures"].items(),
    ):
        print(f"{name:75s} {value if isinstance(value, (str, int)) or value is None else f'{value:.3f}'}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=at_least_one, default=15)
    parser.add_argument("--json", type=Path)
    return run("cpu", parser.parse_args(arguments), measure, print_result)


if __name__ == "__main__":
    sys.exit(main())
