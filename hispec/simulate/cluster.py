"""Replicas behind a router, in the order of time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from .distributions import Ints
from .replica import Finished, Replica

_PROGRESS = 1000  # requests between two reports of progress


class Outcomes:
    """When requests arrived, got their first token and finished [requests], in seconds, and on which
    replica."""

    def __init__(self, num: int) -> None:
        self.arrival_s, self.first_token_s, self.finished_s = (np.full(num, np.nan) for _ in range(3))
        self.replica: Ints = np.zeros(num, np.int64)


class Router:
    """Chooses the replica of each request: in turn, or the one with the fewest predicted tokens
    outstanding."""

    def __init__(self, kind: Literal["round_robin", "least_work"], num: int) -> None:
        self._is_round_robin, self._work, self._next = kind == "round_robin", np.zeros(num), 0

    def choose(self) -> int:
        if self._is_round_robin:
            self._next = (self._next + 1) % len(self._work)
            return self._next
        return int(self._work.argmin())

    def add(self, replica: int, tokens: float) -> None:
        self._work[replica] += tokens


class Cluster:
    """The replicas, and those with work ordered by when something happens in them."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, num: int, progress: Callable[[int], object]
    ) -> None:
        self._replicas, self._router, self._progress = replicas, router, progress
        self._outcomes, self._num_finished = Outcomes(num), 0
        self._events: list[tuple[float, int]] = []  # valid: those that still are their replica's end_s
        self._tokens = np.zeros(num)

    def serve_open(self, arrivals: Iterable[float]) -> Outcomes:
        """Requests that arrive at these times, ascending."""
        for request, arrival_s in enumerate(arrivals):
            while self._next_s <= arrival_s:
                self._advance()
            self._arrive(request, arrival_s)
        while self._next_s < math.inf:
            self._advance()
        return self._finish()

    def serve_closed(self, clients: int, think_s: float) -> Outcomes:
        """Requests of so many clients, each of whom sends the next one think_s after its answer."""
        num = len(self._tokens)
        num_sent = min(clients, num)
        coming = [(0.0, request) for request in range(num_sent)]  # a heap
        while coming or self._next_s < math.inf:
            if coming and coming[0][0] < self._next_s:
                arrival_s, request = heapq.heappop(coming)
                self._arrive(request, arrival_s)
                continue
            for finished in self._advance():
                if num_sent < num:
                    heapq.heappush(coming, (finished.finished_s + think_s, num_sent))
                    num_sent += 1
        return self._finish()

    @property
    def _next_s(self) -> float:
        events = self._events
        while events and events[0][0] != self._replicas[events[0][1]].end_s:
            heapq.heappop(events)
        return events[0][0] if events else math.inf

    def _arrive(self, request: int, arrival_s: float) -> None:
        at = self._router.choose()
        replica = self._replicas[at]
        self._outcomes.arrival_s[request], self._outcomes.replica[request] = arrival_s, at
        before = replica.end_s
        self._tokens[request] = replica.arrive(request, arrival_s)
        self._router.add(at, self._tokens[request])
        if replica.end_s != before:
            heapq.heappush(self._events, (replica.end_s, at))

    def _advance(self) -> list[Finished]:
        """Processes the next event, of which there must be one -> requests that finished."""
        at = heapq.heappop(self._events)[1]
        finished = self._replicas[at].advance()
        if self._replicas[at].end_s < math.inf:
            heapq.heappush(self._events, (self._replicas[at].end_s, at))
        for request, first_token_s, finished_s in finished:
            self._outcomes.first_token_s[request] = first_token_s
            self._outcomes.finished_s[request] = finished_s
            self._router.add(at, -self._tokens[request])
            self._num_finished += 1
            if self._num_finished % _PROGRESS == 0:
                self._progress(_PROGRESS)
        return finished

    def _finish(self) -> Outcomes:
        self._progress(self._num_finished % _PROGRESS)
        assert not np.isnan(self._outcomes.finished_s).any(), "a request was lost"
        return self._outcomes
