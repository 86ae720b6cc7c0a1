"""How many workers there are, and what each of them has of the machine."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import EngineConfig
from ..errors import ConfigError, shown
from ..loading.target_model import select_device
from ..utils.memory import free_memory_bytes
from .counts import best_count

_BYTES_PER_WORKER = 2 << 30  # of free memory that `auto` wants for each: KV, and what a process takes besides
# What a container may have of its cores, by the two versions that Linux has: microseconds in a period.
_CPU_MAX, _CPU_GROUP = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu")


@dataclass(frozen=True)
class Share:
    """Of one worker.

    cores    that its threads are bound to; None = the system places them
    threads  how many
    device   as in EngineConfig
    """

    cores: tuple[int, ...] | None
    threads: int
    device: str

    def take(self) -> None:
        """Makes this process, which has no threads yet that compute, use its share."""
        if self.device != "cpu":
            return
        from ee_models.kernels.threads import KernelThreads

        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)
        KernelThreads.resize(self.threads)


def make_shares(workers: int | str, config: EngineConfig, model: str | Path | None = None) -> list[Share]:
    """A share for each worker: on a CPU of its cores, on GPUs one of them. "auto": as many workers as
    `hispec profile --latency` has found fastest for the model, else as many as there are cores, each of one
    thread, as far as there are 2 GiB of free memory for each; or as many as there are GPUs. Raises
    ConfigError for more workers than GPUs, and for a device that there is not."""
    has_gpus = config.device.startswith("cuda") and torch.cuda.is_available()
    if config.device not in ("auto", "cpu") and not has_gpus:
        select_device(config.device)  # says what is wrong with it
    if _uses_gpus(config):
        return _gpus(workers, config)
    cores, count = _cores()
    if workers == "auto":
        workers = most_workers(config)
        measured = None if model is None else best_count(model, config)
        workers = workers if measured is None else min(workers, measured)
    assert isinstance(workers, int)
    most = _threads_wanted()
    if cores is None:
        return [Share(None, min(max(1, count // workers), most), "cpu")] * workers
    shares = []
    for at in range(workers):
        # With more workers than cores, they share them one after the other.
        begin, end = at * count // workers, max((at + 1) * count // workers, at * count // workers + 1)
        own = tuple(cores[begin:end])
        shares.append(Share(own, min(len(own), most), "cpu"))
    return shares


def most_workers(config: EngineConfig) -> int:
    """Workers that this machine's cores and free memory suffice for; 1 where there are GPUs."""
    if _uses_gpus(config):
        return 1
    return max(1, min(_cores()[1], free_memory_bytes() // _BYTES_PER_WORKER))


def _uses_gpus(config: EngineConfig) -> bool:
    return config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())


def _gpus(workers: int | str, config: EngineConfig) -> list[Share]:
    if ":" in config.device:
        if workers in (1, "auto"):
            return [Share(None, 1, config.device)]
        raise ConfigError(
            f"workers={workers}: each has a GPU of its own, but engine.device={config.device!r} names one;"
            " leave it at auto or cuda, or set workers to 1"
        )
    count = torch.cuda.device_count()
    number = max(1, count) if workers == "auto" else int(workers)
    if number > count and number > 1:
        raise ConfigError(
            f"workers={workers}: each has a GPU of its own, and there are {count}; choose at most {count},"
            " or auto"
        )
    return [Share(None, 1, f"cuda:{at}") for at in range(number)]


def _cores() -> tuple[list[int] | None, int]:
    """The cores that this process may use, and how many of them at once. The first is None where threads
    cannot be bound to cores, or where a container may use fewer at once than it sees."""
    if not hasattr(os, "sched_getaffinity"):
        return None, os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    quota = _quota()
    if quota is not None and quota < len(cores):
        return None, quota
    return cores, len(cores)


def _quota() -> int | None:
    """How many cores a container may use at once; None if nothing limits it."""
    try:
        if _CPU_MAX.exists():
            quota, period = map(int, _CPU_MAX.read_text(encoding="ascii").split())
        else:
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            quota, period = (int((_CPU_GROUP / name).read_text(encoding="ascii")) for name in names)
        return max(1, math.ceil(quota / period)) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max", or no such file
        return None


def _threads_wanted() -> int:
    """OMP_NUM_THREADS: the most threads of a process, if the user has set it."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if not text:
        return MOST_THREADS
    try:
        return max(1, int(text))
    except ValueError:
        raise ConfigError(f"OMP_NUM_THREADS={shown(text)} is no number of threads; unset it") from None


MOST_THREADS = 1 << 10
