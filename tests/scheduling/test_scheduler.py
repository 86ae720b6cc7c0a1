"""The scheduler over a real block pool: rows, blocks and KV of whoever runs, pauses, is swapped out or
computed again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from cache.blocks import BlockPool
from hispec.sampling_params import SamplingParams
from hispec.scheduling.policy import Job, Key, Service
from hispec.scheduling.request import Request
from hispec.scheduling.scheduler import Scheduler
from hispec.scheduling.waiting import WaitingOrder
from tests.helpers.scheduling_server import make_request

SIZE = 4


class Ranks:
    """A policy that is told the order: `ranks[number]`; the lower displaces the higher."""

    preempts = True

    def __init__(self, ranks: dict[int, float] | None = None, review_rounds: int = 1) -> None:
        self.ranks = ranks or {}
        self.review_rounds = review_rounds
        self.live: set[int] = set()

    def add(self, job: Job) -> None:
        self.live.add(job.number)

    def served(self, number: int, service: Service) -> None:
        assert number in self.live

    def remove(self, number: int) -> None:
        self.live.remove(number)

    def key(self, number: int, now_s: float) -> Key:
        assert number in self.live
        return (self.ranks.get(number, float(number)), number)

    def displaces(self, waiting: Key, running: Key) -> bool:
        assert waiting[1] != running[1]
        return waiting[0] < running[0]


class FakeOffload:
    """Keeps which tokens were in a request's KV, as `Memory` has them; `takes`: whether it accepts more;
    `loses`: whether what it had is gone."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.kept: dict[int, list[tuple[int, ...]]] = {}
        self.takes, self.loses = True, False

    def save(self, request: Request) -> bool:
        assert request.number not in self.kept and request.row is None
        if self.takes:
            self.kept[request.number] = self.memory.read(request)
        return self.takes

    def restore(self, request: Request) -> bool:
        kept = self.kept.pop(request.number)
        if not self.loses:
            self.memory.put(request, 0, kept)
        return not self.loses

    def drop(self, request: Request) -> None:
        self.kept.pop(request.number, None)


