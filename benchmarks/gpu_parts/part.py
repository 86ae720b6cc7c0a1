"""One part of the GPU benchmark, in this process: what benchmarks/gpu.py starts.

    python benchmarks/gpu_parts/part.py NAME MODULE --into FILE [--seconds S] [--device cuda] [--tiny] [...]

Exit code 0 or 1: the JSON says all; anything else: this process has died of something.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # run from a checkout: nothing needs to be installed

from benchmarks.gpu import options_of
from benchmarks.gpu_parts.compiling import COMPILING
from benchmarks.gpu_parts.run import Bench, OutOfTime, arm


def measure(bench: Bench, name: str, module: str) -> None:
    """The part within the time; the JSON is there whatever happens."""

    def run(bench: Bench, out: dict[str, Any]) -> None:
        """Imported only now: what a part lacks on this machine is recorded like any fault of it."""
        importlib.import_module(module).run(bench, out)

    disarm = arm(bench.left())
    try:
        bench.part(name, run)
    except OutOfTime:  # after the part
        pass
    finally:
        disarm()
        bench.save()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("module")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    options_of(parser)
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("highest")  # no TF32: float32 is to be compared token for token
    COMPILING.listen()
    options = {"model": chosen.model, "prompts": chosen.prompts, "settings": chosen.settings}
    bench = Bench(device, chosen.tiny, chosen.seconds, chosen.into, options)
    measure(bench, chosen.name, chosen.module)
    return 1 if bench.result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
