"""Arrival times of requests."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from ..config import Settings
from ..config.base import Tuple
from ..errors import shown
from .distributions import Floats

Rate = Annotated[float, Field(ge=1e-6, le=1e9)]
_TAKES: dict[str, frozenset[str]] = {
    "poisson": frozenset({"rates", "utilisations", "reference"}),
    "gamma": frozenset({"rates", "utilisations", "reference", "cv"}),
    "bursty": frozenset({"rates", "utilisations", "reference", "burst_factor", "burst_share", "burst_s"}),
    "recorded": frozenset({"speeds", "times"}),
    "closed": frozenset({"clients", "think_s"}),
}


class ArrivalsConfig(Settings):
    """The arrival process, and the loads to run: one list of `rates`, `utilisations`, `speeds` or `clients`.

    kind          "poisson"; "gamma": intervals with standard deviation / mean = cv; "bursty": Poisson whose
                  rate jumps between two values; "recorded": `times`, or those of the trace; "closed": a
                  constant number of clients
    rates         requests per second, of all replicas together
    utilisations  the same, as shares of the capacity of the system `reference` (None = the first)
    speeds        of recorded: factors by which the times are sped up
    clients       of closed: clients of all replicas together, each of which sends its next request think_s
                  after an answer
    cv            of gamma: standard deviation / mean of the intervals
    burst_factor, burst_share, burst_s   of bursty: rate in a burst over that outside; share of time in
                                         bursts; mean seconds of one
    times         of recorded: seconds, ascending; repeated as often as needed
    """

    kind: Literal["poisson", "gamma", "bursty", "recorded", "closed"] = "poisson"
    rates: Annotated[Tuple[Rate], Field(min_length=1)] | None = None
    utilisations: Annotated[Tuple[Annotated[float, Field(gt=0.0, lt=1.0)]], Field(min_length=1)] | None = None
    reference: str | None = None
    speeds: Annotated[Tuple[Rate], Field(min_length=1)] | None = None
    clients: Annotated[Tuple[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None
    think_s: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    cv: Annotated[float, Field(ge=1e-3, le=100.0)] = 2.0
    burst_factor: Annotated[float, Field(ge=1.0, le=1e6)] = 5.0
    burst_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    burst_s: Annotated[float, Field(ge=1e-3, le=1e9)] = 10.0
    times: Annotated[Tuple[Annotated[float, Field(ge=0.0, le=1e12)]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _fields_of_kind(self) -> ArrivalsConfig:
        for name in sorted(self.model_fields_set - {"kind"} - _TAKES[self.kind]):
            raise ValueError(
                f"{name}={shown(getattr(self, name))} means nothing for kind={self.kind!r}; leave it out"
            )
        given = [
            name for name in ("rates", "utilisations", "speeds", "clients") if getattr(self, name) is not None
        ]
        if self.kind != "recorded" and len(given) != 1:
            raise ValueError(
                f"kind={self.kind!r} needs one list of loads, not {given or 'none'}:"
                f" {', '.join(sorted(_TAKES[self.kind] & _LOADS))}"
            )
        if self.reference is not None and self.utilisations is None:
            raise ValueError(
                f"reference={shown(self.reference)} means nothing for {given[0]}, only for utilisations;"
                " leave it out"
            )
        if self.times is not None and list(self.times) != sorted(self.times):
            raise ValueError("times must ascend")
        return self

    @property
    def what(self) -> str:
        """The field that lists the loads."""
        return next(
            (name for name in ("rates", "utilisations", "clients") if getattr(self, name) is not None),
            "speeds",
        )

    @property
    def loads(self) -> tuple[float, ...]:
        return tuple(self.rates or self.utilisations or self.clients or self.speeds or (1.0,))

    def sample(self, num: int, rate: float, chance: np.random.Generator) -> Floats:
        """Draws [num] arrival times in seconds, ascending, of an open kind at this mean rate."""
        if self.kind == "poisson":
            return np.cumsum(chance.exponential(1.0, num)) / rate
        if self.kind == "gamma":
            return np.cumsum(chance.gamma(self.cv**-2, self.cv**2, num)) / rate
        return self._bursty(num, chance, rate)

    def _bursty(self, num: int, chance: np.random.Generator, rate: float) -> Floats:
        """A Poisson process of rate 1 on a clock that runs burst_factor times as fast in bursts."""
        slow = rate / (1.0 - self.burst_share + self.burst_share * self.burst_factor)
        ticks = np.cumsum(chance.exponential(1.0, num))
        quiet_s = self.burst_s * (1.0 - self.burst_share) / self.burst_share
        mean_ticks = slow * (quiet_s + self.burst_s * self.burst_factor)
        pairs = int(ticks[-1] / mean_ticks * 1.5) + 64
        while True:
            lengths = chance.exponential(1.0, (pairs, 2)) * (quiet_s, self.burst_s)
            clock = np.concatenate([[0.0], np.cumsum(lengths * (slow, slow * self.burst_factor))])
            if clock[-1] >= ticks[-1]:
                return np.interp(ticks, clock, np.concatenate([[0.0], np.cumsum(lengths)]))
            pairs *= 2


_LOADS = frozenset({"rates", "utilisations", "speeds", "clients"})


def repeat_times(times: Floats, num: int, speed: float) -> Floats:
    """[num] recorded times from 0, repeated as often as needed with a mean interval in between."""
    times = times - times[0]
    period = times[-1] + (times[-1] / (len(times) - 1) if len(times) > 1 else 1.0)
    at = np.arange(num)
    return (times[at % len(times)] + at // len(times) * period) / speed
