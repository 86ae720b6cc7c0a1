"""What HiSpec does on a GPU: correct first, then how fast, against floors, plain decoding and transformers.
One command, under 8 minutes:

    python benchmarks/gpu.py [--out DIR] [--model FOLDER] [--parts correctness,smollm2,shapes]
    python benchmarks/gpu_report.py DIR/gpu-NAME.json

Parts stop when --seconds are over, whatever they are at; the JSON is written after each, and the table comes
last in any case. Figures that were not measured are null, with the reason. Exit code 1: something is wrong,
and is said; 2: it cannot run here.

    python benchmarks/gpu.py --tiny --device cpu     every path of it with tiny random models, in a minute;
                                                     measures nothing
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.gpu_run import REHEARSAL, SYNTHETIC, Bench, OutOfTime, arm, figure_rows, state_of
from hispec.utils.environment import hardware_text

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "correctness": "benchmarks.gpu_correctness",
    "smollm2": "benchmarks.gpu_smollm2",
    "shapes": "benchmarks.gpu_shapes",
}


def run_part(name: str) -> Any:
    """Imported only now: what one part lacks on this machine costs none of the others."""

    def run(bench: Bench, out: dict[str, Any]) -> None:
        importlib.import_module(PARTS[name]).run(bench, out)

    return run


def measure(bench: Bench, parts: Sequence[str]) -> None:
    """All parts within the time; the JSON is there whatever happens."""
    disarm = arm(bench.left())
    try:
        for name in parts:
            bench.part(name, run_part(name))
    except OutOfTime:  # between two parts
        pass
    finally:
        disarm()
        for name in parts:
            bench.result["parts"].setdefault(name, {"status": "left out: the time was up"})
        bench.save()


def print_table(result: dict[str, Any]) -> None:
    """Short, and last."""
    print()
    if result["rehearsal"]:
        print(f"*** {REHEARSAL} ***")
    print(f"{hardware_text(result['environment'])}; {result['label']}")
    for name, part in result["parts"].items():
        print(f"  {state_of(name, part)} ({part.get('seconds', 0.0)} s)")
    for name, measured in result["parts"].get("shapes", {}).items():
        for batch, found in measured.items() if isinstance(measured, dict) else ():
            if isinstance(found, dict) and "synthetic" in found:
                ratios = ", ".join(
                    f"{case} {ratio:.2f}"
                    for case, ratio in found["synthetic"]["ratio_to_plain"].items()
                    if case != "plain"
                )
                print(f"  {name}, {batch}, {SYNTHETIC.split(':')[0].upper()}, x plain: {ratios}")
    rows = [("figure", "value", "target", ""), *figure_rows(result)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for key, reason in {} if result["rehearsal"] else result["reasons"].items():
        print(f"  {key}: {reason}")
    for text in result["failures"]:
        print(f"FAILED: {text}")
    print("correct" if not result["failures"] else f"{len(result['failures'])} FAILURES")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the JSON (benchmarks/results; outputs for a rehearsal)"
    )
    parser.add_argument(
        "--model", help="folder with SmolLM2-135M-Instruct; else what `hispec fetch smollm2` has fetched"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help='JSON lines of {"prompt": ..., "task": ...} (configs/quickstart_prompts.jsonl)',
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--seconds", type=float, default=450.0, help="time for all parts (%(default)g)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a rehearsal: tiny random models; figures stay null"
    )
    chosen = parser.parse_args(arguments)
    parts = [part for part in chosen.parts.split(",") if part]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU that torch can use is here; `--tiny --device cpu` rehearses the benchmark without one",
            file=sys.stderr,
        )
        return 2
    if device.type != "cuda" and not chosen.tiny:
        print(f"--device {device}: only a rehearsal runs there; add --tiny", file=sys.stderr)
        return 2
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("highest")  # no TF32: float32 is to be compared token for token
    is_rehearsal = chosen.tiny or device.type != "cuda"
    name = (
        "rehearsal"
        if is_rehearsal
        else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    )
    out = chosen.out or ROOT / ("outputs" if is_rehearsal else "benchmarks/results")
    options = {
        "model": chosen.model,
        "prompts": None if chosen.prompts is None else str(chosen.prompts),
        "parts": parts,
    }
    bench = Bench(device, chosen.tiny, chosen.seconds, out / f"gpu-{name}.json", options)
    measure(bench, parts)
    print_table(bench.result)
    print(bench.path)
    return 1 if bench.result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
