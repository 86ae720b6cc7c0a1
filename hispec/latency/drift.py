"""How much longer passes take in some minutes than when their latency profile was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Drift:
    """A machine's speed beside that of a profile, by the tokens of a pass. What others on the same host do
    takes of the memory's speed, and little of the arithmetic's: in minutes in which a pass over one token
    takes 1.4 times as long, one over 16 may take as long as ever.

    tokens    batched tokens of passes, rising
    factors   what each took over what the profile says; between them a straight line, beyond them as they
    """

    tokens: tuple[float, ...] = (1.0,)
    factors: tuple[float, ...] = (1.0,)

    def __call__(self, tokens: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """The factors of passes over so many tokens."""
        return np.asarray(np.interp(tokens, self.tokens, self.factors))


STEADY = Drift()
