"""The hardware and software of a measurement."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

BUSY_SHARE = 0.5  # of the cores
OTHERS_SHARE = (
    0.1  # of the cores: every matrix product waits for its slowest thread, so little spoils a ratio
)
_STAT = Path("/proc/stat")


def environment() -> dict[str, Any]:
    """Hardware and versions; `cores` are those this process may use, `load` is how many programs wanted one
    in the last minute."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "hispec": _version("hispec"),
    }


def hardware_text(values: Mapping[str, Any]) -> str:
    """One line of `environment()` for a summary."""
    gpu = f"{values['gpu']}, " if values["gpu"] else ""
    return (
        f"{gpu}{values['cpu']}, {values['cores']} cores, {values['threads']} threads, torch {values['torch']}"
    )


def is_busy(values: Mapping[str, Any]) -> bool:
    """Whether other programs took enough of the machine, just before `environment()`, to spoil a
    measurement."""
    return values["load"] is not None and values["load"] > BUSY_SHARE * values["cores"]


class OtherPrograms:
    """How much of the cores that this process may use other programs take, from when it is made."""

    def __init__(self) -> None:
        self._started = self._seconds()

    def share(self) -> float | None:
        """From 0 to 1 of those cores; None where the system doesn't tell."""
        if self._started is None or (now := self._seconds()) is None:
            return None
        busy, own, capacity = (after - before for after, before in zip(now, self._started, strict=True))
        return min(max((busy - own) / capacity, 0.0), 1.0) if capacity > 0.0 else None

    @staticmethod
    def _seconds() -> tuple[float, float, float] | None:
        """(that the cores were busy, that they worked for this process, that they have been there)."""
        try:
            names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
            rows = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines()]
            # user, nice, system; after idle and iowait: irq, softirq, and what other virtual machines took
            ticks = [int(row[at]) for row in rows if row[0] in names for at in (1, 2, 3, 6, 7, 8)]
        except (AttributeError, OSError, ValueError, IndexError):
            return None
        busy = sum(ticks) / os.sysconf("SC_CLK_TCK")
        return busy, time.process_time(), time.perf_counter() * len(names)


def peak_memory_bytes() -> int | None:
    """The most memory that this process has had resident, in bytes; None where the system doesn't tell."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
