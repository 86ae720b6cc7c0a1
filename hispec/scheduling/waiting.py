"""Requests without a row: in which order they go, and where their KV is."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

from cache.blocks import BlockPool

from .policy import Key
from .request import Request

_REFRESHED = 256  # keys computed anew at a look
_Entry = tuple[Key, int, Request]  # the number tells entries of one key apart


class Keeper(Protocol):
    """Keeps the KV of requests that wait without blocks."""

    def save(self, request: Request) -> bool:
        """Copies the KV of the request's computed positions out of its blocks, which go to others next.
        False, and nothing kept, if there is no room or it is cheaper to compute it again."""

    def restore(self, request: Request) -> bool:
        """Copies it into the request's blocks, which cover the same positions again, and keeps it no longer.
        False: it is lost, compute it again."""

    def drop(self, request: Request) -> None:
        """It is not needed any more. Requests of which nothing is kept are passed over."""


class WaitingOrder:
    """The first few of many, without looking at all of them.

    A key that has grown is noticed when its request comes first. One that has shrunk, as those of urgent
    requests do, is noticed in turn: each look computes `_REFRESHED` keys anew. So with n waiting, at most n /
    _REFRESHED looks go by until then.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self.requests: list[Request] = []
        self._key = key
        self._entries: dict[int, _Entry] = {}  # by the request's number, with its key as it was last computed
        self._heap: list[_Entry] = []  # these, and others that are out of date
        self._serials = itertools.count()
        self._next = 0

    def __contains__(self, request: Request) -> bool:
        return request.number in self._entries

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
    """KV of requests without a row: in their blocks (paused), or in host memory (kept). Whoever is in neither
    is computed again."""

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
        if request.number not in self._paused:
            return
        # In this order: whatever is interrupted can be done again.
        if self._keeper is not None and self._keeper.save(request):
            self._kept[request.number] = request.num_computed
            self.num_kept += 1
        self._pool.free(request.table)
        del self._paused[request.number]

    def extend(self, request: Request, num_positions: int) -> bool:
        """Extends its blocks, if need be by those of the paused, of whoever goes last first. False if they do
        not suffice."""
        while not self._pool.extend(request.table, num_positions):
            others = [other for other in self._paused.values() if other is not request]
            if not others:
                return False
            self.give_up(max(others, key=self._key))
        return True

    def resume(self, request: Request, num_positions: int) -> bool | None:
        """Gives a waiting request blocks for so many positions, beside the KV that it has. False, and nothing
        changed for it, if there are not blocks enough; None if it has no KV. Sets num_computed if its KV was
        in host memory."""
        if request.number not in self._paused and request.number not in self._kept:
            return None
        if not self.extend(request, num_positions):
            return False
        if request.number not in self._paused:
            assert self._keeper is not None
            request.num_computed = 0
            is_restored = self._keeper.restore(request)
            self.num_restored += is_restored
            if is_restored:
                request.num_computed = self._kept[request.number]
            else:
                request.gaps.clear()  # prefill writes all KV
            del self._kept[request.number]
        self._paused.pop(request.number, None)
        return True

    def repair(self, waiting: Iterable[Request]) -> None:
        """After an interrupt, for those without a row: blocks that do not hold what is computed are of no
        use, nor are those of who is kept."""
        self._paused.clear()
        for request in waiting:
            is_kept = request.number in self._kept
            if is_kept or self._pool.blocks_for(request.num_computed) > len(request.table.blocks):
                self._pool.free(request.table)
            elif request.table.blocks:
                self.pause(request)

    def drop(self, request: Request) -> None:
        """It has ended."""
        self._paused.pop(request.number, None)
        if self._kept.pop(request.number, None) is not None and self._keeper is not None:
            self._keeper.drop(request)
