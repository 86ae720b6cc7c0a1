"""Quantiles of values of which there may be more than memory is to hold."""

from __future__ import annotations

import random
from array import array

import numpy as np

_MOST = 100_000  # values that are kept


class Sample:
    """All of the first _MOST values; of more an even random choice (Vitter's algorithm R)."""

    def __init__(self) -> None:
        self._kept, self._num, self._random = array("d"), 0, random.Random(0)

    def __len__(self) -> int:
        """How many values there were."""
        return self._num

    def add(self, value: float) -> None:
        self._num += 1
        if len(self._kept) < _MOST:
            self._kept.append(value)
        elif (place := self._random.randrange(self._num)) < _MOST:
            self._kept[place] = value

    def quantiles(self, *shares: float) -> list[float]:
        """Those of the values that are kept, of which there must be one."""
        found: list[float] = np.quantile(self._kept, shares).tolist()
        return found
