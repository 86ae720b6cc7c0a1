"""The simulator's rows against the engine's scheduler, over the same requests and keys."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cache.blocks import BlockPool
from hispec.latency.moving import cheaper_to_move
from hispec.scheduling.policy import FirstComeFirstServed, Job
from hispec.scheduling.scheduler import Scheduler
from hispec.simulate.batch_state import BatchState, Setup
from hispec.simulate.row_state import RoundPlan
from hispec.simulate.system import with_latency
from hispec.simulate.tables import make_tables
from hispec.simulate.workload import make_workload
from tests.helpers.scheduling_server import AMPLE, make_request
from tests.helpers.simulations import STAGES, experiment
from tests.scheduling.test_scheduler import SIZE, Ranks

NEVER = 1000  # rounds until a regular review
Sizes = Sequence[tuple[int, int]]  # prompt and output tokens of each request; so many it may output


def make_setup(
    sizes: Sizes, engine: dict[str, Any], stages: dict[str, dict[str, Any]], swap_bytes: int = 0
) -> Setup:
    config = experiment(engine=engine, latency={"stages": stages}, requests={"num": len(sizes)})
    prompts, outputs = np.array(sizes, np.int64).T
    workload = replace(
        make_workload(config, len(sizes), 0),
        prompt_tokens=prompts,
        output_tokens=outputs,
        max_tokens=outputs,
    )
    _, latency = with_latency(config)
    return Setup(config.engine, latency, workload, make_tables(config, latency, workload), swap_bytes, ())


class Twins:
    """The scheduler and the simulator's rows. After each decision the same requests have a row, and as much
    of each is computed. KV that loses its blocks is computed again."""

    def __init__(
        self,
        ranks: dict[int, float],
        sizes: Sizes,
        *,
        rows: int = 1,
        num_blocks: int = AMPLE,
        window: int = 1,
        review_rounds: int = NEVER,
        seed: int = 0,
    ) -> None:
        self.ranks, self.window, self.random = ranks, window, random.Random(seed)
        self.policies = Ranks(ranks, review_rounds), Ranks(ranks, review_rounds)
        self.scheduler = Scheduler(BlockPool(num_blocks, SIZE), self.policies[0], rows, 10_000, False)
        engine = {"max_num_seqs": rows, "num_kv_tokens": num_blocks * SIZE, "block_size": SIZE}
        self.state = BatchState(make_setup(sizes, engine, STAGES), self.policies[1])
        self.state.plan = RoundPlan(-1, window - 1, 1)
        self.requests = [make_request(number, *size) for number, size in enumerate(sizes)]
        self.live = set[int]()

    def arrive(self, *numbers: int) -> None:
        for number in numbers:
            request = self.requests[number]
            self.scheduler.add(request)
            prompt, most = len(request.prompt_token_ids), request.max_tokens
            self.policies[1].add(Job(number, 0.0, prompt, most, lambda generated: generated + 1.0))
            self.state.add(number)
            self.live.add(number)

    def round(self) -> set[int]:
        """Decides, compares, and runs a round -> who was in it."""
        step = self.scheduler.schedule(self.window)
        self.schedule_simulated()
        running = {request.number for request in self.scheduler.running}
        assert set(self.state._row_of) == running
        assert self.state.counts.preemptions == self.scheduler.num_preemptions
        for number in self.live:
            request = self.requests[number]
            computed = request.num_computed if request.table.blocks else 0
            missing = len(request.token_ids) - 1 - computed
            assert self.state.progress_of(number) == (request.num_output, missing)
        for chunk in step.chunks:
            self.scheduler.commit(chunk.request, chunk.end, release=False)
        assert len(step.limits) == len(running), "prompts are computed within a step"
        limits = {self.scheduler.running[row].number: limit for row, limit in step.limits.items()}
        for number, limit in limits.items():
            self.serve(number, self.random.randint(1, limit))
        self.state.rounds_since_review += 1
        return running

    def schedule_simulated(self) -> None:
        """As Replica begins a run."""
        state = self.state
        state.schedule()
        while 0 <= state.num_blocks < state._blocks_needed(state.rows[: state.num_running], state.plan, SIZE):
            state.make_room()

    def serve(self, number: int, num_tokens: int) -> None:
        request, at = self.requests[number], self.state._row_of[number]
        request.append([0] * num_tokens)
        self.scheduler.commit(request, len(request.token_ids) - 1, release=True)
        row = self.state.rows[at]
        row["prefill_left"] = 0
        row["output"] += num_tokens
        row["length"] += num_tokens
        if request.finish_reason is not None:
            self.scheduler.remove(request)
            self.state.leave_row(at)
            self.policies[1].remove(number)
            self.live.remove(number)


def test_between_reviews_a_new_request_does_not_displace_for_one_that_waits() -> None:
    """Request 1, which is not new, goes before request 2, which is: so neither takes the row of request 0."""
    twins = Twins({0: 1.0, 1: 5.0, 2: 7.0}, [(3, 50)] * 3)
    twins.arrive(0)
    assert twins.round() == {0}
    twins.arrive(1)
    assert twins.round() == {0}
    twins.ranks[0] = 9.0
    twins.arrive(2)
    assert twins.round() == {0}


def test_a_new_request_displaces_where_none_that_waits_goes_before_it() -> None:
    twins = Twins({0: 1.0, 1: 5.0, 2: 4.0}, [(3, 50)] * 3)
    twins.arrive(0)
    twins.round()
    twins.arrive(1)
    twins.round()
    twins.ranks[0] = 9.0
    twins.arrive(2)
    assert twins.round() == {2}


@pytest.mark.parametrize("num_blocks", [AMPLE, 12], ids=["ample", "few blocks"])
def test_the_same_requests_have_rows_in_any_history(num_blocks: int) -> None:
    num_preemptions = 0
    for seed in range(40):
        chance = random.Random(seed)
        sizes = [(chance.randint(1, 20), chance.randint(1, 20)) for _ in range(20)]
        ranks = {number: chance.random() for number in range(20)}
        twins = Twins(
            ranks,
            sizes,
            rows=chance.randint(1, 4),
            num_blocks=num_blocks,
            window=chance.choice([1, 5]),
            review_rounds=chance.choice([1, 3, NEVER]),
            seed=seed,
        )
        coming = list(range(20))
        while coming or twins.live:
            while coming and chance.random() < 0.3:
                twins.arrive(coming.pop(0))
            for number in ranks:  # as policies change their minds
                if chance.random() < 0.1:
                    ranks[number] = chance.random()
            twins.round()
        num_preemptions += twins.scheduler.num_preemptions
    assert num_preemptions > 100


@pytest.mark.parametrize(
    ("max_prefill_tokens", "moves"), [(512, True), (4096, False)], ids=["in chunks", "at once"]
)
def test_kv_is_moved_where_the_engine_moves_it(max_prefill_tokens: int, moves: bool) -> None:
    """82 ms of moving 4096 positions, against 8 chunks of 10 ms more each, 121 ms, or one: 51 ms."""
    stages = STAGES | {"prefill": {"constant_ms": 10.0, "token_ms": 0.01}, "swap": {"token_ms": 0.02}}
    state = preempted(stages, max_prefill_tokens)
    assert cheaper_to_move(state.setup.latency, max_prefill_tokens)(4096) == moves
    assert (state.counts.swaps, state.counts.recomputed) == ((1, 0) if moves else (0, 4096))


def test_without_a_cost_of_moving_nothing_is_moved() -> None:
    stages = {name: cost for name, cost in STAGES.items() if name != "swap"}
    state = preempted(stages, 512)
    assert (state.counts.swaps, state.counts.recomputed, state.stall_s) == (0, 4096, 0.0)


def preempted(stages: dict[str, dict[str, Any]], max_prefill_tokens: int) -> BatchState:
    """A request of 4096 computed positions that has lost its row and its blocks."""
    engine = {"max_num_seqs": 1, "max_prefill_tokens": max_prefill_tokens}
    state = BatchState(make_setup([(4097, 9)], engine, stages, swap_bytes=1 << 40), FirstComeFirstServed())
    state.add(0)
    state.schedule()
    state.rows["prefill_left"] = 0
    state.make_room()
    return state
