"""Shortest job first by predicted length, and shortest remaining service first."""

from __future__ import annotations

from collections.abc import Callable

from .policy import IgnoresService, Job, Key


class ShortestJobFirst(IgnoresService):
    """Orders by the output length predicted on arrival, without preemption: all that it keeps of a
    request."""

    preempts = False
    review_rounds = 1

    def __init__(self) -> None:
        self._lengths: dict[int, float] = {}

    def add(self, job: Job) -> None:
        self._lengths[job.number] = job.predict(0)

    def remove(self, number: int) -> None:
        self._lengths.pop(number, None)

    def key(self, number: int, now_s: float) -> Key:
        return (self._lengths[number], number)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return False


class ShortestRemaining(IgnoresService):
    """Orders by remaining service, with preemption (SRPT). With the true remaining service it is the oracle
    that bounds other policies.

    remaining   maps a request's number to its remaining service, in any unit. It should fall while the
                request runs and stay constant while it waits: then only arrivals cause preemptions
    """

    preempts = True

    def __init__(self, remaining: Callable[[int], float], review_rounds: int = 1) -> None:
        self.review_rounds = review_rounds
        self._remaining = remaining

    def key(self, number: int, now_s: float) -> Key:
        return (self._remaining(number), number)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return waiting[0] < running[0]
