"""LAPS-SD [Li, Chen and Li, IJCAI 2025, arXiv 2505.17074]: least attained service first while a request's
acceptance rate is unknown, shortest remaining time first once it is stable."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from .policy import Job, Key, Service
from .progress import Progress

_SLACK = 1.25  # hysteresis: a perceptible request is demoted only this far beyond a queue's bound


class _Request:
    """recent, before: acceptance in the last `window` rounds, and in the `window` rounds before them; empty
    once the request is perceptible."""

    __slots__ = ("before", "before_sum", "progress", "queue", "recent", "recent_sum", "remaining")

    def __init__(self, job: Job, window: int) -> None:
        self.progress = Progress(job, window)
        self.queue = 0
        self.remaining: float | None = None  # predicted passes; None: not perceptible
        self.recent: deque[float] = deque()
        self.before: deque[float] = deque()
        self.recent_sum = self.before_sum = 0.0


class Laps:
    """A request is *non-perceptible* at first: it is demoted through the queues as it consumes service, and
    within a queue the least served goes first. It becomes *perceptible*, for good, when its mean acceptance
    (accepted / drafted, 0 in a round without drafts) over the last `window` rounds and over the `window`
    rounds before them differ by less than `tolerance`. From then on its queue is the one into whose bounds
    its remaining passes fall, (predicted length - generated) / own recent tokens per pass, and it is ordered
    by them. Within a queue attained and remaining passes are compared as they are. A higher queue preempts a
    lower one; requests of one queue do not preempt each other.

    The paper specifies neither the number and bounds of queues, nor the rule of stability, nor how the two
    kinds of requests compare within a queue: these are our choice.

    bounds   passes over the whole model at which each queue but the last ends, ascending; of attained and of
             remaining service alike
    """

    preempts = True

    def __init__(self, bounds: tuple[float, ...], window: int, tolerance: float, review_rounds: int) -> None:
        self.review_rounds = review_rounds
        self._bounds, self._window, self._tolerance = bounds, window, tolerance
        self._requests: dict[int, _Request] = {}

    def add(self, job: Job) -> None:
        self._requests[job.number] = _Request(job, self._window)

    def served(self, number: int, service: Service) -> None:
        request = self._requests[number]
        request.progress.served(service)
        if service.rounds and request.remaining is None and self._becomes_stable(request, service):
            request.queue = len(self._bounds)  # the last: no estimate can demote it
            request.recent.clear()
            request.before.clear()
            request.remaining = 0.0
        if request.remaining is None:
            request.queue = bisect_right(self._bounds, request.progress.attained)
        else:
            request.remaining = request.progress.remaining_passes(1.0)
            queue = bisect_right(self._bounds, request.remaining)
            if queue > request.queue:
                queue = max(request.queue, bisect_right(self._bounds, request.remaining / _SLACK))
            request.queue = queue

    def remove(self, number: int) -> None:
        self._requests.pop(number, None)

    def key(self, number: int, now_s: float) -> Key:
        request = self._requests[number]
        return (
            request.queue,
            request.progress.attained if request.remaining is None else request.remaining,
            number,
        )

    def displaces(self, waiting: Key, running: Key) -> bool:
        return waiting[0] < running[0]

    def is_perceptible(self, number: int) -> bool:
        return self._requests[number].remaining is not None

    def _becomes_stable(self, request: _Request, service: Service) -> bool:
        """Records the acceptance of these rounds -> whether it is stable now. Several rounds count as rounds
        of the same acceptance."""
        acceptance = service.accepted / service.drafted if service.drafted else 0.0
        for _ in range(min(service.rounds, 2 * self._window)):
            request.recent.append(acceptance)
            request.recent_sum += acceptance
            if len(request.recent) > self._window:
                oldest = request.recent.popleft()
                request.recent_sum -= oldest
                request.before.append(oldest)
                request.before_sum += oldest
            if len(request.before) > self._window:
                request.before_sum -= request.before.popleft()
        return (
            len(request.before) == self._window
            and abs(request.recent_sum - request.before_sum) < self._tolerance * self._window
        )
