"""Multi-level feedback queues: least attained service first, approximately."""

from __future__ import annotations

import itertools
from bisect import bisect_right

from .policy import Job, Key, Service


def queue_bounds(num_queues: int, first_quantum: float, growth: float) -> tuple[float, ...]:
    """Attained service at which each queue but the last ends: cumulative sums of geometric quanta."""
    return tuple(itertools.accumulate(first_quantum * growth**queue for queue in range(num_queues - 1)))


class MultiLevelFeedback:
    """Requests start in the highest queue and are demoted to the next when they have used up a queue's
    quantum. Within a queue they run in order of arrival; a higher queue preempts a lower one.

    bounds   attained passes over the whole model at which each queue but the last ends, ascending
    """

    preempts = True

    def __init__(self, bounds: tuple[float, ...], review_rounds: int) -> None:
        self.review_rounds = review_rounds
        self._bounds = bounds
        self._attained: dict[int, float] = {}

    def add(self, job: Job) -> None:
        self._attained[job.number] = 0.0

    def served(self, number: int, service: Service) -> None:
        self._attained[number] += service.passes

    def remove(self, number: int) -> None:
        self._attained.pop(number, None)

    def key(self, number: int, now_s: float) -> Key:
        return (bisect_right(self._bounds, self._attained[number]), number)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return waiting[0] < running[0]
