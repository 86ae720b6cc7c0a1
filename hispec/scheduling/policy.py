"""The interface of scheduling policies, which engine and simulator share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..errors import ConfigError

Key = tuple[float, ...]


@dataclass(frozen=True)
class Job:
    """What a policy knows of a request on arrival.

    number             order of arrival
    arrival_s          time of arrival, on the clock of `Policy.key`
    num_prompt_tokens  length of the prompt
    max_tokens         most tokens that it may output
    predict            maps the number of tokens generated so far to the predicted length of the output
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
    """Service that a request received: `rounds` rounds, in which `tokens` were committed and `accepted` of
    `drafted` drafts were accepted; or, with rounds = 0, prefill.

    passes    attained service in passes over the whole model (layers run / layers)
    seconds   what these rounds took for the whole batch; nan = not to be learned from, because something else
              was timed too: a capture, or the caller's pause
    """

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    passes: float
    seconds: float

    def __post_init__(self) -> None:
        # One condition, since this runs for every row and round. Comparisons with nan are false.
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
    """Orders requests; the scheduler moves them and their blocks accordingly. A policy reads no clock and
    draws no random numbers.

    preempts        whether a waiting request may take the row of a running one between rounds
    review_rounds   rounds between two checks for that
    """

    preempts: bool
    review_rounds: int

    def add(self, job: Job) -> None:
        """Registers a request on arrival."""

    def served(self, number: int, service: Service) -> None:
        """Records service that the request received."""

    def remove(self, number: int) -> None:
        """Forgets a request that has ended. Unknown numbers are ignored."""

    def key(self, number: int, now_s: float) -> Key:
        """Sort key: the least goes first, the greatest is preempted first when blocks run out. No two
        requests have the same."""

    def displaces(self, waiting: Key, running: Key) -> bool:
        """Whether a waiting request with the one key takes the row of a running one with the other; implies
        waiting < running. Called only if the policy preempts."""


class IgnoresService:
    """Base of policies that order requests by other things than the service that they have received."""

    def add(self, job: Job) -> None:
        pass

    def served(self, number: int, service: Service) -> None:
        pass

    def remove(self, number: int) -> None:
        pass


class FirstComeFirstServed(IgnoresService):
    """Admits in order of arrival and, when blocks run out, preempts the latest arrival: the oldest request
    always progresses."""

    preempts = False
    review_rounds = 1

    def key(self, number: int, now_s: float) -> Key:
        return (number,)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return False
