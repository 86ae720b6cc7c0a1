"""KV blocks of requests without a row: kept, offloaded to host memory, or freed and computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Protocol

from cache.blocks import BlockPool, BlockTable

from .policy import Key
from .request import Request


class KVOffload(Protocol):
    """Moves the KV of waiting requests to host memory and back; the engine's is engine/kv_offload.py."""

    def save(self, request: Request) -> bool:
        """Copies the KV of the request's computed positions out of its blocks, which are freed next. False,
        and nothing saved, if there is no room or it is cheaper to compute it again."""

    def restore(self, request: Request) -> bool:
        """Copies it into the request's blocks, which cover the same positions again, and forgets it. False:
        it is lost and must be computed again."""

    def drop(self, request: Request) -> None:
        """Forgets it. Does nothing for requests of which nothing is saved."""


class ComingBlocks:
    """Whole blocks of prompts that a step computes, and that the prefix cache has after it."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        # (what is before a block, its tokens) -> a number for what is before the next. Those of the pool are
        # not below 0.
        self._after: dict[tuple[int, tuple[int, ...]], int] = {}

    def add(self, request: Request, end: int) -> None:
        """A step computes the positions of a request up to `end`."""
        before = request.table.prefix_id
        for tokens in self._blocks(request, end):
            before = self._after.setdefault((before, tokens), -1 - len(self._after))

    def num_shared(self, request: Request) -> int:
        """Positions that a request, with nothing computed beyond what is published of it, will find."""
        num_blocks, before = 0, request.table.prefix_id
        for tokens in self._blocks(request, len(request.token_ids) - 1):
            if (before := self._after.get((before, tokens), 0)) == 0:
                break
            num_blocks += 1
        return num_blocks * self._size

    def _blocks(self, request: Request, end: int) -> Iterator[tuple[int, ...]]:
        for start in range(request.table.num_published * self._size, end - self._size + 1, self._size):
            yield tuple(request.token_ids[start : start + self._size])


class KVBlocks:
    """Gives requests their KV blocks, if need be those of *paused* requests: ones without a row that still
    hold blocks. A paused request that loses its blocks is *offloaded*, or its KV is computed again.

    num_kept, num_restored   requests whose KV was offloaded, and was restored
    """

    def __init__(
        self,
        pool: BlockPool,
        offload: KVOffload | None,
        key: Callable[[Request], Key],
        enable_prefix_caching: bool,
    ) -> None:
        self.num_kept = self.num_restored = 0
        self._pool, self._offload, self._key = pool, offload, key
        self._enable_prefix_caching = enable_prefix_caching
        self._paused: dict[int, Request] = {}
        self._offloaded: dict[int, int] = {}  # positions in host memory, by the request's number

    @property
    def paused(self) -> list[Request]:
        return list(self._paused.values())

    def num_available(self, giving: Iterable[Request], kept: Set[int]) -> int:
        """Blocks that there are for others once `giving` have given up theirs, all but the `kept` ones. Those
        of a prefix that somebody else holds, too, are not among them."""
        given = self._pool.held_alone(request.table for request in giving)
        return self._pool.num_available + len(given - kept)

    def first_blocks(self, request: Request) -> set[int]:
        """Blocks that a waiting request would begin with and that are held already: its own, or those of a
        prefix that others have."""
        if self.has_some(request):
            return set(request.table.blocks)
        if not self._enable_prefix_caching or request.is_suspect:
            return set()
        return self._pool.find_held(request.token_ids[:-1])  # as `admit` looks for them

    def has_some(self, request: Request) -> bool:
        """Whether a waiting request has KV of its own, in blocks or in host memory."""
        return request.number in self._paused or request.number in self._offloaded

    def pause(self, request: Request) -> None:
        """Keeps the blocks of what is computed for a request that has lost its row."""
        self._pool.truncate(request.table, request.num_computed)
        if request.table.blocks:
            self._paused[request.number] = request

    def evict(self, request: Request) -> None:
        """Takes the blocks of a paused request and offloads its KV if it can; does nothing for others."""
        if request.number not in self._paused:
            return
        # In this order an interrupt anywhere leaves a state from which all of it can be done again.
        if self._offload is not None and self._offload.save(request):
            self._offloaded[request.number] = request.num_computed
            self.num_kept += 1
        self._pool.free(request.table)
        del self._paused[request.number]

    def extend(self, request: Request, num_positions: int) -> bool:
        """Extends a request's blocks to so many positions, evicting paused requests as needed, the last in
        the policy's order first. False if all of theirs do not suffice."""
        while not self._pool.extend(request.table, num_positions):
            others = [other for other in self._paused.values() if other is not request]
            if not others:
                return False
            self.evict(max(others, key=self._key))
        return True

    def admit(self, request: Request, num_positions: int) -> int | None:
        """Gives a waiting request blocks for so many positions and the KV that there is of it: its own, or
        that of the prefix cache -> positions found in the cache. None, and the request holds what it held, if
        there are not enough blocks."""
        if self.has_some(request):
            return 0 if self._resume(request, num_positions) else None
        self._pool.free(request.table)  # holds blocks only after an interrupt
        table, num_cached = BlockTable(), 0
        if self._enable_prefix_caching and not request.is_suspect:
            # The last token is never taken from the cache: a round begins by processing it.
            table, num_cached = self._pool.allocate(request.token_ids[:-1])
        # Both at once: after an interrupt, blocks beside another length would pass for computed.
        request.table, request.num_computed = table, num_cached
        if not (self._has_room(request, num_positions) and self.extend(request, num_positions)):
            self._pool.free(request.table)
            return None
        request.gaps.clear()  # prefill writes all KV, and published blocks have no gaps
        if request.admitted_s is None:  # later its own blocks are found, too
            request.num_cached = num_cached
        return num_cached

    def find_more(self, request: Request) -> int:
        """Gives a request whose prompt is being computed what the prefix cache has got of it since it was
        admitted, in place of blocks of its own that hold nothing yet -> positions found."""
        before, table = request.num_computed, request.table
        if not self.shares(request) or before != table.num_published * self._pool.block_size:
            return 0
        table, num_computed, replaced = self._pool.find_more(table, request.token_ids[:-1])
        request.table, request.num_computed = table, num_computed  # both at once, as in `admit`
        self._pool.give_back(replaced)
        if request.num_output == 0:
            request.num_cached += max(0, num_computed - max(before, request.most_computed))
            request.most_computed = max(request.most_computed, num_computed)  # and is not counted again
        return num_computed - before

    def coming(self) -> ComingBlocks:
        """For a step, which computes nothing yet."""
        return ComingBlocks(self._pool.block_size)

    def shares(self, request: Request) -> bool:
        """Whether what is computed of a request gets into the prefix cache."""
        return self._enable_prefix_caching and not request.is_suspect and not request.gaps

    def repair(self, waiting: Iterable[Request]) -> None:
        """After an interrupt, for the requests without a row: frees blocks that do not hold all that is
        computed, and those of offloaded requests."""
        self._paused.clear()
        for request in waiting:
            is_offloaded = request.number in self._offloaded
            if is_offloaded or self._pool.blocks_for(request.num_computed) > len(request.table.blocks):
                self._pool.free(request.table)
            elif request.table.blocks:
                self.pause(request)

    def drop(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self._paused.pop(request.number, None)
        self._offloaded.pop(request.number, None)
        if self._offload is not None:  # whatever is known here: an interrupt may have come in between
            self._offload.drop(request)

    def _has_room(self, request: Request, num_positions: int) -> bool:
        """Whether there are blocks for it, if all other paused requests were evicted: else none is, for
        nothing."""
        num_missing = self._pool.blocks_for(num_positions) - len(request.table.blocks)
        if num_missing <= self._pool.num_available:
            return True
        others = [other for other in self._paused.values() if other is not request]
        return num_missing <= self.num_available(others, set())

    def _resume(self, request: Request, num_positions: int) -> bool:
        """Extends the blocks of a paused or offloaded request and restores its KV. False, and the request
        unchanged, if there are not enough blocks."""
        if not (self._has_room(request, num_positions) and self.extend(request, num_positions)):
            return False
        if request.number not in self._paused:
            assert self._offload is not None
            request.num_computed = 0
            is_restored = self._offload.restore(request)
            self.num_restored += is_restored
            if is_restored:
                request.num_computed = self._offloaded[request.number]
            else:
                request.gaps.clear()  # prefill writes all KV
            del self._offloaded[request.number]
        self._paused.pop(request.number, None)
        return True
