"""Requests without a row: in which order they go, and where their KV is."""
from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from cache.blocks import BlockPool

from ..request import Request
from .keeper import Keeper
from .policy import Key

_REFRESHED = 256  # keys computed anew at a look
_Entry = tuple[Key, int, Request]  # the number tells entries of one key apart


class WaitingOrder:
    """The first few of many, without looking at all of them.

    A key that has grown is noticed when its request comes first. One that has shrunk, as those of urgent requests do, is noticed in turn: each look
    computes `_REFRESHED` keys anew. So with n waiting, at most n / _REFRESHED looks go by until then.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self.requests: list[Request] = []
        self._key = key
        self._entries: dict[int, _Entry] = {}  # by the request's number, with its key as it was last computed
        self._heap: list[_Entry] = []  # these, and others that are out of date
        self._serials = itertools.count()
        self._next = 0

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._push(request, self._key(request))

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
        del self._entries[request.number]

    def refresh(self) -> None:
        """A look."""
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
        """Who goes first, of at least one."""
        while True:
            entry = self._heap[0]
            key, _, request = entry
            if self._entries.get(request.number) is not entry:
                heapq.heappop(self._heap)
            elif (now := self._key(request)) == key:
                return key, request
            else:
                heapq.heappop(self._heap)
                self._push(request, now)
                if now < key:
                    return now, request

    def heads(self, count: int) -> list[tuple[Key, Request]]:
        """The first `count`, or all, in order."""
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


class WaitingKV:
    """KV of requests without a row: in their blocks (paused), or in host memory (kept). Whoever is in neither is computed again."""

    def __init__(self, pool: BlockPool, keeper: Keeper | None, key: Callable[[Request], Key]) -> None:
        self.num_kept = self.num_restored = 0  # requests whose KV went to host memory, and came back
        self._pool, self._keeper, self._key = pool, keeper, key
        self._paused: dict[int, Request] = {}
        self._kept: dict[int, int] = {}  # positions in host memory, by the request's number

    @property
    def num_blocks(self) -> int:
        """That the paused hold."""
        return sum(len(request.table.blocks) for request in self._paused.values())

    def pause(self, request: Request) -> None:
        """It has left its row, and holds on to the blocks of what is computed."""
        self._pool.truncate(request.table, request.num_computed)
        if request.table.blocks:
            self._paused[request.number] = request

    def give_up(self, request: Request) -> None:
        """Takes the blocks of a request without a row, if it has any."""
        if self._paused.pop(request.number, None) is None:
            return
        if self._keeper is not None and self._keeper.save(request):
            self._kept[request.number] = request.num_computed
            self.num_kept += 1
        self._pool.free(request.table)

    def extend(self, request: Request, num_positions: int) -> bool:
        """Extends its blocks, if need be by those of the paused, of whoever goes last first. False if they do not suffice."""
        while not self._pool.extend(request.table, num_positions):
            others = [other for other in self._paused.values() if other is not request]
            if not others:
                return False
            self.give_up(max(others, key=self._key))
        return True

    def resume(self, request: Request, num_positions: int) -> bool | None:
        """Gives a waiting request blocks for so many positions, beside the KV that it has. False, and nothing changed for it, if there are not
        blocks enough; None if it has no KV. Sets num_computed if its KV was in host memory."""
        if request.number not in self._paused and request.number not in self._kept:
            return None
        if not self.extend(request, num_positions):
            return False
        if self._paused.pop(request.number, None) is None:
            num_kept = self._kept.pop(request.number)
            assert self._keeper is not None
            is_restored = self._keeper.restore(request)
            self.num_restored += is_restored
            request.num_computed = num_kept if is_restored else 0
            if not is_restored:
                request.gaps.clear()  # prefill writes all KV
        return True

    def drop(self, request: Request) -> None:
        """It has ended."""
        self._paused.pop(request.number, None)
        if self._kept.pop(request.number, None) is not None and self._keeper is not None:
            self._keeper.drop(request)
