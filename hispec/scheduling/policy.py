"""The order of service, as a small interface that engine and simulator share."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


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


@dataclass(frozen=True)
class Service:
    """What rounds gave a request: rounds, committed tokens, drafts and those that were accepted in the end, and its attained service in passes over
    the whole model (layers run / layers), prefill included; seconds that these rounds and passes took, others' share in them included."""

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    passes: float
    seconds: float


class Policy(Protocol):
    """Orders requests by what it was told of them; the scheduler moves them and their blocks. Pure: no clock, no chance.

    preempts        whether a waiting request that goes before a running one takes its row between rounds
    review_rounds   rounds between two looks at that
    """

    preempts: bool
    review_rounds: int

    def add(self, job: Job) -> None:
        """A request has come."""

    def served(self, number: int, service: Service) -> None:
        """Rounds, or prefill, were run for it."""

    def remove(self, number: int) -> None:
        """It has ended."""

    def key(self, number: int, now_s: float) -> tuple[float, ...]:
        """Who has the least goes first; no two requests have the same. When blocks run out, who has the most makes room."""


class FirstComeFirstServed:
    """Admits in order of arrival, preempts the latest to arrive: so the oldest always gets through."""

    preempts = False
    review_rounds = 1

    def add(self, job: Job) -> None:
        pass

    def served(self, number: int, service: Service) -> None:
        pass

    def remove(self, number: int) -> None:
        pass

    def key(self, number: int, now_s: float) -> tuple[float, ...]:
        return (number,)
