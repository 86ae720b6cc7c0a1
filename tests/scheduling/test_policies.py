"""Policies: nobody is lost or starved, no row idles, and each serves in the order that it promises."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.config import SchedulingConfig
from hispec.errors import ConfigError, build
from hispec.scheduling.aging import Aging
from hispec.scheduling.laps import Laps
from hispec.scheduling.make import make_policy
from hispec.scheduling.mlfq import MultiLevelFeedback, queue_bounds
from hispec.scheduling.policy import FirstComeFirstServed, Job, Policy, Service
from hispec.scheduling.sjf import ShortestJobFirst, ShortestRemaining
from tests.helpers.scheduling_server import DRAFTS, Server, Task

NAMES = ["fcfs", "sjf", "mlfq", "laps"]
tasks = st.lists(
    st.builds(
        Task,
        st.integers(0, 60),
        st.integers(1, 60),
        st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        st.just(60),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=14,
)
configs = st.builds(
    SchedulingConfig,
    policy=st.sampled_from(NAMES),
    num_queues=st.integers(1, 5),
    first_quantum=st.sampled_from([1.0, 3.0, 10.0]),
    quantum_growth=st.sampled_from([1.5, 2.0]),
    stability_window=st.integers(2, 4),
    stability_tolerance=st.sampled_from([0.05, 0.3]),
    max_slowdown=st.sampled_from([None, 1.0, 2.0, 5.0]),
    expected_tokens=st.sampled_from([5, 50]),
    review_rounds=st.integers(1, 4),
)


class OracleLengths:
    """Knows the length of each task, by its prompt, which differs from task to task in `Server`."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = iter(tasks)

    def predictor(self, prompt_token_ids: object, max_tokens: int) -> Callable[[int], float]:
        length = next(self._tasks).length
        return lambda generated: float(max(length, generated + 1))

    def finished(self, prompt_token_ids: object, num_output: int) -> None:
        pass


def job(number: int, length: float = 50.0, arrival_s: float = 0.0, max_tokens: int = 1000) -> Job:
    return Job(number, arrival_s, 3, max_tokens, lambda generated: max(length, generated + 1.0))


def rounds(count: int, tokens: int = 1, accepted: int = 0, drafted: int = DRAFTS) -> Service:
    return Service(count, tokens, drafted, accepted, float(count), float(count))


@settings(max_examples=80, deadline=None)
@given(configs, tasks, st.integers(1, 3))
def test_nobody_is_lost_or_served_twice_and_no_row_is_free_while_somebody_waits(
    config: SchedulingConfig, tasks: list[Task], rows: int
) -> None:
    Server(make_policy(config), tasks, rows).run()


@settings(max_examples=60, deadline=None)
@given(configs, tasks, st.integers(1, 3), st.sampled_from([1.0, 1.5, 3.0]))
def test_nobody_is_starved_beyond_the_bound(
    config: SchedulingConfig, tasks: list[Task], rows: int, max_slowdown: float
) -> None:
    """As Aging's docstring states it: when a request is urgent at the latest, for whom it waits from then
    on, and for how many rounds."""
    config = config.model_copy(
        update={"policy": "laps" if config.policy == "fcfs" else config.policy, "max_slowdown": max_slowdown}
    )
    policy = make_policy(config)
    assert isinstance(policy, Aging)
    urgent_since: dict[int, int] = {}
    ran: dict[int, list[int]] = {
        i: [] for i in range(len(tasks))
    }  # the rounds in which each request had a row
    running_before: set[int] = set()

    def watch(server: Server) -> None:
        nonlocal running_before
        running = {request.number for request in server.scheduler.running}
        for request in server.live:
            number = request.number
            if policy.key(number, float(server.now))[0] == 0.0:
                urgent_since.setdefault(number, server.now)
            elif any(ran.values()):  # a round takes a second and a pass, and gives a token at least
                most = len(ran[number]) + request.max_tokens - request.num_output
                assert server.now - request.arrival_s <= max_slowdown * most * 1.001, (
                    "not urgent though the bound is passed"
                )
        first = min(
            (request.number for request in server.scheduler.waiting if request.number in urgent_since),
            default=None,
        )
        for number in running - running_before:
            assert first is None or (number in urgent_since and number < first), (
                "admitted before an urgent request that came earlier"
            )
        running_before = running
        for number in running:
            ran[number].append(server.now)

    server = Server(policy, tasks, rows)
    server.run(watch)
    for number, since in urgent_since.items():
        waited = sum(1 for now in range(since, server.finished_at[number]) if now not in ran[number])
        older = sum(1 for other in range(number) for now in ran[other] if now >= since)
        if policy.preempts:
            assert waited <= config.review_rounds + older / rows
        else:  # also for those that ran when it became urgent
            younger = sum(
                1
                for other in ran
                if other > number and since in ran[other]
                for now in ran[other]
                if now >= since
            )
            assert waited <= (older + younger) / rows


