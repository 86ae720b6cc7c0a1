"""Times on the device's own clock, the speed of its memory, and how many kernels something is."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_COPIES = 10


class Clock:
    """Of a GPU by events in its stream, so that it counts what the device does and not what Python takes to
    ask for it; of a CPU by the wall."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"

    def sync(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def ms(self, run: Callable[[], object], repeats: int = 1) -> float:
        """Milliseconds of one run, of `repeats` back to back."""
        self.sync()
        if not self._on_gpu:
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            return (time.perf_counter() - started) * 1e3 / repeats
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats

    def medians(
        self, runs: Mapping[str, Callable[[], object]], samples: int, repeats: int
    ) -> dict[str, float]:
        """Median milliseconds of each; they take turns, so that a slow moment hits all alike. The first two
        turns warm up: one eagerly, one from a capture."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(2):
            for run in runs.values():
                run()
        for _ in range(samples):
            for name, run in runs.items():
                times[name].append(self.ms(run, repeats))
        return {name: statistics.median(values) for name, values in times.items()}


def copy_bandwidth(clock: Clock, device: torch.device, num_bytes: int) -> float:
    """Bytes per second that a copy within the device's memory reads and writes, the best of several: what
    floors are reckoned by."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    clock.ms(lambda: target.copy_(source), _COPIES)
    best = min(clock.ms(lambda: target.copy_(source), _COPIES) for _ in range(5))
    return 2 * num_bytes / (best * 1e-3)


def count_kernels(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Kernels that run() launches, copies and fills of memory left out, and their microseconds, those that
    take longest first; on a CPU, which has none, torch's operations stand in for them."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    wanted = "DeviceType.CUDA" if on_gpu else "DeviceType.CPU"
    names: Counter[str] = Counter()
    us: Counter[str] = Counter()
    copies = 0
    for event in recorded.events():
        if str(event.device_type) != wanted:
            continue
        if event.name.startswith(("Memcpy", "Memset")):
            copies += 1
            continue
        names[event.name] += 1
        us[event.name] += event.time_range.elapsed_us()
    return {
        "kernels": sum(names.values()),
        "copies": copies,
        "us": round(sum(us.values()), 1),
        "most": {name[:100]: count for name, count in names.most_common(12)},
        "longest": [
            {"name": name[:100], "count": names[name], "us": round(spent, 1)}
            for name, spent in us.most_common(25)
        ],
    }
