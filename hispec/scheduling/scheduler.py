"""Scheduler: who is in which row, with which blocks, and what one step computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from cache.blocks import BlockPool, BlockTable

from .lengths import LengthPredictor, OnlineLengths
from .policy import Job, Key, Policy, Service
from .request import Request
from .waiting import Keeper, WaitingKV, WaitingOrder


@dataclass(frozen=True)
class Chunk:
    """Prompt positions [start, end) of a request, to be computed in this step."""

    request: Request
    start: int
    end: int


@dataclass
class Step:
    """What one step computes: prefill chunks, then a round over rows that may process `limits[row]` positions
    each."""

    chunks: list[Chunk] = field(default_factory=list)
    limits: dict[int, int] = field(default_factory=dict)


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse, and preemption in the order of a policy.

    Rows are kept compact: running[i] is in row i. When a request leaves, the last one moves into its row.

    A request that waits is new; *paused*: it has its blocks, and goes on at once when it gets a row; *kept*:
    its KV is in host memory; or to be computed again. Who loses its row to another request, or to fewer rows,
    is paused. When blocks run out the paused give up theirs, those who go last first, then the running are
    preempted likewise. The keeper says whether KV is kept or computed again.

    Admission never skips ahead: if the first in order cannot have its blocks, the next does not come in its
    place because it needs fewer, or a large request would wait for ever. No row stays empty for that while
    somebody paused holds blocks: they are given up.
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
        keeper: Keeper | None = None,
    ) -> None:
        """predictor: of output lengths; keeper: of the KV of requests without blocks, None = it is computed
        again."""
        self.running: list[Request] = []
        self.num_preemptions = self.num_cached_tokens = 0
        self._pool, self._policy = pool, policy
        self._max_num_seqs, self.max_prefill_tokens = max_num_seqs, max_prefill_tokens
        self._enable_prefix_caching = enable_prefix_caching
        self._predictor: LengthPredictor = predictor or OnlineLengths()
        self._waiting = WaitingOrder(self._key)
        self.kv = WaitingKV(pool, keeper, self._key)
        self._new: set[int] = set()  # numbers of those that came since the last review
        self._rounds_since_review = 0
        self._now_s = 0.0

    @property
    def waiting(self) -> list[Request]:
        """In no order."""
        return self._waiting.requests

    def add(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        predict = self._predictor.predictor(prompt, request.max_tokens)
        self._policy.add(Job(request.number, request.arrival_s, len(prompt), request.max_tokens, predict))
        self._waiting.add(request)
        if self._policy.preempts:
            self._new.add(request.number)

    def remove(self, request: Request) -> None:
        """Takes a finished or aborted request out, with its blocks."""
        # Its row comes last: an interrupt before that leaves it where a step looks for those that have ended.
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
        """Tells the policy what rounds, or prefill, gave a request that has not been removed yet."""
        self._policy.served(request.number, service)

    def schedule(self, window: int, now_s: float = 0.0) -> Step:
        """Plans one step in which a round may process up to `window` positions per row. now_s: on the clock
        of arrivals.

        Who goes before a running request takes its row, if the policy preempts. Then rounds: running requests
        get the blocks that they may need, if need be those of others. What waits is admitted with what is
        left, and never in a step that had to preempt for blocks.
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
        step = Step()
        budget = self.max_prefill_tokens
        for request in self._in_order([request for request in self.running if not request.is_ready]):
            if budget > 0:
                end = min(len(request.token_ids) - 1, request.num_computed + budget)
                step.chunks.append(Chunk(request, request.num_computed, end))
                budget -= end - request.num_computed
        finishing = {
            chunk.request.row for chunk in step.chunks if chunk.end == len(chunk.request.token_ids) - 1
        }
        for row, request in enumerate(self.running):
            # A prompt whose last chunk is computed in this step joins its round at once: it has the blocks.
            if request.is_ready or row in finishing:
                step.limits[row] = request.round_limit(window)
                assert (
                    len(request.table.blocks) * self._pool.block_size
                    >= len(request.token_ids) - 1 + step.limits[row]
                )
        return step

    def fit(self, step: Step, window: int) -> None:
        """The round of the step may process another window than it was planned with: as far as there are free
        blocks."""
        for row in step.limits:
            request = self.running[row]
            start, limit = len(request.token_ids) - 1, request.round_limit(window)
            if not self._pool.extend(request.table, start + limit):
                limit = min(limit, len(request.table.blocks) * self._pool.block_size - start)
            step.limits[row] = limit

    def ran_ahead(self) -> None:
        """A round was launched without `schedule`, over the same rows as the last."""
        self._rounds_since_review += 1

    def commit(self, request: Request, num_computed: int, release: bool) -> None:
        """The only place where a request's computed length grows: sets it, and offers full blocks to the
        prefix cache. `release`, after a round, gives back the blocks that it had reserved beyond."""
        request.num_computed = num_computed
        if (
            self._enable_prefix_caching and not request.drafter_failed
        ):  # its blocks may lack a draft model's KV
            self._pool.publish(
                request.table,
                request.token_ids,
                min(num_computed, *request.gaps.values()) if request.gaps else num_computed,
            )
        if release:
            self._pool.truncate(request.table, num_computed)

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits for whom there is a row, or who may take another's now: the next round needs
        `schedule`."""
        return bool(self.waiting) and (len(self.running) < self._max_num_seqs or self._is_review_due)

    def shrink(self, max_num_seqs: int) -> None:
        """From now on at most so many rows; who is beyond them is paused."""
        self._max_num_seqs = max_num_seqs
        for request in self._in_order(self.running)[max_num_seqs:]:
            self._pause(request)

    def reserve(self, request: Request, num_positions: int) -> bool:
        """Extends the request's blocks to so many positions, if that takes nobody else's."""
        return self._pool.extend(request.table, num_positions)

    def tables(self) -> list[BlockTable]:
        """Of all live requests, for integrity checks."""
        return [request.table for request in (*self.waiting, *self.running)]

    @contextmanager
    def repaired(self, live: Mapping[str, Request]) -> Iterator[None]:
        """An interrupt leaves the requests that there are then."""
        try:
            yield
        except BaseException:
            self.repair(live.values())
            raise

    def repair(self, live: Iterable[Request]) -> None:
        """After an interrupt anywhere in here: who is live, and only they, have a row, or wait, in order; and
        have blocks or are kept, not both."""
        wanted = {request.number: request for request in live}
        for request in {*self.running, *self.waiting} - set(wanted.values()):
            self._pool.free(request.table)
            self.kv.drop(request)
            self._policy.remove(request.number)
        self.running = [
            request
            for request in dict.fromkeys(self.running)
            if request.number in wanted and request.row is not None
        ]
        for row, request in enumerate(self.running):
            request.row = row
        waiting = [request for request in wanted.values() if request not in self.running]
        for request in waiting:
            request.row = None
        self._waiting = WaitingOrder(self._key)
        for request in waiting:
            self._waiting.add(request)
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
        """Pauses running requests, those who go last first, of whom waiting ones take row and blocks.

        Between regular reviews only who has just come may do so. So there are at most as many such
        preemptions as rows every review_rounds rounds, and for each arrival those that its row and blocks
        take, whatever estimates do.
        """
        is_regular = self._rounds_since_review >= self._policy.review_rounds
        if is_regular:
            self._rounds_since_review = 0
        new, self._new = self._new, set()
        rest = self._in_order(self.running)
        # What the paused hold can be had; what the running lack for a round is taken off.
        num_rows = self._max_num_seqs - len(rest)
        num_blocks = self._pool.num_available + self.kv.num_blocks
        num_blocks -= sum(self._num_missing(request, window) for request in rest)
        for key, request in self._waiting.heads(self._max_num_seqs):
            num_rows -= 1
            num_blocks -= self._pool.blocks_for(_end(request, window))
            victims: list[Request] = []
            while (
                (num_rows < 0 or num_blocks < 0) and rest and self._policy.displaces(key, self._key(rest[-1]))
            ):
                victim = rest.pop()
                victims.append(victim)
                num_rows += 1
                num_blocks += len(victim.table.blocks) + self._num_missing(victim, window)
            if num_rows < 0 or num_blocks < 0 or (victims and not is_regular and request.number not in new):
                return  # it does not get in, nor does anybody after it
            for victim in victims:
                self._pause(victim)

    def _num_missing(self, request: Request, window: int) -> int:
        """Blocks that it lacks for a round."""
        return max(0, self._pool.blocks_for(_end(request, window)) - len(request.table.blocks))

    # ---- rows and blocks ----

    def _make_room(self, request: Request, window: int) -> None:
        """Extends the request's blocks for one round, preempting others (or, last of all, itself).

        One that is still prefilling was admitted with the blocks; but an interrupt within a step may have
        left any with tokens that are not computed yet, so all are looked at.
        """
        while not self.kv.extend(request, _end(request, window)):
            victim = max(self.running, key=self._key)
            self._pause(victim)
            self.kv.give_up(victim)
            if victim is request:
                return

    def _pause(self, request: Request) -> None:
        """Takes its row; it keeps the blocks of what is computed."""
        self._leave_row(request)
        self.kv.pause(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)

    def _admit(self, window: int) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            _, request = self._waiting.first()
            if not self._take_blocks(request, _end(request, window)):
                return
            self._waiting.remove(request)
            request.row = len(self.running)
            self.running.append(request)

    def _take_blocks(self, request: Request, num_positions: int) -> bool:
        """Gives a waiting request blocks for so many positions, and its KV as far as there is any: kept from
        before, or in the prefix cache. False, and nothing changed for it, if there are not blocks enough."""
        if (has_resumed := self.kv.resume(request, num_positions)) is not None:
            return has_resumed
        num_cached = 0
        self._pool.free(request.table)  # it has none, but for an interrupt
        if self._enable_prefix_caching:
            # The last token is never taken from the cache: a round begins by processing it.
            request.table, num_cached = self._pool.allocate(request.token_ids[:-1])
        if not self.kv.extend(request, num_positions):
            self._pool.free(request.table)
            return False
        request.num_computed = num_cached
        request.gaps.clear()  # prefill writes all KV, and what is published lacks none
        request.num_cached = num_cached
        self.num_cached_tokens += num_cached
        return True

    def _leave_row(self, request: Request) -> None:
        row, request.row = request.row, None
        assert row is not None
        last = self.running.pop()
        if last is not request:
            self.running[row] = last
            last.row = row


def _end(request: Request, window: int) -> int:
    """Positions that it may need blocks for in a round."""
    return len(request.token_ids) - 1 + request.round_limit(window)
