"""Times passes against each other."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from ..utils.console import make_bar

Key = TypeVar("Key")
_OFTEN = 4
_LEAST_SAMPLES = 3  # of a pass: of fewer nobody can tell a quartile
_REPLAYS = 4  # of a pass on a GPU, one launched behind the other
Timed = Callable[[], float | None]  # runs a pass -> its milliseconds; None = by the caller's clock


def quiet_times(
    passes: Mapping[Key, Timed],
    device: torch.device,
    *,
    samples: int,
    what: str,
    progress: bool,
    budget_s: float = math.inf,
    often: Collection[Key] = (),
) -> dict[Key, float]:
    """Milliseconds of each pass on `device`, in the quieter moments of a machine that others share: the lower
    quartile of its samples. A memory that is fast and slow by turns would else make a pass over two tokens
    cheaper than one over a single token; how much longer passes take meanwhile, by their width, is a
    Yardstick's to say. All passes take turns, so that a machine that slows down slows all of them; in another
    order each time, so that none always finds in the caches what the one before it left there.

    budget_s   seconds after which no further turn begins once each pass has _LEAST_SAMPLES; half of them go
               to all passes alike, the rest to those that take less than the mean, since short ones vary
               more, and are sampled the more cheaply
    often      those that all others are compared with: sampled _OFTEN times in a turn
    """
    taken: dict[Key, list[float]] = {key: [] for key in passes}
    order, shuffled = [*passes, *list(often) * (_OFTEN - 1)], random.Random(0)
    time_one = _time_on_gpu if device.type == "cuda" else _time_on_host
    with make_bar((samples + 1) * len(order), what, "pass", progress) as bar:
        for turn in range(samples + 1):
            if turn <= 1:
                began = time.monotonic()  # once all are warm
            elif turn > _LEAST_SAMPLES and time.monotonic() - began > budget_s:
                break
            elif turn > _LEAST_SAMPLES and time.monotonic() - began > budget_s / 2:
                mean = statistics.fmean(values[0] for values in taken.values())
                order = [key for key in order if taken[key][0] < mean or key in often]
            shuffled.shuffle(order)
            for key in order:
                if turn == 0:  # a warm-up, after which it is captured on a GPU
                    passes[key]()
                else:
                    taken[key].append(time_one(passes[key]))
                bar.update()
    return {key: _lower_quartile(values) for key, values in taken.items()}


def _time_on_host(run: Timed) -> float:
    started = time.perf_counter()
    ms = run()
    return 1e3 * (time.perf_counter() - started) if ms is None else ms


def _time_on_gpu(run: Timed) -> float:
    """By events of the device, of several runs in a row: within a round a pass follows the one before it at
    once, so neither its launch nor the wait for its end counts."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # while it runs, the others are launched
    first.record()
    for _ in range(_REPLAYS):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / _REPLAYS


def _lower_quartile(values: Sequence[float]) -> float:
    """By ranks of n + 1, which from three values on expects the same of few as of many: passes of which one
    was sampled more often than another are compared. Of fewer the least."""
    return statistics.quantiles(values, n=4)[0] if len(values) >= _LEAST_SAMPLES else min(values)


def sync_of(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done all that it was given."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
