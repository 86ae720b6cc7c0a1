"""The order of service, as a small interface that engine and simulator share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..errors import ConfigError

Key = tuple[float, ...]


@dataclass(frozen=True)
class Job:
    """What a policy knows of a request when it comes.

    number             order of arrival
    arrival_s          on the clock that all times are on
    num_prompt_tokens
    max_tokens         that it may output
    predict            predicted length of its output, given how many tokens there are already
    """

    number: int
    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    predict: Callable[[int], float]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.num_prompt_tokens >= 0 and self.max_tokens >= 1):
            raise ConfigError(
                f"request {self.number}: arrival_s={self.arrival_s!r} must be finite,"
                f" num_prompt_tokens={self.num_prompt_tokens!r} at least 0 and max_tokens={self.max_tokens!r}"
                " at least 1"
            )


@dataclass(frozen=True)
class Service:
    """What rounds gave a request: rounds, committed tokens, drafts and those that were accepted in the end,
    and its attained service in passes over the whole model (layers run / layers), prefill included; seconds
    that these rounds and passes took, others' share in them included.

    Prefill comes by itself, as a service of no rounds. seconds = nan: not to be learnt from (something else
    was timed too).
    """

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    passes: float
    seconds: float

    def __post_init__(self) -> None:
        # All at once, since this is made for every row and round: false for nan, too, but in `seconds`.
        if not (
            self.rounds >= 0
            and self.tokens >= 0
            and 0 <= self.accepted <= self.drafted
            and 0.0 <= self.passes < math.inf
        ) or not (0.0 <= self.seconds < math.inf or math.isnan(self.seconds)):
            raise ConfigError(
                f"{self} is impossible: counts, passes and seconds must be finite and at least 0 (seconds may"
                " be nan), accepted at most drafted"
            )


class Policy(Protocol):
    """Orders requests by what it was told of them; the scheduler moves them and their blocks. Pure: no clock,
    no chance.

    preempts        whether a waiting request may take the row of a running one between rounds
    review_rounds   rounds between two looks at that
    """

    preempts: bool
    review_rounds: int

    def add(self, job: Job) -> None:
        """A request has come."""

    def served(self, number: int, service: Service) -> None:
        """Rounds, or prefill, were run for it."""

    def remove(self, number: int) -> None:
        """It has ended. Unknown numbers are passed over."""

    def key(self, number: int, now_s: float) -> Key:
        """Who has the least goes first; no two requests have the same. When blocks run out, who has the most
        makes room."""

    def displaces(self, waiting: Key, running: Key) -> bool:
        """Whether a waiting request of this key takes the row of a running one of that key; if so, waiting <
        running. Asked of policies that preempt."""


class Forgetful:
    """The parts of a policy that keeps nothing of requests."""

    def add(self, job: Job) -> None:
        pass

    def served(self, number: int, service: Service) -> None:
        pass

    def remove(self, number: int) -> None:
        pass


class FirstComeFirstServed(Forgetful):
    """Admits in order of arrival, preempts the latest to arrive: so the oldest always gets through."""

    preempts = False
    review_rounds = 1

    def key(self, number: int, now_s: float) -> Key:
        return (number,)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return False