@given(tasks, st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_first_come_first_served_keeps_the_order(tasks: list[Task], rows: int) -> None:
    tasks = sorted(tasks, key=lambda task: task.arrival)
    server = Server(make_policy(SchedulingConfig()), tasks, rows)
    server.run()
    assert server.admitted == sorted(server.admitted)
    assert server.scheduler.num_preemptions == 0


def test_shortest_job_first_admits_by_predicted_length_and_never_preempts() -> None:
    tasks = [Task(0, 30, 0.0), Task(1, 20, 0.0), Task(1, 5, 0.0), Task(2, 10, 0.0), Task(32, 1, 0.0)]
    server = Server(ShortestJobFirst(), tasks, 1, predictor=OracleLengths(tasks))
    server.run()
    assert server.finished == [0, 2, 4, 3, 1] and server.scheduler.num_preemptions == 0


def run_oracle(tasks: list[Task]) -> Server:
    """Shortest true remaining service, one token a round."""
    left = {i: float(task.length) for i, task in enumerate(tasks)}

    def count_down(server: Server) -> None:
        for request in server.scheduler.running:
            left[request.number] -= 1

    server = Server(ShortestRemaining(lambda number: left[number]), tasks, 1)
    server.run(count_down)
    return server


def test_shortest_remaining_is_the_best_order_on_one_row() -> None:
    lengths = [9, 4, 7, 2]
    best = min(sum(itertools.accumulate(order)) for order in itertools.permutations(lengths)) / len(lengths)
    server = run_oracle([Task(0, length, 0.0) for length in lengths])
    assert server.mean_latency() == best and server.scheduler.num_preemptions == 0


def test_shortest_remaining_gives_the_row_to_whoever_comes_and_is_shorter() -> None:
    server = run_oracle([Task(0, 20, 0.0), Task(5, 3, 0.0), Task(5, 15, 0.0)])
    assert (
        server.finished == [1, 0, 2] and server.finished_at[1] == 8 and server.scheduler.num_preemptions == 1
    )


# ---- queues ----


def test_queues_end_at_the_sums_of_geometric_quanta() -> None:
    assert queue_bounds(4, 16.0, 2.0) == (16.0, 48.0, 112.0)
    assert queue_bounds(1, 16.0, 2.0) == ()
    assert all(math.isfinite(bound) for bound in queue_bounds(16, 1e9, 100.0))


def test_feedback_queues_sink_by_attained_service_and_keep_the_order_of_arrival_within() -> None:
    policy = MultiLevelFeedback((4.0, 12.0), review_rounds=1)
    for number in range(3):
        policy.add(job(number))
    policy.served(0, rounds(3))
    assert [policy.key(number, 0.0) for number in range(3)] == [(0, 0), (0, 1), (0, 2)]
    policy.served(0, Service(0, 0, 0, 0, 1.0, 1.0))  # prefill counts
    policy.served(1, rounds(100))
    assert [policy.key(number, 0.0) for number in range(3)] == [(1, 0), (2, 1), (0, 2)]
    assert (
        policy.displaces((0, 2), (1, 0))
        and not policy.displaces((0, 1), (0, 2))
        and not policy.displaces((1, 0), (0, 2))
    )


@pytest.mark.parametrize("name", ["mlfq", "laps"])
def test_a_short_request_takes_the_row_of_a_long_one(name: str) -> None:
    policy = make_policy(SchedulingConfig(policy=name, first_quantum=5.0, stability_window=50))
    server = Server(policy, [Task(0, 60, 0.0), Task(20, 4, 0.0)], 1)
    server.run()
    assert server.finished == [1, 0] and server.finished_at[1] == 24 and server.scheduler.num_preemptions == 1


# ---- LAPS-SD ----


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, DRAFTS), max_size=40), st.integers(2, 6), st.sampled_from([0.06, 0.21, 0.97]))
def test_a_request_becomes_perceptible_exactly_when_its_acceptance_is_stable(
    accepted: list[int], window: int, tolerance: float
) -> None:
    policy = Laps((1e9,), window, tolerance, 4)
    policy.add(job(0))
    was_stable = False
    for count in range(len(accepted)):
        policy.served(0, rounds(1, 1, accepted[count]))
        if count + 1 >= 2 * window:
            recent, before = (sum(accepted[end - window : end]) for end in (count + 1, count + 1 - window))
            was_stable |= abs(Fraction(recent - before, DRAFTS * window)) < tolerance
        assert policy.is_perceptible(0) == was_stable


