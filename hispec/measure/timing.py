"""Times passes against each other."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Generic, TypeVar

import torch

from ..utils.console import make_bar
from ..utils.means import trimmed_mean

_FEW = 4  # passes, after which comes one of those on which most depends
Key = TypeVar("Key")
Timed = Callable[[], float | None]  # runs a pass -> its milliseconds; None = by the caller's clock


class Samples(Generic[Key]):
    """Milliseconds of passes on `device`, each of them sampled again and again. All take turns, so that a
    machine that slows down slows all of them; in another order each time, so that none always finds in the
    caches what the one before it left there.

    often   those on which most depends: after every fourth pass comes one of them
    """

    def __init__(
        self, passes: Mapping[Key, Timed], device: torch.device, often: Collection[Key] = ()
    ) -> None:
        self._passes, self._often, self._sync = dict(passes), list(often), sync_of(device)
        self._taken: dict[Key, list[float]] = {key: [] for key in passes}
        self._before: dict[Key, float] = {}
        self._shuffled = random.Random(0)
        self._turns = self._endless()

    def take_all(self, num: int, what: str, progress: bool, budget_s: float = math.inf) -> None:
        """Runs each pass once, and then takes `num` samples of it.

        budget_s   seconds after which no further turn begins once each pass has a sample; half of them go to
                   all passes alike, the rest to those that take less than the mean, since short ones vary
                   more, and are sampled the more cheaply
        """
        order, began = list(self._passes), time.monotonic()
        for key in order:
            self._time(key)
        total = num * (len(order) + (len(order) // _FEW if self._often else 0))
        with make_bar(total, what, "pass", progress) as bar:
            for turn in range(num):
                if turn and time.monotonic() - began > budget_s:
                    break
                if turn and time.monotonic() - began > budget_s / 2:
                    mean = statistics.fmean(values[0] for values in self._taken.values())
                    order = [key for key in self._passes if self._taken[key][0] < mean]
                for key in self._turn(order):
                    self._sample(key)
                    bar.update()

    def take(self, num: int) -> None:
        """Takes a few samples more, where the last ones ended."""
        for _ in range(num):
            self._sample(next(self._turns))

    def restart(self) -> None:
        """From here on only samples of later count, of passes that have any."""
        self._before = self.ms()
        self._taken = {key: [] for key in self._passes}

    def ms(self) -> dict[Key, float]:
        """Milliseconds of each pass."""
        return {
            key: trimmed_mean(values) if values else self._before[key] for key, values in self._taken.items()
        }

    def _endless(self) -> Iterator[Key]:
        while True:
            yield from self._turn(list(self._passes))

    def _turn(self, order: list[Key]) -> Iterator[Key]:
        self._shuffled.shuffle(order)
        for at, key in enumerate(order):
            yield key
            if self._often and at % _FEW == _FEW - 1:
                yield self._often[at // _FEW % len(self._often)]

    def _sample(self, key: Key) -> None:
        self._taken[key].append(self._time(key))

    def _time(self, key: Key) -> float:
        self._sync()
        started = time.perf_counter()
        ms = self._passes[key]()
        self._sync()
        return 1e3 * (time.perf_counter() - started) if ms is None else ms


def sync_of(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done all that it was given."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
