"""The hardware and software of a measurement."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BUSY_SHARE = 0.5  # load before a measurement, as a share of the machine's cores
# Of the cores, that others take during one: every matrix product waits for its slowest thread, so little
# spoils a ratio.
OTHERS_SHARE = 0.1


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Hardware and versions; `cores` are those this process may use, of the `machine_cores` that `load` is
    of: how many programs wanted one in the last minute; `gpu` is the device that is used: None for a CPU;
    without a device torch's own GPU."""
    import torch

    has_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine_cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if has_gpu else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": package_version("transformers"),
        "hispec": package_version("hispec"),
    }


def hardware_text(values: Mapping[str, Any]) -> str:
    """One line of `environment()` for a summary."""
    gpu = f"{values['gpu']}, " if values["gpu"] else ""
    return (
        f"{gpu}{values['cpu']}, {values['cores']} cores, {values['threads']} threads, torch {values['torch']}"
    )


def watch_others() -> Callable[[], float | None]:
    """To be called before a measurement, and what it returns after it: how many of this process's cores other
    programs (and other virtual machines) kept busy meanwhile, on average. None where the system doesn't tell;
    Linux does."""

    def others_s() -> float | None:
        busy = _busy_s()
        return None if busy is None else busy - time.process_time()

    began, before = time.monotonic(), others_s()

    def others() -> float | None:
        after, seconds = others_s(), time.monotonic() - began
        if before is None or after is None or seconds <= 0.0:
            return None
        return round(max(0.0, (after - before) / seconds), 2)

    return others


def busy_text(values: Mapping[str, Any]) -> str | None:
    """That other programs took enough of the machine to spoil a measurement, in words: just before
    `environment()` by its load, or during it by `others`, as `watch_others` has it. None if they didn't."""
    load, others, cores = values["load"], values.get("others"), values["cores"]
    on = values.get("machine_cores") or cores
    parts = [f"when this began (load {load:.1f})"] if load is not None and load > BUSY_SHARE * on else []
    if others is not None and others > OTHERS_SHARE * cores:
        parts.append(f"meanwhile ({others:.1f} of {cores} cores)")
    return f"Other programs were running {' and '.join(parts)}" if parts else None


def peak_memory_bytes() -> int | None:
    """The most memory that this process has had resident, in bytes; None where the system doesn't tell."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def _busy_s() -> float | None:
    """Seconds that the cores of this process have worked since the machine started, for whomever."""
    try:
        lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
        return _work_of(lines, os.sched_getaffinity(0)) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):  # not on Linux
        return None


def _work_of(lines: Sequence[str], cores: Collection[int]) -> int:
    """Ticks in which `cores` worked: user, nice, system, irq, softirq and steal of /proc/stat."""
    names = {f"cpu{core}" for core in cores}
    each = [[int(value) for value in line.split()[1:]] for line in lines if line.split(" ")[0] in names]
    return sum(sum(ticks[:3]) + sum(ticks[5:8]) for ticks in each)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def package_version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