class Memory:
    """The KV: at each slot, the tokens up to the position that was computed there."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.slots: dict[int, tuple[int, ...]] = {}

    def slot(self, request: Request, position: int) -> int:
        return request.table.blocks[position // SIZE] * SIZE + position % SIZE

    def read(self, request: Request) -> list[tuple[int, ...]]:
        return [self.slots[self.slot(request, position)] for position in range(request.num_computed)]

    def put(self, request: Request, start: int, values: Sequence[tuple[int, ...]]) -> None:
        for position, value in enumerate(values, start):
            self.slots[self.slot(request, position)] = value

    def compute(self, request: Request, start: int, end: int) -> None:
        self.put(request, start, [tuple(request.token_ids[: position + 1]) for position in range(start, end)])

    def check(self, request: Request) -> None:
        assert self.read(request) == [
            tuple(request.token_ids[: position + 1]) for position in range(request.num_computed)
        ], "KV is of other tokens"


def make_scheduler(
    policy: Any,
    num_blocks: int = 40,
    rows: int = 2,
    caches: bool = False,
    max_prefill_tokens: int = 100,
    **options: Any,
) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, SIZE), policy, rows, max_prefill_tokens, caches, **options)


def step(scheduler: Scheduler, now_s: float = 0.0) -> list[int]:
    """One round of one token a row -> who was in it."""
    planned = scheduler.schedule(1, now_s)
    for chunk in planned.chunks:
        scheduler.commit(chunk.request, chunk.end, release=False)
    served = [scheduler.running[row] for row in planned.limits]
    for request in served:
        request.append([1])
        scheduler.commit(request, len(request.token_ids) - 1, release=True)
        scheduler.served(request, Service(1, 1, 0, 0, 1.0, 1.0))
    scheduler._pool.check(scheduler.tables())
    return sorted(request.number for request in served)


def add(scheduler: Scheduler, number: int, num_prompt: int = 3, max_tokens: int = 100) -> Request:
    request = make_request(number, num_prompt, max_tokens)
    scheduler.add(request)
    return request


def add_same(scheduler: Scheduler, number: int, num_prompt: int = 9) -> Request:
    """One of the same prompt as all that are added so."""
    prompt = make_request(0, num_prompt).prompt_token_ids
    request = Request(f"r{number}", number, prompt, SamplingParams(), 0, 100, frozenset(), None, 0.0)
    scheduler.add(request)
    return request


# ---- rounds that run together ----


@pytest.mark.parametrize(
    ("num_blocks", "num_rounds", "limits"),
    [
        (40, 1, [12, 12]),
        (40, 3, [36, 36]),
        (40, 8, [80, 60]),  # as much as they may still get
        (8, 8, [14, 14]),  # blocks for one round each, and what is left of the last of them
        (9, 8, [14, 14]),
        (5, 8, [14, 2]),
    ],
    ids=str,
)
def test_no_row_has_blocks_for_a_second_round_before_the_others_have_them_for_the_first(
    num_blocks: int, num_rounds: int, limits: list[int]
) -> None:
    scheduler = make_scheduler(Ranks(), num_blocks=num_blocks)
    for number, room in enumerate((80, 60)):
        add(scheduler, number, max_tokens=room)
    planned = scheduler.schedule(1)
    for chunk in planned.chunks:
        scheduler.commit(chunk.request, chunk.end, release=False)
    scheduler.fit(planned, 12, num_rounds)
    assert list(planned.limits.values()) == limits
    for row, limit in planned.limits.items():
        request = scheduler.running[row]
        assert len(request.token_ids) - 1 + limit <= SIZE * len(request.table.blocks)
    scheduler._pool.check(scheduler.tables())


# ---- pausing ----


def test_a_request_that_loses_its_row_keeps_its_blocks_and_goes_on_where_it_was() -> None:
    scheduler = make_scheduler(Ranks({0: 5.0, 1: 1.0}), rows=1)
    long = add(scheduler, 0, num_prompt=9)
    assert step(scheduler) == [0]
    blocks, num_computed = list(long.table.blocks), long.num_computed
    short = add(scheduler, 1)
    assert step(scheduler) == [1]
    assert (
        long.row is None
        and long.table.blocks == blocks
        and long.num_computed == num_computed
        and long.num_preemptions == 1
    )
    assert long.table in scheduler.tables()
    short.finish_reason = "stop"
    scheduler.remove(short)
    planned = scheduler.schedule(1)
    assert scheduler.running == [long] and not planned.chunks and planned.limits == {0: 1}, (
        "it goes on at once"
    )
    assert (scheduler.num_preemptions, scheduler.kv.num_kept, scheduler.num_cached_tokens) == (1, 0, 0)


def test_nobody_loses_his_blocks_for_one_that_does_not_get_in_all_the_same() -> None:
    scheduler = make_scheduler(Ranks({0: 0.0, 1: 5.0}), num_blocks=10, rows=1)
    small = add(scheduler, 1, num_prompt=7)
    assert step(scheduler) == [1]
    add(scheduler, 0, num_prompt=19)
    assert step(scheduler) == [0]
    blocks, large = list(small.table.blocks), make_request(2, 24)
    assert blocks and scheduler.kv.admit(large, 24) is None
    assert small.table.blocks == blocks and scheduler.kv.paused == [small] and not large.table.blocks
    assert scheduler.kv.admit(large, 20) == 0 and len(large.table.blocks) == 5
    assert not small.table.blocks and not scheduler.kv.paused


def test_one_that_starts_over_takes_nothing_from_the_prefix_cache() -> None:
    scheduler = make_scheduler(Ranks({0: 0.0, 1: 5.0, 2: 1.0}), rows=2, caches=True)
    add_same(scheduler, 0)
    assert step(scheduler) == [0]
    suspect = add_same(scheduler, 1)
    assert step(scheduler) == [0, 1] and suspect.num_cached == 8
    scheduler.start_over(suspect)
    other = add_same(scheduler, 2)
    assert step(scheduler) == [0, 2] and other.num_cached == 0, "what both had is not found any more"
    scheduler.remove(other)
    assert step(scheduler) == [0, 1] and suspect.num_cached == 0


def test_what_one_that_starts_over_computes_again_is_not_found_by_others() -> None:
    scheduler = make_scheduler(Ranks(), rows=1, caches=True)
    suspect = add_same(scheduler, 0)
    assert step(scheduler) == [0]
    scheduler.start_over(suspect)
    assert step(scheduler) == [0]
    scheduler.remove(suspect)
    other = add_same(scheduler, 1)
    assert step(scheduler) == [1] and other.num_cached == 0


def test_one_that_is_paused_within_its_prefill_goes_on_with_the_rest_of_it() -> None:
    scheduler = make_scheduler(Ranks({0: 5.0, 1: 1.0}), rows=1, max_prefill_tokens=4)
    long = add(scheduler, 0, num_prompt=11)
    assert step(scheduler) == [] and long.num_computed == 4
    short = add(scheduler, 1)
    assert step(scheduler) == [1] and len(long.table.blocks) == 1
    scheduler.remove(short)
    assert [(chunk.start, chunk.end) for chunk in scheduler.schedule(1).chunks] == [(4, 8)]


def test_reviews_come_every_few_rounds_and_at_once_when_somebody_comes() -> None:
    ranks = {0: 1.0, 1: 2.0}
    scheduler = make_scheduler(Ranks(ranks, review_rounds=3), rows=1)
    add(scheduler, 0)
    add(scheduler, 1)
    assert step(scheduler) == [0] and not scheduler.may_admit
    ranks[1] = 0.0  # from now on it goes first, but nobody has come
    assert [step(scheduler), scheduler.may_admit] == [[0], False]
    scheduler.ran_on()
    assert scheduler.may_admit, "the third round, and the host has to look"
    assert step(scheduler) == [1] and not scheduler.may_admit
    ranks[2] = -1.0
    add(scheduler, 2)
    assert scheduler.may_admit and step(scheduler) == [2]


def test_between_reviews_only_who_has_just_come_takes_a_row() -> None:
    ranks = {0: 1.0, 1: 2.0, 2: 9.0}
    scheduler = make_scheduler(Ranks(ranks, review_rounds=10), rows=1)
    add(scheduler, 0)
    add(scheduler, 1)
    assert step(scheduler) == [0]
    ranks[1] = 0.0
    add(scheduler, 2)
    assert [step(scheduler) for _ in range(9)] == [[0]] * 9
    assert step(scheduler) == [1]


def test_a_policy_that_does_not_preempt_is_not_asked() -> None:
    policy = Ranks({0: 5.0, 1: 1.0})
    policy.preempts = False
    scheduler = make_scheduler(policy, rows=1)
    add(scheduler, 0)
    assert step(scheduler) == [0]
    add(scheduler, 1)
    assert not scheduler.may_admit and [step(scheduler) for _ in range(5)] == [[0]] * 5


class Jitter(Ranks):
    """Estimates that change at every look."""

    def __init__(self, review_rounds: int) -> None:
        super().__init__(review_rounds=review_rounds)
        self._random = random.Random(0)

    def key(self, number: int, now_s: float) -> Key:
        return (self._random.random(), number)

    def displaces(self, waiting: Key, running: Key) -> bool:
        return True


def test_preemptions_are_bounded_whatever_estimates_do() -> None:
    scheduler = make_scheduler(Jitter(review_rounds=5), num_blocks=500, rows=3)
    for number in range(8):
        add(scheduler, number)
    for _ in range(50):
        step(scheduler)
    assert 0 < scheduler.num_preemptions <= 3 * 50 / 5 + 8


# ---- admission ----


def test_admission_follows_the_keys_and_chunks_do_too() -> None:
    scheduler = make_scheduler(Ranks({0: 3.0, 1: 2.0, 2: 1.0, 3: 0.0}), rows=3, max_prefill_tokens=12)
    for number in range(4):
        add(scheduler, number, num_prompt=9)
    planned = scheduler.schedule(1)
    assert [request.number for request in scheduler.running] == [3, 2, 1]
    assert [(chunk.request.number, chunk.start, chunk.end) for chunk in planned.chunks] == [
        (3, 0, 8),
        (2, 0, 4),
    ]


def test_nobody_overtakes_because_it_needs_fewer_blocks() -> None:
    scheduler = make_scheduler(Ranks(), num_blocks=4, rows=3)
    add(scheduler, 0, num_prompt=7)  # two blocks of four
    add(scheduler, 1, num_prompt=12)  # three
    add(scheduler, 2, num_prompt=3)  # one
    assert step(scheduler) == [0]
    assert [request.number for request in scheduler.waiting] == [1, 2]


def test_the_order_is_found_among_many_though_keys_change_while_they_wait() -> None:
    ranks = {number: 10.0 + number for number in range(1000)}
    policy = Ranks(ranks)
    policy.preempts = False
    scheduler = make_scheduler(policy, num_blocks=3000, rows=1)
    for number in range(1000):
        add(scheduler, number)
    order = []
    for count in range(60):
        ranks[500 + count] = -1.0  # becomes urgent
        ranks[count] = 5000.0  # its estimate grew
        for _ in range(4):  # as many looks as it takes to see all of them
            scheduler._waiting.refresh()
        (now,) = step(scheduler)
        order.append(now)
        scheduler.running[0].finish_reason = "stop"
        scheduler.remove(scheduler.running[0])
    assert order == [500 + count for count in range(60)]


def test_who_waits_is_looked_at_in_turn_whoever_goes_meanwhile() -> None:
    ranks = {number: 10.0 + number for number in range(600)}
    order = WaitingOrder(lambda request: (ranks[request.number],))
    requests = [make_request(number) for number in range(600)]
    for request in requests:
        order.add(request)
    order.refresh()  # the first 256
    order.remove(requests[0])
    ranks[256] = -1.0
    order.refresh()
    assert order.first()[1] is requests[256]


# ---- when blocks run out ----


def test_the_paused_give_up_their_blocks_before_the_running_and_who_goes_last_first() -> None:
    ranks = {0: 7.0, 1: 6.0, 2: 1.0}
    scheduler = make_scheduler(Ranks(ranks), num_blocks=9, rows=1)
    worst = add(scheduler, 0, num_prompt=9)
    step(scheduler)
    second = add(scheduler, 1, num_prompt=9)
    step(scheduler)
    first = add(scheduler, 2, num_prompt=9)
    step(scheduler)
    assert [len(request.table.blocks) for request in (worst, second, first)] == [3, 3, 3]
    while len(first.table.blocks) == 3:
        assert len(worst.table.blocks) == 3
        step(scheduler)
    assert [len(request.table.blocks) for request in (worst, second, first)] == [0, 3, 4]
    for request in (first, second):
        scheduler.remove(request)
    planned = scheduler.schedule(1)
    assert [(chunk.request, chunk.start, chunk.end) for chunk in planned.chunks] == [(worst, 0, 9)], (
        "computed again, its output too"
    )


def test_a_row_does_not_stay_empty_for_blocks_that_the_paused_hold() -> None:
    """The first in order is new and needs what those behind it hold."""
    ranks = {0: 5.0, 1: 6.0, 2: 1.0}
    scheduler = make_scheduler(Ranks(ranks), num_blocks=6, rows=2)
    requests = [add(scheduler, 0, num_prompt=10), add(scheduler, 1, num_prompt=10)]
    step(scheduler)
    requests.append(add(scheduler, 2, num_prompt=22))
    assert step(scheduler) == [2]
    assert [len(request.table.blocks) for request in requests] == [0, 0, 6]


def test_nobody_is_displaced_for_one_that_would_not_get_in() -> None:
    ranks = {0: 0.0, 1: 5.0, 2: 1.0}
    scheduler = make_scheduler(Ranks(ranks), num_blocks=6, rows=2)
    add(scheduler, 0, num_prompt=14)
    add(scheduler, 1, num_prompt=3)
    assert step(scheduler) == [0, 1]
    add(scheduler, 2, num_prompt=14)
    assert step(scheduler) == [0, 1] and scheduler.num_preemptions == 0


def test_blocks_that_others_hold_too_are_not_those_of_a_victim() -> None:
    """0 and 1 share the whole blocks of their prompt: pausing 1 would make room for hardly a token of 2."""
    scheduler = make_scheduler(Ranks({0: 0.0, 1: 5.0, 2: 1.0}), num_blocks=7, rows=3, caches=True)
    add_same(scheduler, 0)
    assert step(scheduler) == [0]
    shares = add_same(scheduler, 1)
    assert step(scheduler) == [0, 1]
    needed, free = scheduler._pool.blocks_for(4 * SIZE + 2 + 1), scheduler._pool.num_available
    assert scheduler.kv.num_available([shares], set()) < needed <= free + len(shares.table.blocks)
    add(scheduler, 2, num_prompt=4 * SIZE + 2)
    assert step(scheduler) == [0, 1] and scheduler.num_preemptions == 0


def test_one_that_shares_a_prefix_with_others_needs_no_blocks_for_it() -> None:
    """Neither when it comes, nor when it goes on after a pause."""
    ranks = {0: 1.0, 1: 2.0, 2: 0.0}
    scheduler = make_scheduler(Ranks(ranks), num_blocks=12, caches=True)
    for number in (0, 1):
        add_same(scheduler, number, 8 * SIZE + 1)
        assert number in step(scheduler)
    assert scheduler._pool.num_available == 2
    add_same(scheduler, 2, 8 * SIZE + 1)
    assert step(scheduler) == [0, 2]
    ranks[1] = -1.0
    assert step(scheduler) == [1, 2] and scheduler.num_preemptions == 2


def test_a_prefix_that_one_begins_with_is_not_taken_for_another() -> None:
    """2 goes on with the blocks of 0, who gives up but one for 3 if it is paused."""
    scheduler = make_scheduler(Ranks({0: 5.0, 1: 6.0, 2: 0.0, 3: 1.0}), num_blocks=11, caches=True)
    add_same(scheduler, 0, 8 * SIZE + 1)
    add(scheduler, 1)
    assert step(scheduler) == [0, 1]
    add_same(scheduler, 2, 8 * SIZE + 1)
    add(scheduler, 3, num_prompt=7 * SIZE + 1)
    assert step(scheduler) == [0, 2] and scheduler.num_preemptions == 1


def test_who_shares_blocks_with_other_victims_alone_gives_them_up() -> None:
    scheduler = make_scheduler(Ranks({0: 5.0, 1: 6.0, 2: 0.0}), num_blocks=12, caches=True)
    for number in (0, 1):
        add_same(scheduler, number, 8 * SIZE + 1)
        assert number in step(scheduler)
    add(scheduler, 2, num_prompt=9 * SIZE)
    assert step(scheduler) == [2] and scheduler.num_preemptions == 2


def test_what_is_found_of_ones_own_is_not_reported_as_cached() -> None:
    scheduler = make_scheduler(Ranks({0: 5.0, 1: 0.0}), num_blocks=5, rows=1, caches=True)
    long = add(scheduler, 0, num_prompt=2 * SIZE + 1)
    step(scheduler)
    assert long.num_cached == 0
    short = add(scheduler, 1, num_prompt=4 * SIZE - 1)
    assert step(scheduler) == [1] and not long.table.blocks
    short.finish_reason = "length"
    scheduler.remove(short)
    assert step(scheduler) == [0] and long.num_preemptions == 1
    assert long.num_cached == 0


def test_a_paused_request_does_not_give_up_its_own_blocks_to_get_in() -> None:
    ranks = {0: 1.0, 1: 0.0, 2: 0.5}
    scheduler = make_scheduler(Ranks(ranks), num_blocks=5, rows=1)
    paused = add(scheduler, 0, num_prompt=8)
    step(scheduler)
    short = add(scheduler, 1, num_prompt=3)
    step(scheduler)
    assert len(paused.table.blocks) == 2
    scheduler.remove(short)
    other = make_request(9)
    assert scheduler.reserve(other, 3 * SIZE), "as if somebody else held the rest"
    scheduler.schedule(1)
    assert paused.row is None and len(paused.table.blocks) == 2 and paused.num_computed == 8
    scheduler._pool.free(other.table)
    assert not scheduler.schedule(1).chunks and paused.row == 0


@pytest.mark.parametrize(("takes", "loses"), [(True, False), (False, False), (True, True)])
def test_kv_goes_to_host_memory_and_comes_back_or_is_computed_again(takes: bool, loses: bool) -> None:
    pool = BlockPool(4, SIZE)
    memory = Memory(pool)
    offload = FakeOffload(memory)
    offload.takes, offload.loses = takes, loses
    scheduler = Scheduler(pool, Ranks({0: 5.0, 1: 1.0}), 1, 100, False, offload=offload)
    long, short = add(scheduler, 0, num_prompt=9), make_request(1, 9)
    step(scheduler)
    memory.compute(long, 0, long.num_computed)
    scheduler.add(short)
    assert step(scheduler) == [1]
    assert long.table.blocks == [] and (0 in offload.kept) == takes and scheduler.kv.num_kept == takes
    short.finish_reason = "length"
    scheduler.remove(short)
    planned = scheduler.schedule(1)
    if takes and not loses:
        assert planned.chunks == [] and planned.limits == {0: 1} and scheduler.kv.num_restored == 1
        memory.check(long)
    else:
        assert [(chunk.start, chunk.end) for chunk in planned.chunks] == [
            (0, 9)
        ] and scheduler.kv.num_restored == 0
    assert offload.kept == {}


def test_what_is_kept_of_a_request_that_ends_is_dropped() -> None:
    pool = BlockPool(4, SIZE)
    offload = FakeOffload(memory := Memory(pool))
    scheduler = Scheduler(pool, Ranks({0: 5.0, 1: 1.0}), 1, 100, False, offload=offload)
    long = add(scheduler, 0, num_prompt=9)
    step(scheduler)
    memory.compute(long, 0, long.num_computed)
    add(scheduler, 1, num_prompt=9)
    step(scheduler)
    assert offload.kept
    scheduler.remove(long)
    assert not offload.kept and long not in scheduler.waiting


def test_fewer_rows_pause_those_who_go_last() -> None:
    scheduler = make_scheduler(Ranks({0: 5.0, 1: 1.0, 2: 3.0}), rows=3)
    requests = [add(scheduler, number) for number in range(3)]
    step(scheduler)
    scheduler.shrink(1)
    assert [request.number for request in scheduler.running] == [1] and scheduler.num_preemptions == 2
    assert all(request.table.blocks for request in requests)
    assert step(scheduler) == [1]


# ---- the predictor ----


class Notes:
    """A predictor that writes down what it is asked."""

    def __init__(self) -> None:
        self.finished_with: list[tuple[list[int], int]] = []

    def predictor(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Any:
        return lambda generated: float(max_tokens)

    def finished(self, prompt_token_ids: Sequence[int], num_output: int) -> None:
        self.finished_with.append((list(prompt_token_ids), num_output))


def test_the_predictor_learns_from_requests_that_ended_by_themselves() -> None:
    notes = Notes()
    scheduler = make_scheduler(Ranks(), rows=4, predictor=notes)
    requests = [add(scheduler, number) for number in range(4)]
    step(scheduler)
    for request, reason in zip(requests, ("stop", "length", "abort", "error"), strict=True):
        request.finish_reason = reason
        scheduler.remove(request)
    assert notes.finished_with == [(requests[0].prompt_token_ids, 1), (requests[1].prompt_token_ids, 1)]
