"""The simulator against what queueing theory says: M/M/1, M/G/1, SRPT, Little's law, work conservation."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from hispec.simulate.config import SimulationConfig
from hispec.simulate.metrics import Run
from hispec.simulate.row_state import T_ROWS, T_STEP_S, T_TOKENS
from hispec.simulate.run import Experiment
from tests.helpers.simulations import experiment, latencies, run, share
from tests.helpers.sweeps import sweep

NUM = 12_000
POLICIES: dict[str, dict[str, Any]] = {
    name: {"scheduling": {"policy": name}} for name in ("fcfs", "sjf", "mlfq", "laps")
} | {"oracle": {"srtf": "service"}}


def single_server(output_tokens: dict[str, Any], rate: float, **systems: Any) -> SimulationConfig:
    """One row, 10 ms per token, prompts for nothing."""
    return experiment(
        engine={"max_num_seqs": 1},
        latency={"stages": {"plain": {"constant_ms": 10.0}, "prefill": {}}},
        requests={
            "num": NUM,
            "warm_up": 0.0,
            "prompt_tokens": {"value": 1},
            "output_tokens": output_tokens,
            "max_tokens": 100_000,
        },
        arrivals={"rates": [rate]},
        systems=systems or {"only": {}},
    )


def batch_means(values: np.ndarray[Any, np.dtype[np.float64]], batches: int = 20) -> tuple[float, float]:
    """Mean, and the half-width of its 99 % confidence interval, from means of consecutive batches, which
    hardly depend on each other."""
    means = values[: len(values) // batches * batches].reshape(batches, -1).mean(axis=1)
    return float(means.mean()), float(2.86 * means.std(ddof=1) / np.sqrt(batches))


@sweep(
    "output_tokens, rate",
    [
        ({"kind": "exponential", "mean": 100.0}, 0.7),
        ({"value": 100.0}, 0.8),
        ({"kind": "uniform", "low": 1, "high": 200}, 0.6),
    ],
    lambda case: case[1] == 0.7,
    ids=["M/M/1", "M/D/1", "M/U/1"],
)
def test_mean_latency_is_pollaczek_and_khinchines(output_tokens: dict[str, Any], rate: float) -> None:
    """W = E[S] + lambda E[S^2] / (2 (1 - rho)); of exponential service that is M/M/1's E[S] / (1 - rho)."""
    config = single_server(output_tokens, rate)
    done = run(config)
    service = np.array(done.alone_s)
    rho = rate * service.mean()
    expected = service.mean() + rate * (service**2).mean() / (2 * (1 - rho))
    if output_tokens.get("kind") == "exponential":
        assert expected == pytest.approx(service.mean() / (1 - rho), rel=0.03)
    mean, error = batch_means(latencies(done))
    assert abs(mean - expected) < error
    assert error < 0.15 * expected
    assert done.totals[T_STEP_S] / done.span_s == pytest.approx(rho, rel=0.04)


@pytest.mark.slow
def test_shortest_remaining_first_is_as_much_faster_as_schrage_says() -> None:
    """M/M/1 at rho = 0.7: FCFS 3.333 E[S], SRPT 1.875 E[S] [Schrage and Miller; integrated numerically
    below]."""
    rate, mean = 0.7, 1.0
    config = single_server({"kind": "exponential", "mean": 100.0}, rate, fcfs={}, oracle={"srtf": "service"})
    config = config.model_copy(update={"requests": config.requests.model_copy(update={"num": 5000})})
    x = np.linspace(1e-4, 30.0, 60_000)
    dx = x[1] - x[0]
    density, tail = np.exp(-x), np.exp(-x)
    load = rate * np.cumsum(x * density) * dx
    second = rate * (np.cumsum(x**2 * density) * dx + x**2 * tail)
    response = second / (2 * (1 - load) ** 2) + np.cumsum(1 / (1 - load)) * dx
    expected = float((response * density).sum() * dx) * mean
    first, oracle = (batch_means(latencies(run(config, name))) for name in ("fcfs", "oracle"))
    assert abs(oracle[0] - expected) < oracle[1] + 0.02 * expected
    assert oracle[0] + oracle[1] < first[0] - first[1]


def six_hundred(**systems: Any) -> SimulationConfig:
    config = single_server({"kind": "exponential", "mean": 100.0}, 0.8, **systems)
    return config.model_copy(update={"requests": config.requests.model_copy(update={"num": 600})})


@cache
def in_order() -> Run:
    return run(six_hundred(fcfs={}), "fcfs")


@pytest.mark.parametrize("name", POLICIES)
def test_littles_law_and_no_idle_row_while_somebody_waits(name: str) -> None:
    """Mean number in the system = rate * mean latency; on one row, the order does not change when the server
    is busy."""
    done, reference = run(six_hundred(only=POLICIES[name])), in_order()
    outcomes = done.outcomes
    changes = np.concatenate(
        [np.stack([outcomes.arrival_s, np.ones(600)]), np.stack([outcomes.finished_s, -np.ones(600)])],
        axis=1,
    )
    changes = changes[:, np.argsort(changes[0])]
    number = np.cumsum(changes[1])[:-1]
    area = float((number * np.diff(changes[0])).sum())
    assert area == pytest.approx(float(latencies(done).sum()), rel=1e-9)
    assert (number >= 0).all()
    # Work conserving: the same work, done at the same times.
    assert done.totals[T_STEP_S] == pytest.approx(reference.totals[T_STEP_S], rel=1e-9)
    assert outcomes.finished_s.max() == pytest.approx(reference.outcomes.finished_s.max(), rel=1e-9)
    assert done.totals[T_TOKENS] == done.output_tokens == done.totals[T_ROWS]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("room", [None, 400], ids=["enough blocks", "few blocks"])
