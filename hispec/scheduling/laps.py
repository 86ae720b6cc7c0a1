"""LAPS-SD: least attained service while a request's acceptance is unknown, shortest remaining time once it is
stable [arXiv 2505.17074]."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from .policy import Job, Key, Service
from .progress import Progress

# a perceptible request sinks to a lower queue only if it is this much beyond the bound, since estimates
# jitter
_SLACK = 1.25


class _Request:
    """`recent`, `before`: acceptance of the last `window` rounds, and of as many before them; None once it is
    perceptible."""

    __slots__ = ("before", "before_sum", "progress", "queue", "recent", "recent_sum", "remaining")

    def __init__(self, job: Job, window: int) -> None:
        self.progress = Progress(job, window)
        self.queue = 0
        self.remaining: float | None = None  # predicted passes; None while it is not perceptible
        self.recent: deque[float] = deque()
        self.before: deque[float] = deque()
        self.recent_sum = self.before_sum = 0.0


class Laps:
    """Requests are *non-perceptible* at first: they sink through queues as they consume service, and the
    least served goes first within a queue. One becomes *perceptible*, for good, when the mean acceptance
    (accepted / drafted, 0 in a round without drafts) of its last `window` rounds and of as many before them
    differ by less than `tolerance`. From then on it stands in the queue into whose bounds its remaining
    passes fall, (predicted length - generated) / own recent tokens per pass, and is ordered by them. Attained
    and remaining passes of one queue compare as they are. A higher queue displaces a lower one; within a
    queue nobody displaces anybody.

    The paper gives neither queues, nor the rule of stability, nor what the two kinds are to each other in a
    queue: these are our choice.

    bounds   passes over the whole model at which each queue but the last ends, growing; of attained and of
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
            request.queue = len(self._bounds)  # it may rise to any, and sinks to none
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
        """Takes the acceptance of these rounds, all alike if they are several."""
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
