"""Shortest first: by predicted length, or by remaining service that somebody knows."""

from __future__ import annotations

from collections.abc import Callable

from .policy import Forgetful, Job, Key, Service


class ShortestJobFirst:
    """By the output length that was predicted when a request came; who runs, runs to its end."""

    preempts = False
    review_rounds = 1

    def __init__(self) -> None:
        self._lengths: dict[int, float] = {}

    def add(self, job: Job) -> None:
        self._lengths[job.number] = job.predict(0)

    def served(self, number: int, service: Service) -> None:
        pass

    def remove(self, number: int) -> None:
        self._lengths.pop(number, None)

    def key(self, number: int, now_s: float) -> Key:
        return (self._lengths[number], number)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return False


class ShortestRemaining(Forgetful):
    """By remaining service, preempting: with the true one, the oracle that others are measured against.

    remaining   of a request, by its number, in any unit. It should fall while the request runs and stay while
                it waits: then only arrivals make anybody preempt
    """

    preempts = True

    def __init__(self, remaining: Callable[[int], float], review_rounds: int = 1) -> None:
        self.review_rounds = review_rounds
        self._remaining = remaining

    def key(self, number: int, now_s: float) -> Key:
        return (self._remaining(number), number)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return waiting[0] < running[0]
