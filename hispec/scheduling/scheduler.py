"""Scheduler: who is in which row, with which blocks, and what one step computes."""
from __future__ import annotations

from dataclasses import dataclass, field

from cache.blocks import BlockPool, BlockTable

from ..request import Request
from .policy import Policy


@dataclass(frozen=True)
class Chunk:
    """Prompt positions [start, end) of a request, to be computed in this step."""

    request: Request
    start: int
    end: int


@dataclass
class Step:
    """What one step computes: prefill chunks, then a round over rows that may process `limits[row]` positions each."""

    chunks: list[Chunk] = field(default_factory=list)
    limits: dict[int, int] = field(default_factory=dict)


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse, and preemption by recompute.

    Rows are kept compact: running[i] is in row i. When a request leaves, the last one moves into its row.
    """

    def __init__(self, pool: BlockPool, policy: Policy, max_num_seqs: int, max_prefill_tokens: int, enable_prefix_caching: bool) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = self.num_cached_tokens = 0
        self._pool, self._policy = pool, policy
        self._max_num_seqs, self.max_prefill_tokens = max_num_seqs, max_prefill_tokens
        self._enable_prefix_caching = enable_prefix_caching

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a finished or aborted request out, with its blocks."""
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._leave_row(request)
        self._pool.free(request.table)

    def schedule(self, window: int) -> Step:
        """Plans one step in which a round may process up to `window` positions per row.

        Rounds come first: running requests get the blocks that they may need, if need be those of others. What waits is
        admitted with what is left, and never in a step that had to preempt.
        """
        step = Step()
        preempted_before = self.num_preemptions
        for request in sorted(self.running, key=lambda request: request.number):
            if request.row is not None:
                self._make_room(request, window)
        if self.num_preemptions == preempted_before:
            self._admit(window)
        budget = self.max_prefill_tokens
        for request in sorted(self.running, key=lambda request: request.number):
            assert request.row is not None
            if not request.is_ready and budget > 0:
                end = min(len(request.token_ids) - 1, request.num_computed + budget)
                step.chunks.append(Chunk(request, request.num_computed, end))
                budget -= end - request.num_computed
        finishing = {chunk.request.row for chunk in step.chunks if chunk.end == len(chunk.request.token_ids) - 1}
        for row, request in enumerate(self.running):
            # A prompt whose last chunk is computed in this step joins its round at once: it has the blocks.
            if request.is_ready or row in finishing:
                step.limits[row] = request.round_limit(window)
                assert len(request.table.blocks) * self._pool.block_size >= len(request.token_ids) - 1 + step.limits[row]
        return step

    def commit(self, request: Request, num_computed: int, release: bool) -> None:
        """The only place where a request's computed length grows: sets it, and offers full blocks to the prefix cache.
        `release`, after a round, gives back the blocks that it had reserved beyond."""
        request.num_computed = num_computed
        if self._enable_prefix_caching and not request.drafter_failed:  # its blocks may lack a draft model's KV
            self._pool.publish(request.table, request.token_ids, num_computed)
        if release:
            self._pool.truncate(request.table, num_computed)

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits for whom there is a row."""
        return bool(self.waiting) and len(self.running) < self._max_num_seqs

    def shrink(self, max_num_seqs: int) -> None:
        """From now on at most so many rows; who is beyond them is preempted."""
        self._max_num_seqs = max_num_seqs
        while len(self.running) > max_num_seqs:
            self._preempt(max(self.running, key=lambda request: self._policy.key(request.number, 0.0)))

    def reserve(self, request: Request, num_positions: int) -> bool:
        """Extends the request's blocks to so many positions, if that takes nobody else's."""
        return self._pool.extend(request.table, num_positions)

    def tables(self) -> list[BlockTable]:
        """Of all live requests, for integrity checks."""
        return [request.table for request in (*self.waiting, *self.running)]

    def _make_room(self, request: Request, window: int) -> None:
        """Extends the request's blocks for one round, preempting others (or, last of all, itself).

        One that is still prefilling was admitted with the blocks; but an interrupt within a step may have left any with
        tokens that are not computed yet, so all are looked at.
        """
        needed = len(request.token_ids) - 1 + request.round_limit(window)
        while not self._pool.extend(request.table, needed):
            victim = max(self.running, key=lambda request: self._policy.key(request.number, 0.0))
            self._preempt(victim)
            if victim is request:
                return

    def _preempt(self, request: Request) -> None:
        self._leave_row(request)
        self._pool.free(request.table)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.append(request)

    def _admit(self, window: int) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            request = min(self.waiting, key=lambda request: self._policy.key(request.number, 0.0))
            num_cached = 0
            if self._enable_prefix_caching:
                # The last token is never taken from the cache: a round begins by processing it.
                request.table, num_cached = self._pool.allocate(request.token_ids[:-1])
            if not self._pool.extend(request.table, len(request.token_ids) - 1 + request.round_limit(window)):
                self._pool.free(request.table)
                return
            self.waiting.remove(request)
            request.num_computed = num_cached
            request.num_cached = num_cached
            self.num_cached_tokens += num_cached
            request.row = len(self.running)
            self.running.append(request)

    def _leave_row(self, request: Request) -> None:
        row, request.row = request.row, None
        assert row is not None
        last = self.running.pop()
        if last is not request:
            self.running[row] = last
            last.row = row
