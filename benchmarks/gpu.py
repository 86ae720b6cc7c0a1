"""What HiSpec does on a GPU: correct first, then how fast, against floors, plain decoding and transformers.
One command, a process for each part:

    python benchmarks/gpu.py --parts smoke        two minutes: does it run here at all, and what is missing
    python benchmarks/gpu.py [--out DIR] [--model FOLDER] [--parts smoke,correctness,shapes]
    python benchmarks/gpu_report.py DIR/gpu-NAME-TIME.json

A part that dies ends none of the others. Each writes a JSON and a log of its own, in DIR/gpu-NAME-TIME/; what
they have found together is in the file beside it, written after each part. No run overwrites another.
Parts stop when their time is over, or --seconds are, whatever they are at. Figures that were not measured are
null, with the reason. Exit code 1: something is wrong, and is said; 2: it cannot run here.

    python benchmarks/gpu.py --tiny --device cpu  every path of it with tiny random models, in minutes;
                                                  measures nothing
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run from a checkout: nothing needs to be installed

from benchmarks.gpu_parts.needs import how_to_bring, missing

ROOT = Path(__file__).resolve().parents[1]

GRACE_S = 30.0  # for a part that its own alarm cannot interrupt
LOG_LINES = 15


@dataclass(frozen=True)
class Part:
    """seconds: the most that it may take, compiling included."""

    module: str
    seconds: float


# What nothing else is worth without comes first, then what most is to be learnt from; the profiler, which may
# leave a process slower than it found it, last.
PARTS = {
    "smoke": Part("benchmarks.gpu_parts.smoke", 120),
    "correctness": Part("benchmarks.gpu_parts.correctness", 200),
    "shapes": Part("benchmarks.gpu_parts.shapes", 240),
    "smollm2": Part("benchmarks.gpu_parts.smollm2", 240),
    "sampled": Part("benchmarks.gpu_parts.sampled", 120),
    "settings": Part("benchmarks.gpu_parts.settings", 120),
    "profile": Part("benchmarks.gpu_parts.profiled", 120),
}


def run_parts(
    parts: Mapping[str, Part], folder: Path, joined: Path, seconds: float, arguments: Sequence[str]
) -> dict[str, Any]:
    """Every part in a process of its own -> what they have found together, which is also in `joined`."""
    from benchmarks.gpu_parts.joined import join_parts

    ends = time.monotonic() + seconds
    died: dict[str, str] = {}
    for name, part in parts.items():
        left = min(part.seconds, ends - time.monotonic())
        if left <= 0:
            died[name] = "left out: the time was up"
        else:
            print(f"{name}: at most {left:.0f} s", flush=True)
            status = run_part(name, part, folder, left, arguments)
            if status is not None:
                died[name] = status
                print(f"FAILED: {name}: {status}", flush=True)
        result = join_parts(folder, list(parts), died)
        temporary = joined.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(joined)
    return result


def run_part(name: str, part: Part, folder: Path, seconds: float, arguments: Sequence[str]) -> str | None:
    """What its process died of; None = it went through, whatever it found."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_parts" / "part.py"), name, part.module]
    command += ["--into", str(folder / f"{name}.json"), "--seconds", f"{seconds:.1f}", *arguments]
    # Garbage that holds memory of the GPU is collected before a capture, not in the middle of one.
    environment = {"TORCH_CUDAGRAPH_GC": "1", "PYTHONUNBUFFERED": "1", **os.environ}
    log = folder / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(f"  {line}" for line in lines[-LOG_LINES:]), flush=True)
    if code is None:
        return f"did not stop within {seconds + GRACE_S:.0f} s, and was killed; see {log.name}"
    if code in (0, 1):
        return None
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"its process ended by {how}: {last[:300]}; see {log.name}"


def new_folder(out: Path, name: str, now: str) -> Path:
    """A folder that was not there before."""
    out.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = out / f"gpu-{name}-{now}{'' if number == 1 else f'-{number}'}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(errno.EEXIST, "a thousand runs in one second")


def options_of(parser: argparse.ArgumentParser) -> None:
    """Those that the command and its parts have in common."""
    parser.add_argument(
        "--model", help="folder with SmolLM2-135M-Instruct; else what `hispec fetch smollm2` has fetched"
    )
    parser.add_argument(
        "--prompts", help='JSON lines of {"prompt": ..., "task": ...} (configs/quickstart_prompts.jsonl)'
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a rehearsal: tiny random models; figures stay null"
    )
    parser.add_argument(
        "--settings",
        default="",
        help="of the part settings: some of its names (all); see gpu_parts/settings.py",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the results (benchmarks/results; outputs for a rehearsal)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s, in their order")
    parser.add_argument("--seconds", type=float, default=1200.0, help="time for all parts (%(default)g)")
    options_of(parser)
    chosen = parser.parse_args(arguments)
    wanted = [part for part in chosen.parts.split(",") if part]
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not wanted:
        parser.error(f"--parts: give at least one of {', '.join(PARTS)}")
    if not chosen.seconds > 0:
        parser.error(f"--seconds: must be more than 0, got {chosen.seconds:g}")
    lacking, _ = missing(on_gpu=chosen.device != "cpu")
    if lacking:
        print(how_to_bring(lacking), file=sys.stderr)
        return 2
    import torch

    try:
        device = torch.device(chosen.device)
    except RuntimeError as error:
        parser.error(f"--device {chosen.device!r}: {str(error).splitlines()[0]}")
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU that torch can use is here; `--tiny --device cpu` rehearses the benchmark without one",
            file=sys.stderr,
        )
        return 2
    if device.type != "cuda" and not chosen.tiny:
        print(f"--device {device}: only a rehearsal runs there; add --tiny", file=sys.stderr)
        return 2
    from benchmarks.gpu_parts.joined import print_table

    is_rehearsal = chosen.tiny or device.type != "cuda"
    name = (
        "rehearsal"
        if is_rehearsal
        else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    )
    out = chosen.out or ROOT / ("outputs" if is_rehearsal else "benchmarks/results")
    try:
        folder = new_folder(out.absolute(), name, time.strftime("%Y%m%d-%H%M%S"))
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}")
    passed = ["--device", chosen.device, "--settings", chosen.settings, *(["--tiny"] if chosen.tiny else [])]
    for option in ("model", "prompts"):
        if (value := getattr(chosen, option)) is not None:
            # Parts run elsewhere; the name of a known model is no path.
            passed += [f"--{option}", str(Path(value).absolute()) if Path(value).exists() else value]
    joined = folder.with_suffix(".json")
    parts = {part: PARTS[part] for part in PARTS if part in wanted}
    result = run_parts(parts, folder, joined, chosen.seconds, passed)
    print_table(result)
    print(joined)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
