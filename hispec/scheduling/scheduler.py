"""Scheduler: which requests have a row of the batch and KV blocks, and what one step computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cache.blocks import BlockPool, BlockTable

from .kv_blocks import KVBlocks, KVOffload
from .lengths import LengthPredictor, OnlineLengths
from .policy import IgnoresService, Job, Key, Policy, Service
from .request import Request
from .waiting import WaitingOrder


@dataclass(frozen=True)
class Chunk:
    """Prompt positions [start, end) of a request, to be computed in this step."""

    request: Request
    start: int
    end: int


@dataclass
class Step:
    """What one step computes: prefill chunks, then a round in which each row of `limits` may process so many
    positions."""

    chunks: list[Chunk] = field(default_factory=list)
    limits: dict[int, int] = field(default_factory=dict)


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching, and preemption in the order of a policy.

    Rows are kept compact: running[i] is in row i. When a request leaves, the last one moves into its row.

    A waiting request is new; *paused*: it still holds its blocks and resumes at once in a free row;
    *offloaded*: its KV is in host memory; or its KV is to be computed again. A request that is displaced by
    another, or by fewer rows, is paused. When blocks run out, paused requests lose theirs, the last in order
    first, then running requests are preempted likewise. Their KV is offloaded or computed again.

    Admission never skips ahead: if the first in order cannot have its blocks, the next is not admitted in its
    place because it needs fewer, or a large request would wait forever. No row stays empty for that while
    paused requests hold blocks: these are taken.
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        max_num_seqs: int,
        max_prefill_tokens: int,
        enable_prefix_caching: bool,
        *,
        predictor: LengthPredictor | None = None,
        offload: KVOffload | None = None,
    ) -> None:
        """offload: None = the KV of requests that lose their blocks is always computed again."""
        self.running: list[Request] = []
        self.num_preemptions = self.num_cached_tokens = self.num_queried_tokens = 0
        self._pool, self._policy = pool, policy
        # Whether `served` does anything: it is called for every row and round.
        self.counts_service = getattr(type(policy), "served", None) is not IgnoresService.served
        self._max_num_seqs, self.max_prefill_tokens = max_num_seqs, max_prefill_tokens
        self._sizes = max_num_seqs, max_prefill_tokens  # as they are configured
        self._enable_prefix_caching = enable_prefix_caching
        self._predictor: LengthPredictor = predictor or OnlineLengths()
        self._waiting = WaitingOrder(self._key)
        self.kv = KVBlocks(pool, offload, self._key, enable_prefix_caching)
        self._new: set[int] = set()  # numbers of requests added since the last review
        self._rounds_since_review, self._now_s = 0, 0.0

    @property
    def waiting(self) -> list[Request]:
        """Requests without a row, in no order."""
        return self._waiting.requests

    def add(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        predict = self._predictor.predictor(prompt, request.max_tokens)
        self._policy.add(Job(request.number, request.arrival_s, len(prompt), request.max_tokens, predict))
        self._waiting.add(request)
        if self._policy.preempts:
            self._new.add(request.number)

    def remove(self, request: Request) -> None:
        """Removes a finished or aborted request and frees its blocks."""
        self._pool.free(request.table)
        self._new.discard(request.number)
        self.kv.drop(request)
        if request.finish_reason in ("stop", "length"):
            self._predictor.finished(request.prompt_token_ids, request.num_output)
        if request.row is not None:
            self._leave_row(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self._policy.remove(request.number)

    def served(self, request: Request, service: Service) -> None:
        """Tells the policy what service rounds, or prefill, gave a request that is not removed yet."""
        self._policy.served(request.number, service)

    def schedule(self, window: int, now_s: float = 0.0) -> Step:
        """Plans one step whose round may process up to `window` positions per row. now_s: the time, on the
        clock of arrival times.

        If the policy preempts, waiting requests first displace running ones. Then running requests get the
        blocks that the round may need, if need be those of others. Waiting requests are admitted with what is
        left, but never in a step that had to preempt for blocks.
        """
        self._now_s = now_s
        if self.may_admit:
            self._waiting.refresh()
        if self._is_review_due:
            self._review(window)
        self._rounds_since_review += 1
        preempted_before = self.num_preemptions
        for request in self._in_order(self.running):
            if request.row is not None:
                self._make_room(request, window)
        if self.num_preemptions == preempted_before:
            self._admit(window)
        step = Step(self._plan_chunks())
        # A prompt whose last chunk is computed in this step joins its round at once: it has the blocks.
        joining = {
            chunk.request.row for chunk in step.chunks if chunk.end == len(chunk.request.token_ids) - 1
        }
        for row, request in enumerate(self.running):
            if request.is_ready or row in joining:
                step.limits[row] = request.round_limit(window)
                assert len(request.table.blocks) >= self._pool.blocks_for(request.round_end(window))
        return step

    def schedule_ahead(self, window: int, now_s: float = 0.0) -> list[Chunk] | None:
        """As `schedule`, while a round is in flight whose requests have the blocks of their next one:
        admission and chunks alone. None if the host has to read that round first, since a review is due."""
        if self._is_review_due:
            return None
        self._now_s = now_s
        if self.may_admit:
            self._waiting.refresh()
            self._admit(window)
        return self._plan_chunks()

    def fit(self, step: Step, window: int, num_rounds: int = 1) -> None:
        """Changes the window of the step's round, as far as there are free blocks. num_rounds: rounds that
        run together at most, each of which takes a window's places at most."""
        for rounds in sorted({1, num_rounds}):  # no row's second before another's first
            for row in step.limits:
                request = self.running[row]
                start, room = len(request.token_ids) - 1, request.max_tokens - request.num_output
                limit = min(rounds * request.cap(window), room)
                if not self._pool.extend(request.table, start + limit):
                    limit = min(limit, len(request.table.blocks) * self._pool.block_size - start)
                step.limits[row] = limit

    @property
    def rounds_until_review(self) -> int:
        """How many rounds may run in the step that was scheduled last before the policy is to review who
        runs; at least 1."""
        if not (self._policy.preempts and self.waiting):
            return 1 << 62
        return max(1, 1 + self._policy.review_rounds - self._rounds_since_review)

    def ran_on(self, num_rounds: int = 1) -> None:
        """Counts rounds that were launched without `schedule`, over the same rows as the last."""
        self._rounds_since_review += num_rounds

    def commit(self, request: Request, num_computed: int, release: bool) -> None:
        """Sets a request's computed length, which grows nowhere else, and publishes its full blocks to the
        prefix cache. release: after a round, whether to free the blocks reserved beyond that length."""
        request.num_computed = num_computed
        request.most_computed = max(request.most_computed, num_computed)
        if self._enable_prefix_caching and not request.is_suspect:
            # Only blocks that lack nobody's KV: of a drafter that failed, for example.
            num_complete = min(num_computed, *request.gaps.values()) if request.gaps else num_computed
            self._pool.publish(request.table, request.token_ids, num_complete)
        if release:
            self._pool.truncate(request.table, num_computed)

    @property
    def may_admit(self) -> bool:
        """Whether a waiting request may get a row now: then the next round needs `schedule`."""
        return bool(self.waiting) and (len(self.running) < self._max_num_seqs or self._is_review_due)

    def shrink(self, max_num_seqs: int) -> None:
        """Lowers the number of rows, and pauses the requests beyond them, the last in order."""
        self._max_num_seqs = max_num_seqs
        for request in self._in_order(self.running)[max_num_seqs:]:
            self._pause(request)

    def widen(self) -> None:
        """Takes back what `shrink`, and whoever set max_prefill_tokens, have lowered."""
        self._max_num_seqs, self.max_prefill_tokens = self._sizes

    @property
    def is_reduced(self) -> bool:
        return (self._max_num_seqs, self.max_prefill_tokens) != self._sizes

    def regain(self) -> None:
        """Doubles what was lowered, up to what it was at first."""
        self._max_num_seqs = min(2 * self._max_num_seqs, self._sizes[0])
        self.max_prefill_tokens = min(2 * self.max_prefill_tokens, self._sizes[1])

    def start_over(self, request: Request) -> None:
        """Has a running request wait for a row, and its KV computed again: what there is of it is not to be
        trusted, here and in the prefix cache, which it stays out of."""
        request.is_suspect = True
        self._pool.retract(request.table)
        self._pool.free(request.table)
        request.num_computed = request.num_cached = 0
        self._leave_row(request)
        self._waiting.add(request)

    def reserve(self, request: Request, num_positions: int) -> bool:
        """Extends the request's blocks to so many positions, from blocks that no request holds, of which
        those of cached prefixes come last. False if too few."""
        return self._pool.extend(request.table, num_positions)

    def tables(self) -> list[BlockTable]:
        """Block tables of all live requests, for integrity checks."""
        return [request.table for request in (*self.waiting, *self.running)]

    def repair(self, live: Iterable[Request]) -> None:
        """Restores the invariants after an interrupt anywhere in here: exactly the live requests have a row
        or wait, and each has blocks or is offloaded, not both. May be interrupted and called again."""
        wanted = {request.number: request for request in live}
        self._pool.repair(request.table for request in wanted.values())
        for request in {*self.running, *self.waiting} - set(wanted.values()):
            request.table = BlockTable()  # whose blocks the pool has back
            self.kv.drop(request)
            self._policy.remove(request.number)
        rows = dict.fromkeys(self.running)
        self.running = [request for request in rows if request.number in wanted and request.row is not None]
        for row, request in enumerate(self.running):
            request.row = row
        waiting = [request for request in wanted.values() if request not in self.running]
        order = WaitingOrder(self._key)
        for request in waiting:
            request.row = None
            order.add(request)
        self._waiting = order
        self.kv.repair(waiting)
        self._new &= set(wanted)

    # ---- order ----

    def _key(self, request: Request) -> Key:
        return self._policy.key(request.number, self._now_s)

    def _in_order(self, requests: Iterable[Request]) -> list[Request]:
        return sorted(requests, key=self._key)

    @property
    def _is_review_due(self) -> bool:
        if not self._policy.preempts or not self.waiting:
            return False
        return bool(self._new) or self._rounds_since_review >= self._policy.review_rounds

    def _review(self, window: int) -> None:
        """Pauses running requests, the last in order first, for waiting ones that displace them.

        Between regular reviews only newly added requests may displace others. So there are at most as many
        such preemptions as rows every review_rounds rounds, plus, for each arrival, those that its row and
        blocks take, however estimates change.
        """
        is_regular = self._rounds_since_review >= self._policy.review_rounds
        if is_regular:
            self._rounds_since_review = 0
        new, self._new = self._new, set()
        rest = self._in_order(self.running)
        num_rows = self._max_num_seqs - len(rest)
        # Whose blocks can be taken; which of them stay, since those who get in begin with them; how many
        # blocks these need besides, and running ones lack for a round.
        giving, kept = self.kv.paused, set[int]()
        num_needed = sum(self._num_missing(request, window) for request in rest)
        for key, request in self._waiting.heads(self._max_num_seqs):
            num_rows -= 1
            first = self.kv.first_blocks(request)
            kept |= first
            num_needed += self._pool.blocks_for(request.round_end(window)) - len(first)
            victims: list[Request] = []
            while (
                not (fits := num_rows >= 0 and num_needed <= self.kv.num_available(giving, kept))
                and rest
                and self._policy.displaces(key, self._key(rest[-1]))
            ):
                victim = rest.pop()
                victims.append(victim)
                giving.append(victim)
                num_rows += 1
                num_needed -= self._num_missing(victim, window)
            if not fits or (victims and not is_regular and request.number not in new):
                return  # neither this request nor any after it is admitted
            for victim in victims:
                self._pause(victim)

    def _num_missing(self, request: Request, window: int) -> int:
        """Blocks that a request lacks for a round."""
        return max(0, self._pool.blocks_for(request.round_end(window)) - len(request.table.blocks))

    # ---- rows and blocks ----

    def _plan_chunks(self) -> list[Chunk]:
        """What a step computes of prompts. One of which another computes at least half in this step waits,
        and finds that in the prefix cache in the next: what it lacks is halved each time, so that it never
        waits for long."""
        chunks, budget, size = list[Chunk](), self.max_prefill_tokens, self._pool.block_size
        coming = self.kv.coming()
        for request in self._in_order([request for request in self.running if not request.is_ready]):
            if budget <= 0:
                break
            self.num_cached_tokens += self.kv.find_more(request)
            start, last = request.num_computed, len(request.token_ids) - 1
            end, shares = min(last, start + budget), self.kv.shares(request)
            could_wait = shares and start == request.table.num_published * size
            if start == end or (could_wait and 2 * coming.num_shared(request) >= last - start):
                continue
            chunks.append(Chunk(request, start, end))
            budget -= end - start
            if shares:
                coming.add(request, end)
        return chunks

    def _make_room(self, request: Request, window: int) -> None:
        """Extends the request's blocks for one round, preempting others (or, last of all, itself).

        Requests in prefill have them since admission; but after an interrupt within a step any request may
        have tokens that are not computed yet, so this is called for all.
        """
        while not self.kv.extend(request, request.round_end(window)):
            victim = max(self.running, key=self._key)
            self._pause(victim)
            self.kv.evict(victim)
            if victim is request:
                return

    def _pause(self, request: Request) -> None:
        """Preempts a running request, which keeps the blocks of what is computed."""
        self._leave_row(request)
        self.kv.pause(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)

    def _admit(self, window: int) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            _, request = self._waiting.first()
            resumes = self.kv.has_some(request)
            if (num_cached := self.kv.admit(request, request.round_end(window))) is None:
                return
            self.num_cached_tokens += num_cached
            if self._enable_prefix_caching and not resumes and not request.is_suspect:
                self.num_queried_tokens += len(request.token_ids) - 1
            request.note_admission(self._now_s)
            self._waiting.remove(request)
            request.row = len(self.running)
            self.running.append(request)

    def _leave_row(self, request: Request) -> None:
        row, request.row = request.row, None
        assert row is not None
        last = self.running.pop()
        if last is not request:
            self.running[row] = last
            last.row = row
