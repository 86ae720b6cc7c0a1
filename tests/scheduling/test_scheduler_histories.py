"""Any history of a scheduler: whatever comes, ends, loses its blocks or is swapped out, nothing is lost and
nothing leaks."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.blocks import BlockPool
from hispec.config import SchedulingConfig
from hispec.scheduling.make import make_policy
from hispec.scheduling.policy import Service
from hispec.scheduling.request import Request
from hispec.scheduling.scheduler import Scheduler
from tests.helpers.scheduling_server import Server, Task, make_request
from tests.scheduling.test_scheduler import SIZE, FakeOffload, Memory, Ranks


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["fcfs", "sjf", "mlfq", "laps"]),
    st.integers(0, 10_000),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_with_few_blocks_all_finish_under_every_policy(
    name: str, seed: int, rows: int, caches: bool, keeps: bool
) -> None:
    generator = random.Random(seed)
    tasks = [
        Task(
            generator.randrange(30),
            generator.randrange(1, 25),
            generator.random(),
            30,
            generator.randrange(1, 12),
        )
        for _ in range(10)
    ]
    config = SchedulingConfig(
        policy=name, first_quantum=2.0, stability_window=2, review_rounds=generator.randrange(1, 4)
    )
    offload = (lambda pool: BlindOffload()) if keeps else None
    Server(make_policy(config), tasks, rows, num_blocks=11, caches=caches, offload=offload, seed=seed).run()


class BlindOffload:
    """Says that it keeps what it is given, and does."""

    def save(self, request: Request) -> bool:
        return request.number % 3 != 0

    def restore(self, request: Request) -> bool:
        return request.number % 3 == 1

    def drop(self, request: Request) -> None:
        pass


class History(RuleBasedStateMachine):
    """Requests come, run, end and are aborted, rows shrink, in any order: KV below num_computed is always
    that of the request's own tokens, no block leaks, and nothing is kept of those that are gone."""

    @initialize(
        seed=st.integers(0, 1000),
        caches=st.booleans(),
        review_rounds=st.integers(1, 3),
        rows=st.integers(1, 4),
    )
    def start(self, seed: int, caches: bool, review_rounds: int, rows: int) -> None:
        self.random = random.Random(seed)
        self.pool = BlockPool(12, SIZE)
        self.memory = Memory(self.pool)
        self.offload = FakeOffload(self.memory)
        self.policy = Ranks({number: self.random.random() for number in range(200)}, review_rounds)
        self.rows = rows
        self.scheduler = Scheduler(self.pool, self.policy, rows, 6, caches, offload=self.offload)
        self.requests: list[Request] = []
        self.count = 0

    @rule(num_prompt=st.integers(1, 20), max_tokens=st.integers(1, 20), same=st.booleans())
    def add(self, num_prompt: int, max_tokens: int, same: bool) -> None:
        request = make_request(self.count, num_prompt, max_tokens)
        if same:
            request.prompt_token_ids = [1] * num_prompt
            request.token_ids = [1] * num_prompt
        self.count += 1
        self.scheduler.add(request)
        self.requests.append(request)

    @rule(window=st.integers(1, 5))
    def run(self, window: int) -> None:
        planned = self.scheduler.schedule(window)
        assert self.scheduler.running or not self.requests, "nobody runs"
        for chunk in planned.chunks:
            assert chunk.start == chunk.request.num_computed
            self.memory.compute(chunk.request, chunk.start, chunk.end)
            self.scheduler.commit(chunk.request, chunk.end, release=False)
        for request, limit in [(self.scheduler.running[row], limit) for row, limit in planned.limits.items()]:
            tokens = [self.random.choice([1, 2]) for _ in range(self.random.randint(1, limit))]
            start = len(request.token_ids) - 1
            request.append(tokens)
            self.memory.compute(request, start, len(request.token_ids) - 1)
            self.scheduler.commit(request, len(request.token_ids) - 1, release=True)
            self.scheduler.served(request, Service(1, len(tokens), 0, 0, 1.0, 1.0))
            if request.finish_reason is not None:
                self.scheduler.remove(request)
                self.requests.remove(request)

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        request.finish_reason = "abort"
        self.scheduler.remove(request)
        self.requests.remove(request)

    @rule(takes=st.booleans(), loses=st.booleans())
    def change_offload(self, takes: bool, loses: bool) -> None:
        self.offload.takes, self.offload.loses = takes, loses

    @rule()
    @precondition(lambda self: self.rows > 1)
    def shrink(self) -> None:
        self.rows -= 1
        self.scheduler.shrink(self.rows)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.scheduler.tables())
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert {*running, *waiting} == set(self.requests) and len(running) + len(waiting) == len(
            self.requests
        )
        assert [request.row for request in running] == list(range(len(running))) and len(running) <= self.rows
        assert self.scheduler.kv._paused.keys() == {
            request.number for request in waiting if request.table.blocks
        }
        assert self.policy.live == {request.number for request in self.requests} >= self.offload.kept.keys()
        for request in self.requests:
            if request.table.blocks:
                self.memory.check(request)
            else:
                assert request.row is None or request.num_computed == 0
        assert all(
            request.row is None and not request.table.blocks
            for request in self.requests
            if request.number in self.offload.kept
        )
        assert self.pool.num_held == len(
            {block for table in self.scheduler.tables() for block in table.blocks}
        )


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