def test_everybody_is_served_once_and_whole_under_every_policy(name: str, room: int | None) -> None:
    engine: dict[str, Any] = {"max_num_seqs": 3, "num_kv_tokens": room, "max_prefill_tokens": 24}
    routes = {
        "lookup": {"kind": "ngram", "most_drafts": 4, "match": {"value": 0.5}, "acceptance": share(0.6)}
    }
    control = {"kind": "fixed", "route": "lookup", "num_drafts": 4}
    requests = {
        "num": 400,
        "warm_up": 0.0,
        "max_tokens": 200,
        "prompt_tokens": {"kind": "uniform", "low": 1, "high": 150},
        "output_tokens": {"kind": "exponential", "mean": 40},
    }
    config = experiment(
        engine=engine,
        routes=routes,
        requests=requests,
        arrivals={"rates": [4.0]},
        systems={"only": POLICIES[name] | {"control": control}},
    )
    done = run(config)
    outcomes = done.outcomes
    assert np.isfinite(outcomes.finished_s).all()
    assert done.totals[T_TOKENS] == done.output_tokens
    assert (outcomes.arrival_s <= outcomes.first_token_s).all() and (
        outcomes.first_token_s <= outcomes.finished_s
    ).all()
    recomputed = sum(counts.recomputed + counts.swaps for counts in done.counts)
    assert recomputed > 0 if room else recomputed == 0
    if name in ("mlfq", "laps", "oracle"):
        assert sum(counts.preemptions for counts in done.counts) > 0


def test_first_come_first_served_starts_in_order() -> None:
    done = run(experiment(arrivals={"rates": [20.0]}))
    assert (np.diff(done.outcomes.first_token_s) >= 0).all()


@pytest.mark.parametrize("router", ["round_robin", "least_work"])
def test_replicas_share_the_work(router: str) -> None:
    requests = {
        "num": 3000,
        "prompt_tokens": {"value": 10},
        "output_tokens": {"kind": "exponential", "mean": 30},
    }
    config = experiment(replicas=50, router=router, requests=requests, arrivals={"rates": [250.0]})
    done = run(config)
    assert set(done.outcomes.replica.tolist()) == set(range(50))
    assert done.totals[T_TOKENS] == done.output_tokens


def test_least_work_is_better_than_round_robin_under_load() -> None:
    requests = {
        "num": 4000,
        "prompt_tokens": {"value": 10},
        "output_tokens": {"kind": "exponential", "mean": 100},
    }
    engine = {"max_num_seqs": 1}
    systems = {"only": {"predictor": {"kind": "exact"}}}
    means = [
        float(
            latencies(
                run(
                    experiment(
                        replicas=8,
                        router=router,
                        engine=engine,
                        requests=requests,
                        arrivals={"rates": [6.0]},
                        systems=systems,
                    )
                )
            ).mean()
        )
        for router in ("round_robin", "least_work")
    ]
    assert means[1] < 0.8 * means[0]


def test_one_replica_of_many_is_a_single_engine() -> None:
    """Round robin over two replicas: each serves every other request as an engine of its own would."""
    both = run(experiment(replicas=2, arrivals={"rates": [6.0]}))
    times = both.outcomes.arrival_s
    assert (both.outcomes.replica[1:] != both.outcomes.replica[:-1]).all()
    fast = run(experiment(arrivals={"kind": "recorded", "times": times.tolist()}))
    assert latencies(both).mean() < latencies(fast).mean()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_closed_loop_keeps_its_clients_busy(replicas: int) -> None:
    """So many, however many engines serve them."""
    closed = {"kind": "closed", "clients": [4]}
    config = experiment(engine={"max_num_seqs": 8}, arrivals=closed, replicas=replicas)
    done = run(config)
    in_system = latencies(done).sum() / done.span_s
    assert in_system == pytest.approx(4.0, rel=0.05)


def test_loads_in_shares_of_capacity_are_reached() -> None:
    requests = {
        "num": 4000,
        "prompt_tokens": {"value": 1},
        "output_tokens": {"kind": "exponential", "mean": 50},
    }
    config = experiment(engine={"max_num_seqs": 1}, requests=requests, arrivals={"utilisations": [0.7]})
    done = run(config)
    assert done.totals[T_STEP_S] / done.span_s == pytest.approx(0.7, rel=0.08)


@pytest.mark.parametrize("replicas", [1, 3])
def test_capacity_does_not_depend_on_how_many_requests_are_run(replicas: int) -> None:
    """It is that of the rows: each is always taken, and prompts cost nothing."""
    outputs = {"kind": "uniform", "low": 40, "high": 60}
    stages = {"plain": {"constant_ms": 10.0}, "prefill": {}}
    for num in (1, 20, 4000):
        config = experiment(
            latency={"stages": stages},
            requests={"num": num, "prompt_tokens": {"value": 1}, "output_tokens": outputs},
            arrivals={"utilisations": [0.5]},
            replicas=replicas,
        )
        rate = Experiment(config).rate(0.5, 0)
        assert rate == pytest.approx(0.5 * replicas * 4 * 100 / 50, rel=0.02)  # 100 rounds/s, 50 of a request


def test_runs_repeat_and_seeds_differ() -> None:
    config = experiment(arrivals={"rates": [3.0]})
    assert np.array_equal(latencies(run(config)), latencies(run(config)))
    assert not np.array_equal(latencies(run(config)), latencies(run(config, seed=1)))
