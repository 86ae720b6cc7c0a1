"""Distributions given in settings: of lengths in tokens, of acceptance rates."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from ..config import Settings
from ..config.base import Tuple
from ..errors import shown

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = Annotated[float, Field(ge=0.0, le=1e9)]
_NEEDS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "uniform": ("low", "high"),
    "exponential": ("mean",),
    "lognormal": ("mean", "cv"),
    "beta": ("mean", "concentration"),
    "empirical": ("values",),
}
_PARTS = ("value", "low", "high", "mean", "cv", "concentration", "values")


class Distribution(Settings):
    """One of:

    constant     value
    uniform      low to high; of tokens, where both are whole, whole numbers between, and both
    exponential  mean; of tokens, rounded up: geometric
    lognormal    mean, and cv: standard deviation / mean
    beta         mean, and concentration: how little it spreads (a + b of Beta(a, b))
    empirical    values, all equally likely
    least, most  bounds to which samples are clipped
    """

    kind: Literal["constant", "uniform", "exponential", "lognormal", "beta", "empirical"] = "constant"
    value: Number | None = None
    low: Number | None = None
    high: Number | None = None
    mean: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    cv: Annotated[float, Field(ge=1e-3, le=100.0)] | None = None
    concentration: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    values: Annotated[Tuple[Number], Field(min_length=1)] | None = None
    least: Number | None = None
    most: Number | None = None

    @model_validator(mode="after")
    def _fields_of_kind(self) -> Distribution:
        for name in _PARTS:
            given, needed = getattr(self, name) is not None, name in _NEEDS[self.kind]
            if given and not needed:
                takes = ", ".join(_NEEDS[self.kind])
                raise ValueError(
                    f"{name}={shown(getattr(self, name))} means nothing for kind={self.kind!r}, which takes"
                    f" {takes}; leave it out"
                )
            if needed and not given:
                raise ValueError(f"kind={self.kind!r} needs {name}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}; exchange them")
        if self.kind == "beta" and self.mean is not None and self.mean >= 1.0:
            raise ValueError(f"mean={self.mean} of kind='beta' must lie below 1")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"least={self.least} is above most={self.most}; exchange them")
        return self

    def sample(self, num: int, chance: np.random.Generator) -> Floats:
        """Draws [num] samples."""
        mean, cv = self.mean or 0.0, self.cv or 0.0
        if self.kind == "constant":
            drawn = np.full(num, self.value, np.float64)
        elif self.kind == "uniform":
            drawn = chance.uniform(self.low or 0.0, self.high or 0.0, num)
        elif self.kind == "exponential":
            drawn = chance.exponential(mean, num)
        elif self.kind == "lognormal":
            variance = np.log1p(cv * cv)
            drawn = np.exp(chance.normal(np.log(mean) - variance / 2, np.sqrt(variance), num))
        elif self.kind == "beta":
            weight = self.concentration or 0.0
            drawn = chance.beta(mean * weight, (1.0 - mean) * weight, num)
        else:
            drawn = chance.choice(np.asarray(self.values, np.float64), num)
        return self._clip(drawn)

    def tokens(self, num: int, chance: np.random.Generator) -> Ints:
        """Draws [num] integers >= 1."""
        low, high = self.low or 0.0, self.high or 0.0
        if self.kind == "uniform" and low.is_integer() and high.is_integer():
            # Rounded up, samples between would hardly ever be `low`.
            drawn = self._clip(chance.integers(int(low), int(high), num, endpoint=True).astype(np.float64))
        else:
            drawn = self.sample(num, chance)
        return np.maximum(1, np.ceil(drawn)).astype(np.int64)

    def shares(self, ranks: Ints, chance: np.random.Generator) -> Floats:
        """Draws [num] samples of `Shares` and assigns them by the rank of each request: one that is drafted
        well by one drafter is drafted well by all."""
        return np.sort(self.sample(len(ranks), chance))[ranks]

    @property
    def largest(self) -> float:
        """What no sample exceeds."""
        bounds = {
            "constant": self.value,
            "uniform": self.high,
            "beta": 1.0,
            "empirical": max(self.values or (0.0,)),
        }
        return float(self._clip(np.asarray(bounds.get(self.kind, math.inf), np.float64)))

    def _clip(self, drawn: Floats) -> Floats:
        return np.clip(
            drawn,
            self.least if self.least is not None else -np.inf,
            self.most if self.most is not None else np.inf,
        )


def _check_shares(distribution: Distribution) -> Distribution:
    if distribution.largest > 1.0:
        raise ValueError(
            f"a share is at most 1, but kind={distribution.kind!r} may draw up to {distribution.largest:g}"
            " here; lower it, or clip it by most: 1"
        )
    return distribution


Shares = Annotated[Distribution, AfterValidator(_check_shares)]  # whose samples lie in [0, 1]


def constant(value: float) -> Distribution:
    return Distribution(kind="constant", value=value)
