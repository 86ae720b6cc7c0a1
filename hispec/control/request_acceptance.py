"""How much better or worse than average single requests are drafted and verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .choice import Ints
from .hazards import Floats

_RECENT = 32.0  # rounds after which an observation counts half
_MAX_SHIFT = 3.0  # of log odds
_TRIES, _SUCCESSES, _EXPECTED = range(3)


class RequestAcceptance:
    """By request and tier: positions tried, successes, and the successes that the estimates for all requests
    would give. Their difference is a shift of the request's log odds, shrunk towards 0 by `weight`
    pseudo-counts.
    """

    def __init__(self, num_tiers: int, window: float, weight: float) -> None:
        self._weight, self._decay = weight, np.log(2.0) / min(window, _RECENT)
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = np.zeros((0, num_tiers, 3))
        self._last_round = 0.0

    def __len__(self) -> int:
        return len(self._slot_of)

    def add(self, tier: int, numbers: Ints, tries: Ints, successes: Ints, expected: Floats) -> None:
        """One entry per run; requests that are not tracked are ignored."""
        unique, inverse = np.unique(numbers, return_inverse=True)
        slots = np.array([self._slot_of.get(number, -1) for number in unique.tolist()], np.int64)
        known = slots >= 0
        for kind, values in ((_TRIES, tries), (_SUCCESSES, successes), (_EXPECTED, expected)):
            self._counts[slots[known], tier, kind] += np.bincount(inverse, values, len(unique))[known]

    def decay(self, round_index: float) -> None:
        """Discounts what was seen before `round_index`."""
        self._counts *= np.exp(-self._decay * max(round_index - self._last_round, 0.0))
        self._last_round = max(round_index, self._last_round)

    def track(self, numbers: Sequence[int]) -> None:
        """Makes room for running requests."""
        for number in numbers:
            if number in self._slot_of:
                continue
            if not self._free:
                size = len(self._counts)
                more = np.zeros((max(8, size), *self._counts.shape[1:]))
                self._counts = np.concatenate([self._counts, more])
                self._free = list(range(len(self._counts) - 1, size - 1, -1))
            self._slot_of[number] = self._free.pop()

    def forget(self, number: int) -> None:
        slot = self._slot_of.pop(number, None)
        if slot is not None:
            self._counts[slot] = 0.0
            self._free.append(slot)

    def shifts(self, tier: int, numbers: Sequence[int]) -> tuple[Floats, Floats]:
        """[n] each: the shifts of these requests' log odds, and the tries that they rest on."""
        slots = [self._slot_of.get(number, -1) for number in numbers]  # -1: the zeros appended last
        tries, successes, expected = np.concatenate([self._counts[:, tier], np.zeros((1, 3))])[slots].T
        usual = np.clip(np.where(tries > 0, expected / np.maximum(tries, 1e-9), 0.5), 0.01, 0.99)
        own = np.clip((successes + self._weight * usual) / (tries + self._weight), 0.001, 0.999)
        shift = np.log(own / (1.0 - own)) - np.log(usual / (1.0 - usual))
        return np.clip(shift, -_MAX_SHIFT, _MAX_SHIFT), tries
