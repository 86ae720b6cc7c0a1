"""Replicas behind a router, in the order of time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from .distributions import Floats, Ints
from .replica import Finished, Replica

_OFTEN = 1000  # requests between two reports of progress


class Outcomes:
    """When requests arrived, had their first token and were finished [requests], in seconds, and where."""

    def __init__(self, num: int) -> None:
        self.arrival_s, self.first_token_s, self.finished_s = (np.full(num, np.nan) for _ in range(3))
        self.replica: Ints = np.zeros(num, np.int64)


class Router:
    """Says which replica a request goes to."""

    def __init__(self, kind: Literal["round_robin", "least_work"], num: int) -> None:
        self._is_round_robin, self._work, self._next = kind == "round_robin", np.zeros(num), 0

    def choose(self) -> int:
        if self._is_round_robin:
            self._next = (self._next + 1) % len(self._work)
            return self._next
        return int(self._work.argmin())

    def add(self, replica: int, tokens: float) -> None:
        self._work[replica] += tokens


def serve_open(
    replicas: Sequence[Replica], router: Router, arrivals: Floats, progress: Callable[[int], object]
) -> Outcomes:
    """Requests that come at these times [requests], ascending."""
    cluster = _Cluster(replicas, router, len(arrivals), progress)
    for request, arrival_s in enumerate(arrivals.tolist()):
        while cluster.next_s <= arrival_s:
            cluster.advance()
        cluster.arrive(request, arrival_s)
    while cluster.next_s < math.inf:
        cluster.advance()
    return cluster.done()


def serve_closed(
    replicas: Sequence[Replica],
    router: Router,
    num: int,
    clients: int,
    think_s: float,
    progress: Callable[[int], object],
) -> Outcomes:
    """`num` requests of so many clients, each of whom asks again think_s after its answer."""
    cluster = _Cluster(replicas, router, num, progress)
    coming = [
        (0.0, client) for client in range(min(clients, num))
    ]  # a heap of times, and the requests' order
    asked = len(coming)
    while coming or cluster.next_s < math.inf:
        if coming and coming[0][0] < cluster.next_s:
            arrival_s, request = heapq.heappop(coming)
            cluster.arrive(request, arrival_s)
            continue
        for finished in cluster.advance():
            if asked < num:
                heapq.heappush(coming, (finished.finished_s + think_s, asked))
                asked += 1
    return cluster.done()


class _Cluster:
    """The replicas that have something to do, by when something happens in them."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, num: int, progress: Callable[[int], object]
    ) -> None:
        self._replicas, self._router, self._progress = replicas, router, progress
        self._outcomes, self._num_finished = Outcomes(num), 0
        self._events: list[
            tuple[float, int]
        ] = []  # of which those count that still say when their replica's run ends
        self._tokens = np.zeros(num)

    @property
    def next_s(self) -> float:
        events = self._events
        while events and events[0][0] != self._replicas[events[0][1]].end_s:
            heapq.heappop(events)
        return events[0][0] if events else math.inf

    def arrive(self, request: int, arrival_s: float) -> None:
        at = self._router.choose()
        replica = self._replicas[at]
        self._outcomes.arrival_s[request], self._outcomes.replica[request] = arrival_s, at
        before = replica.end_s
        self._tokens[request] = replica.arrive(request, arrival_s)
        self._router.add(at, self._tokens[request])
        if replica.end_s != before:
            heapq.heappush(self._events, (replica.end_s, at))

    def advance(self) -> list[Finished]:
        """The next event. Only while there is one."""
        at = heapq.heappop(self._events)[1]
        finished = self._replicas[at].advance()
        if self._replicas[at].end_s < math.inf:
            heapq.heappush(self._events, (self._replicas[at].end_s, at))
        for each in finished:
            self._outcomes.first_token_s[each.request], self._outcomes.finished_s[each.request] = (
                each.first_token_s,
                each.finished_s,
            )
            self._router.add(at, -self._tokens[each.request])
            self._num_finished += 1
            if self._num_finished % _OFTEN == 0:
                self._progress(_OFTEN)
        return finished

    def done(self) -> Outcomes:
        self._progress(self._num_finished % _OFTEN)
        assert not np.isnan(self._outcomes.finished_s).any(), "a request was lost"
        return self._outcomes