def test_rounds_without_drafts_count_as_zero_acceptance_and_prefill_as_no_round() -> None:
    policy = Laps((1e9,), 2, 0.05, 4)
    policy.add(job(0))
    for _ in range(8):
        policy.served(0, Service(0, 0, 0, 0, 1.0, 1.0))
    for accepted in (4, 4):
        policy.served(0, rounds(1, 1, accepted))
    policy.served(0, rounds(1, 1, 0, drafted=0))
    policy.served(0, rounds(1, 1, 0, drafted=0))
    assert not policy.is_perceptible(0)
    policy.served(0, rounds(2, 2, 0, drafted=0))  # two rounds at once
    assert policy.is_perceptible(0)


def test_remaining_time_depends_on_length_and_on_acceptance() -> None:
    """Equal predicted lengths, so that only tokens per pass tell them apart; then equal paces, so that only
    lengths do."""
    policy = Laps(queue_bounds(6, 16.0, 2.0), 2, 1.0, 4)
    for number, (length, tokens) in enumerate([(200, 1), (200, 4), (100, 1)]):
        policy.add(job(number, length))
        for _ in range(4):
            policy.served(number, rounds(1, tokens, tokens - 1))
    keys = [policy.key(number, 0.0) for number in range(3)]
    assert [key[1] for key in keys] == [pytest.approx(196), pytest.approx(184 / 4), pytest.approx(96)]
    assert sorted(range(3), key=lambda number: keys[number]) == [1, 2, 0]
    assert [key[0] for key in keys] == [3, 1, 2]


def test_an_unstable_request_is_ordered_by_what_it_has_had_and_compares_with_what_others_still_need() -> None:
    policy = Laps((16.0,), 2, 0.05, 4)
    policy.add(job(0, 10.0))
    policy.add(job(1))
    policy.served(0, rounds(4, 4))  # stable, 6 of 10 are left
    assert policy.is_perceptible(0) and policy.key(0, 0.0) == (0, 6.0, 0)
    for attained, expected in ((2.0, [1, 0]), (5.0, [0, 1]), (30.0, [0, 1])):
        policy.served(1, Service(0, 0, 0, 0, attained, 1.0))
        assert sorted((0, 1), key=lambda number: policy.key(number, 0.0)) == expected


def test_an_estimate_that_jitters_about_a_bound_does_not_change_queues() -> None:
    remaining = {"tokens": 60.0}
    policy = Laps((48.0,), 2, 1.0, 4)
    policy.add(Job(0, 0.0, 1, 10_000, lambda generated: generated + remaining["tokens"]))
    policy.served(0, rounds(4, 4))
    queues = []
    for tokens in (49.0, 47.0, 49.0, 55.0, 47.0, 61.0, 49.0, 47.0):
        remaining["tokens"] = tokens
        policy.served(0, rounds(1))
        queues.append(policy.key(0, 0.0)[0])
    assert queues == [1, 0, 0, 0, 0, 1, 1, 0]


def test_laps_beats_fcfs_sjf_and_mlfq_where_lengths_and_acceptance_differ() -> None:
    generator = random.Random(3)
    tasks = []
    for _ in range(60):
        length = min(1000, 1 + int(generator.lognormvariate(4.5, 1.0)))
        tasks.append(Task(generator.randrange(4600), length, generator.choice([0.0, 0.5, 0.9]), 1000))
    tasks.sort(key=lambda task: task.arrival)
    mean = {}
    for name in NAMES:
        server = Server(
            make_policy(SchedulingConfig(policy=name)),
            tasks,
            1,
            num_blocks=1000,
            block_size=64,
            predictor=OracleLengths(tasks),
        )
        server.run()
        mean[name] = server.mean_latency()
    assert mean["laps"] < 0.8 * min(mean["fcfs"], mean["sjf"], mean["mlfq"]), mean


# ---- aging ----


