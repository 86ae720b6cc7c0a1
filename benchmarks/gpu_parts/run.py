"""One run of the GPU benchmark: its time, its result as it grows, what went wrong; and what its figures
are."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.compiling import COMPILING
from benchmarks.gpu_parts.timing import Clock, copy_bandwidth
from hispec.utils.environment import environment

BENCHMARK = "hispec gpu"
SYNTHETIC = "random weights, forced acceptance: times are real, the text and its acceptance are not"
REHEARSAL = "a rehearsal: tiny sizes, or no GPU; nothing here is a measurement"


@dataclass(frozen=True)
class Figure:
    """What a figure is, and what it is to reach: at least `bound`, or with `is_most` at most; None = it is
    only reported."""

    text: str
    bound: float | None = None
    is_most: bool = False

    @property
    def target(self) -> str:
        return "" if self.bound is None else f"{'<=' if self.is_most else '>='} {self.bound:g}"

    def verdict(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        if self.bound is None:
            return "reported"
        return "reached" if (value <= self.bound if self.is_most else value >= self.bound) else "MISSED"


FIGURES = {
    "plain_7b_floor_fraction": Figure("plain, Llama-2-7B shape, batch 1: floor / time of a token", 0.80),
    "plain_8b_floor_fraction": Figure("plain, Llama-3-8B shape, batch 1: floor / time of a token", 0.80),
    "smollm2_plain_vs_transformers": Figure("SmolLM2-135M, batch 1: plain / transformers.generate", 15.0),
    "round_vs_stage_floors": Figure("a round / its stages measured alone, the worst", 1.10, is_most=True),
    "host_gap_fraction": Figure(
        "share of a round in which the device waits for the host, the worst", 0.03, is_most=True
    ),
    "captured_vs_eager": Figure("SmolLM2-135M, batch 1: eager round / captured round, the least", 4.0),
    "three_tier_vs_plain_b1": Figure("SmolLM2-135M, batch 1: best three-tier / plain, mean over tasks", 1.5),
    "three_tier_vs_two_tier_b1": Figure("SmolLM2-135M, batch 1: best three-tier / best two-tier", 1.1),
    "three_tier_vs_plain_b32": Figure("SmolLM2-135M, batch 32: best three-tier / plain", 1.15),
    "synthetic_8b_vs_plain_b1": Figure(
        "Llama-3-8B shape, SYNTHETIC acceptance, batch 1: three-tier / plain", 1.5
    ),
    "bf16_divergence_rate": Figure("outputs in bf16 that differ from plain's somewhere, all at near-ties"),
}


class OutOfTime(BaseException):
    """The budget is spent. No Exception, since drafters' and steps' own handlers must let it through."""


class Bench:
    """`result` is what the JSON holds; `save` writes it."""

    def __init__(
        self, device: torch.device, is_tiny: bool, seconds: float, path: Path, options: dict[str, Any]
    ) -> None:
        self.device, self.is_tiny, self.path, self.options = device, is_tiny, path, options
        self.clock = Clock(device)
        self._ends = time.monotonic() + seconds
        self._values: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._bandwidth: float | None = None
        self._errors: dict[str, Any] = {}
        self.is_rehearsal = is_tiny or device.type != "cuda"
        self.found: dict[str, Any] = {}  # what the step that runs has so far: kept if it is cut short
        self.result: dict[str, Any] = {
            "benchmark": BENCHMARK,
            "rehearsal": self.is_rehearsal,
            "label": (
                REHEARSAL
                if self.is_rehearsal
                else SYNTHETIC.replace("random weights", "parts named shapes: random weights")
            ),
            "date": time.strftime("%Y-%m-%d"),
            "environment": {**environment(), **_gpu_environment(device)},
            "options": {"device": str(device), "tiny": is_tiny, "seconds": seconds, **options},
            "parts": {},
            "failures": [],
        }

    @property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a large copy within the device's memory."""
        if self._bandwidth is None:
            self._bandwidth = self.result["copy_bytes_per_s"] = copy_bandwidth(
                self.clock, self.device, (8 << 20) if self.is_tiny else (2 << 30)
            )
        return self._bandwidth

    def left(self) -> float:
        """Seconds."""
        return self._ends - time.monotonic()

    def figure(self, key: str, value: float) -> None:
        """Of several values of one figure the worst counts."""
        worse = max if FIGURES[key].is_most else min
        self._values[key] = worse(self._values.get(key, value), value)

    def missing(self, key: str, reason: str) -> None:
        self._reasons[key] = reason

    def fail(self, text: str) -> None:
        """Something is wrong, rather than slow: said at once, and again at the end."""
        print(f"FAILED: {text}", flush=True)
        self.result["failures"].append(text)

    def step(self, out: dict[str, Any], name: str, seconds: float, run: Callable[[], Any]) -> Any:
        """run() into out[name], unless less than `seconds` are left. What it raises is recorded beside what
        it had `found`, and the next step goes on."""
        if self.left() < (0.0 if self.is_tiny else seconds):
            out[name] = {
                "left_out": f"{max(0.0, self.left()):.0f} s were left, and it takes about {seconds:.0f}"
            }
            return None
        started, compiled = time.monotonic(), COMPILING.seconds
        self.found, self._errors = {}, {}
        try:
            out[name] = run()
        except Exception as error:
            if self.left() <= 0:  # what was interrupted may have said so in words of its own
                raise OutOfTime from error
            out[name] = {**self.found, "error": _short(error), "traceback": traceback.format_exc()}
            self.fail(f"{name}: {_short(error)}")
            return None
        finally:
            if name not in out:
                out[name] = {**self.found, "cut_short": "the time was up"}
            if self._errors:
                out.setdefault("errors_of_steps", {})[name] = self._errors
            self.tidy()
            compiling = COMPILING.seconds - compiled
            out.setdefault("seconds_of_steps", {})[name] = round(time.monotonic() - started, 2)
            out.setdefault("compiling_of_steps", {})[name] = round(compiling, 2)
        said = f", {compiling:.1f} s of it compiling" if compiling else ""
        print(f"  {name}: {time.monotonic() - started:.1f} s{said}", flush=True)
        self.save()
        return out[name]

    @contextlib.contextmanager
    def case(self, what: str) -> Iterator[None]:
        """One of several that a step goes through: what it raises is recorded, and the others go on."""
        try:
            yield
        except Exception as error:
            if self.left() <= 0:
                raise OutOfTime from error
            self._errors[what] = {"error": _short(error), "traceback": traceback.format_exc()}
            self.fail(f"{what}: {_short(error)}")
            self.tidy()

    def part(self, name: str, run: Callable[[Bench, dict[str, Any]], None]) -> None:
        """run(self, out), whatever comes of it; then the JSON is written."""
        out: dict[str, Any] = {}
        self.result["parts"][name] = out
        started, compiled, kernels = time.monotonic(), COMPILING.seconds, COMPILING.kernels
        print(f"{name}: {max(0.0, self.left()):.0f} s left", flush=True)
        try:
            if self.left() <= 0:
                raise OutOfTime
            run(self, out)
            out["status"] = "done"
        except OutOfTime:
            out["status"] = "cut short: the time was up" if out else "left out: the time was up"
        except Exception as error:
            out |= {"status": "failed", "error": _short(error), "traceback": traceback.format_exc()}
            self.fail(f"{name}: {_short(error)}")
        out["seconds"] = round(time.monotonic() - started, 2)
        out["compiling"] = {
            "seconds": round(COMPILING.seconds - compiled, 2),
            "compiled_kernels": COMPILING.kernels - kernels,
        }
        self.tidy()
        self.save()

    def tidy(self) -> None:
        """Gives back what a step has left behind, captured graphs above all."""
        gc.collect()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # where time ended in the middle of a capture
                torch.cuda.empty_cache()

    def save(self) -> None:
        """Writes the JSON as it is now, all of it or nothing."""
        counts = {} if self.is_rehearsal else self._values
        self.result["figures"] = {key: counts.get(key) for key in FIGURES}
        self.result["reasons"] = {key: self._reason(key) for key in FIGURES if key not in counts}
        self.result["said"] = sorted(self._reasons)  # those of reasons that a part gave itself
        if self.is_rehearsal:
            self.result["rehearsed_not_measured"] = dict(self._values)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(
            json.dumps(finite(self.result), indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        temporary.replace(self.path)

    def _reason(self, key: str) -> str:
        if self.is_rehearsal:
            return REHEARSAL
        states = ", ".join(state_of(name, part) for name, part in self.result["parts"].items())
        return self._reasons.get(key, f"its part has not got there ({states or 'no part ran'})")


def arm(seconds: float) -> Callable[[], None]:
    """Raises OutOfTime here once so many seconds have passed -> what calls that off. Only a main thread can
    be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def ring(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, seconds))

    def disarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

    return disarm


def finite(value: Any) -> Any:
    """`value` in JSON's types, with None for what is no number."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def state_of(name: str, part: dict[str, Any]) -> str:
    """A part's status, with the steps that were left out or failed."""
    lost = [step for step, found in _steps(part) if "left_out" in found or "error" in found]
    return f"{name}: {part.get('status', 'running')}{', without ' + ', '.join(lost) if lost else ''}"


def _steps(part: dict[str, Any], above: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, found in part.items():
        if isinstance(found, dict):
            yield f"{above}{name}", found
            yield from _steps(found, f"{above}{name}, ")


def figure_rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what it is, value, target, verdict) of every figure."""
    values = result["figures"]
    return [
        (
            figure.text,
            "-" if values[key] is None else f"{values[key]:.3f}",
            figure.target,
            figure.verdict(values[key]),
        )
        for key, figure in FIGURES.items()
    ]


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _gpu_environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"cuda": torch.version.cuda}
    for package in ("triton", "numba", "torchao"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu_memory_bytes": properties.total_memory,
            "gpu_processors": properties.multi_processor_count,
        }
    return found
