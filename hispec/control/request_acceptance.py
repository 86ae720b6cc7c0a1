"""How much better or worse than others single requests are drafted and verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .choice import Ints
from .hazards import Floats

_RECENT = 32.0  # rounds after which an observation counts half
_MOST_SHIFT = 3.0  # of log odds
_TRIES, _SUCCESSES, _EXPECTED = range(3)


class Requests:
    """Counts by request and tier: places that were tried, those that were right, and how many of them should
    have been by what is known of all requests. The difference is a shift of the log odds, wherever a request
    is drafted; `weight` counts of "as expected" are added.
    """

    def __init__(self, num_tiers: int, window: float, weight: float) -> None:
        self._weight, self._halving = weight, np.log(2.0) / min(window, _RECENT)
        self._place_of: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = np.zeros((0, num_tiers, 3))
        self._seen_at = 0.0

    def __len__(self) -> int:
        return len(self._place_of)

    def add(self, tier: int, numbers: Ints, tries: Ints, successes: Ints, expected: Floats) -> None:
        """One entry per run. Requests that `keep` was not told of are passed over."""
        unique, inverse = np.unique(numbers, return_inverse=True)
        places = np.array([self._place_of.get(number, -1) for number in unique.tolist()], np.int64)
        known = places >= 0
        for kind, values in ((_TRIES, tries), (_SUCCESSES, successes), (_EXPECTED, expected)):
            self._counts[places[known], tier, kind] += np.bincount(inverse, values, len(unique))[known]

    def age(self, now: float) -> None:
        """Rounds have passed: what was seen before counts less."""
        self._counts *= np.exp(-self._halving * max(now - self._seen_at, 0.0))
        self._seen_at = max(now, self._seen_at)

    def keep(self, numbers: Sequence[int]) -> None:
        """These are running."""
        for number in numbers:
            if number in self._place_of:
                continue
            if not self._free:
                size = len(self._counts)
                self._counts = np.concatenate(
                    [self._counts, np.zeros((max(8, size), *self._counts.shape[1:]))]
                )
                self._free = list(range(len(self._counts) - 1, size - 1, -1))
            self._place_of[number] = self._free.pop()

    def forget(self, number: int) -> None:
        place = self._place_of.pop(number, None)
        if place is not None:
            self._counts[place] = 0.0
            self._free.append(place)

    def shifts(self, tier: int, numbers: Sequence[int]) -> tuple[Floats, Floats]:
        """Of each of these requests, [n] each: the shift of its log odds, and on how many tries that
        stands."""
        places = [self._place_of.get(number, -1) for number in numbers]
        counts = np.concatenate([self._counts[:, tier], np.zeros((1, 3))])[places]
        tries, successes, expected = counts.T
        usual = np.clip(np.where(tries > 0, expected / np.maximum(tries, 1e-9), 0.5), 0.01, 0.99)
        own = np.clip((successes + self._weight * usual) / (tries + self._weight), 0.001, 0.999)
        return (
            np.clip(np.log(own / (1.0 - own)) - np.log(usual / (1.0 - usual)), -_MOST_SHIFT, _MOST_SHIFT),
            tries,
        )
