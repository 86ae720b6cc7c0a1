"""What a pass costs on this CPU at the shape of a larger model, whose weights no cache holds, beside what it
takes to read them: random weights, so times are real and nothing else is.

    python benchmarks/larger_cpu.py [--shape llama-3.2-1b] [--numbers bfloat16 int8 int4] [--repeats 7]
    [--json FILE]

The checkpoint is made in a temporary folder (2.5 GB for llama-3.2-1b) and taken away again. Numbers take
turns only by themselves, since a machine need not hold the model three times: compare each with its floor,
the bytes that a pass over one token reads over the speed of reading memory, which is measured before and
after each of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.arguments import at_least_one
from benchmarks.command import run
from benchmarks.cpu import CPU, make_kv, pass_view
from benchmarks.gpu_parts.floors import bytes_read
from benchmarks.markdown import table
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec.config import EngineConfig
from hispec.loading.target_model import load_decoder
from hispec.utils.environment import environment, hardware_text, watch_others

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
    },
    "llama-3.2-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "tiny": {  # to see that it runs
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 260,
    },
}
NUMBERS = {
    "bfloat16": EngineConfig(dtype="bfloat16"),
    "int8": EngineConfig(quantization="int8"),
    "int4": EngineConfig(quantization="int4"),
}
PASSES = ((1, 1), (1, 4), (1, 8), (1, 16), (8, 1), (16, 1))  # rows, tokens of each
CONTEXT, PROMPT = 128, 512
_READ_BYTES = 1 << 30


def make_checkpoint(shape: dict[str, Any], folder: Path) -> None:
    """A model of random weights in bfloat16, with the settings of Llama 3.2 but for the shape."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def read_speed(num_bytes: int = _READ_BYTES) -> float:
    """Bytes a second at which all threads together read memory that no cache holds: the best of a few."""
    numbers = torch.ones(num_bytes // 4)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - started)
    return num_bytes / min(seconds)


def median_ms(run_pass: Callable[[], Any], repeats: int) -> float:
    run_pass()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run_pass()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


@torch.inference_mode()
def time_passes(decoder: Decoder, repeats: int) -> dict[str, float]:
    """Milliseconds of passes with a context of CONTEXT positions, head included, and of a prompt's."""
    num_layers = decoder.config.num_layers

    def of(rows: int, q_len: int, context: int, head: bool) -> float:
        kv, view = make_kv(decoder, rows, context), pass_view(rows, q_len, context)
        hidden = torch.randn(rows * q_len, decoder.config.hidden_size)
        return median_ms(
            lambda: (
                decoder.run_layers(hidden.clone(), 0, num_layers, kv, view),
                decoder.logits(hidden, num_layers) if head else None,
            ),
            repeats,
        )

    found = {f"{rows} x {q_len}": of(rows, q_len, CONTEXT, head=True) for rows, q_len in PASSES}
    return found | {f"prompt of {PROMPT}": of(1, PROMPT, PROMPT, head=False)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    measured_on, others = environment(), watch_others()
    found: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        make_checkpoint(SHAPES[options.shape], Path(folder))
        checkpoint = open_checkpoint(folder)
        for name in options.numbers:
            decoder = load_decoder(checkpoint, NUMBERS[name], CPU, max_positions=2048)
            before = read_speed()
            pass_ms = time_passes(decoder, options.repeats)
            speed = max(before, read_speed())
            num_bytes = bytes_read(decoder, 0, decoder.config.num_layers, 1, 1, CONTEXT)
            found[name] = {
                "pass_ms": pass_ms,
                "bytes_read": num_bytes,
                "read_bytes_per_s": speed,
                "floor_ms": 1e3 * num_bytes / speed,
                "row_invariant": decoder.row_invariant,
            }
            del decoder
    return {
        "environment": measured_on | {"others": others()},
        "shape": {"name": options.shape, **SHAPES[options.shape]},
        "repeats": options.repeats,
        "numbers": found,
    }


def print_result(result: dict[str, Any]) -> None:
    names = list(next(iter(result["numbers"].values()))["pass_ms"])
    print(f"{result['shape']['name']}, random weights; {hardware_text(result['environment'])}\n")
    rows = [
        [
            name,
            f"{each['bytes_read'] / 1e9:.2f}",
            f"{each['floor_ms']:.1f}",
            *(f"{each['pass_ms'][at]:.1f}" for at in names),
        ]
        for name, each in result["numbers"].items()
    ]
    print("\n".join(table(["rows x tokens, ms", "GB read", "floor", *names], rows)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--numbers", nargs="+", choices=NUMBERS, default=list(NUMBERS))
    parser.add_argument("--repeats", type=at_least_one, default=7, help="timed runs of a pass (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return run("larger_cpu", parser.parse_args(arguments), measure, print_result)


if __name__ == "__main__":
    sys.exit(main())
