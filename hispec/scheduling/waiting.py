"""Requests without a row, in a policy's order: a priority queue whose keys may change."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from .policy import Key
from .request import Request

_REFRESHED = 256  # keys that one `refresh` computes anew
_Entry = tuple[Key, int, Request]  # the serial number orders entries of equal keys


class WaitingOrder:
    """Finds the first few of many waiting requests without computing all keys.

    A key that has grown is noticed when its request comes first. One that has shrunk, as those of urgent
    requests do, is noticed by `refresh`, which computes `_REFRESHED` keys anew, in turn: with n waiting,
    after at most n / _REFRESHED calls.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self.requests: list[Request] = []
        self._key = key
        self._entries: dict[int, _Entry] = {}  # by the request's number, with its key as last computed
        self._heap: list[_Entry] = []  # these, and others that are out of date
        self._serials = itertools.count()
        self._next = 0

    def __contains__(self, request: Request) -> bool:
        return request.number in self._entries

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._push(request, self._key(request))

    def remove(self, request: Request) -> None:
        at = self.requests.index(request)
        del self.requests[at]
        self._next -= at < self._next  # no other one loses its turn
        del self._entries[request.number]

    def refresh(self) -> None:
        """Computes the next `_REFRESHED` keys anew; O(_REFRESHED log n)."""
        if len(self._heap) > 2 * len(self.requests) + _REFRESHED:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        start = self._next if self._next < len(self.requests) else 0
        self._next = start + _REFRESHED
        for request in self.requests[start : self._next]:
            key = self._key(request)
            if key != self._entries[request.number][0]:
                self._push(request, key)

    def first(self) -> tuple[Key, Request]:
        """The request with the least key; there must be one."""
        while True:
            entry = self._heap[0]
            key, _, request = entry
            if self._entries.get(request.number) is not entry:
                heapq.heappop(self._heap)
            elif (current := self._key(request)) == key:
                return key, request
            else:
                heapq.heappop(self._heap)
                self._push(request, current)
                if current < key:
                    return current, request

    def heads(self, count: int) -> list[tuple[Key, Request]]:
        """The first `count` requests in order, or all if there are fewer."""
        found = []
        for _ in range(min(count, len(self.requests))):
            self.first()
            found.append(heapq.heappop(self._heap))
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [(key, request) for key, _, request in found]

    def _push(self, request: Request, key: Key) -> None:
        entry = self._entries[request.number] = key, next(self._serials), request
        heapq.heappush(self._heap, entry)
