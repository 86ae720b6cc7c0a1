"""How much longer passes take in some minutes than when their latency profile was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .model import LatencyModel

WIDTHS = 1, 4, 16, 64  # positions of a row by which machines are compared


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


def full_pass(width: int) -> str:
    """The stage of a pass through the whole model over so many positions of each row."""
    return "plain" if width == 1 else "verify/0"


def drift_between(before: LatencyModel, now: LatencyModel, rows: int, widest: int, context_len: int) -> Drift:
    """Of passes through the whole model over up to `widest` positions of each of `rows` rows, which attend to
    context_len each."""
    found = {}
    for width in WIDTHS:
        if width <= widest:
            stage, size = full_pass(width), (float(rows), float(rows * width), float(rows * context_len))
            found[size[1]] = float(now[stage](*size)) / float(before[stage](*size))
    return Drift(tuple(found), tuple(found.values()))