def test_urgency_is_decided_by_time_here_against_time_alone() -> None:
    policy = Aging(FirstComeFirstServed(), 3.0)
    policy.add(job(0, 10.0))
    policy.add(job(1, 100.0))
    assert policy.key(0, 1e9) == (1.0, 0), "nothing was served yet, so nothing is known of time"
    policy.served(1, Service(1, 2, 4, 1, 1.0, 0.5))  # a pass takes half a second and gives two tokens
    # Alone, 0 would need 10 / 2 * 0.5 s; 1 has had 0.5 s and needs 98 / 2 * 0.5 more.
    for number, alone_s in ((0, 2.5), (1, 25.0)):
        assert policy.key(number, 3.0 * alone_s * 0.999) == (1.0, number)
        assert policy.key(number, 3.0 * alone_s * 1.001) == (0.0, number)
        assert policy.key(number, 0.0) == (0.0, number), "urgent until its end"
    assert policy.num_urgent == 2
    policy.served(0, Service(1, 2, 4, 1, 1.0, math.nan))
    policy.remove(0)
    policy.remove(0)


def test_the_urgent_displace_whom_they_go_before() -> None:
    policy = Aging(MultiLevelFeedback((4.0,), 2), 3.0)
    assert policy.preempts and policy.review_rounds == 2
    assert policy.displaces((0.0, 5), (1.0, 0, 1)) and not policy.displaces((1.0, 0, 1), (0.0, 5))
    assert policy.displaces((0.0, 4), (0.0, 5)) and not policy.displaces((0.0, 5), (0.0, 4))
    assert policy.displaces((1.0, 0, 9), (1.0, 1, 1)) and not policy.displaces((1.0, 0, 1), (1.0, 0, 9))


def test_without_aging_long_requests_may_starve_and_with_it_they_do_not() -> None:
    stream = [Task(0, 60, 0.0)] + [Task(4 * i, 4, 0.0) for i in range(300)]
    ends = {}
    for max_slowdown in (None, 4.0):
        config = SchedulingConfig(policy="mlfq", first_quantum=8.0, max_slowdown=max_slowdown)
        server = Server(make_policy(config), stream, 1, predictor=OracleLengths(stream))
        server.run()
        ends[max_slowdown] = server.finished_at[0]
    assert ends[None] > 1000 and ends[4.0] < 4.0 * 61 + 61 + 4, ends


# ---- settings ----


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fcfs", FirstComeFirstServed), ("sjf", ShortestJobFirst), ("mlfq", MultiLevelFeedback), ("laps", Laps)],
)
def test_settings_make_their_policy(name: str, kind: type) -> None:
    assert isinstance(make_policy(SchedulingConfig(policy=name, max_slowdown=None)), kind)
    aged: Policy = make_policy(SchedulingConfig(policy=name, review_rounds=7))
    assert isinstance(aged, kind if name == "fcfs" else Aging)
    assert aged.preempts == (name in ("mlfq", "laps")) and (not aged.preempts or aged.review_rounds == 7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "random"),
        ("num_queues", 0),
        ("num_queues", 17),
        ("first_quantum", 0.0),
        ("first_quantum", math.nan),
        ("first_quantum", math.inf),
        ("quantum_growth", 1.0),
        ("quantum_growth", 1e300),
        ("stability_window", 1),
        ("stability_tolerance", -0.1),
        ("stability_tolerance", math.nan),
        ("max_slowdown", 0.5),
        ("max_slowdown", math.nan),
        ("expected_tokens", 0),
        ("review_rounds", 0),
        ("swap_bytes", -1),
        ("num_queue", 3),
    ],
)
def test_impossible_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"scheduling.{field}: .*"):
        build(SchedulingConfig, {field: value}, "scheduling")


@pytest.mark.parametrize(
    "values",
    [
        (-1, 0, 0, 0, 1.0, 1.0),
        (1, -1, 0, 0, 1.0, 1.0),
        (1, 1, 2, 3, 1.0, 1.0),
        (1, 1, 0, 0, math.nan, 1.0),
        (1, 1, 0, 0, math.inf, 1.0),
        (1, 1, 0, 0, -1.0, 1.0),
        (1, 1, 0, 0, 1.0, -1.0),
        (1, 1, 0, 0, 1.0, math.inf),
    ],
)
def test_impossible_service_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="is impossible"):
        Service(*values)


@pytest.mark.parametrize(
    "changes",
    [{"arrival_s": math.nan}, {"arrival_s": math.inf}, {"num_prompt_tokens": -1}, {"max_tokens": 0}],
)
def test_impossible_jobs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"request 3: .*{next(iter(changes))}"):
        Job(
            **{
                "number": 3,
                "arrival_s": 0.0,
                "num_prompt_tokens": 1,
                "max_tokens": 1,
                "predict": float,
                **changes,
            }
        )
