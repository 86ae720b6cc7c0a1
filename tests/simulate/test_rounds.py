"""Simulated rounds: what they cost, what they commit, what controllers are told of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hispec.control.acceptance_model import MOST_CHECKS, MOST_TENTATIVE, Estimates
from hispec.control.choice import FixedControl, Observation
from hispec.control.goodput import PlanGrid
from hispec.scheduling.policy import FirstComeFirstServed
from hispec.simulate.batch_state import Setup
from hispec.simulate.config import GateSettings, SimulationConfig
from hispec.simulate.metrics import figures
from hispec.simulate.predictors import make_predictor
from hispec.simulate.replica import Replica
from hispec.simulate.row_state import T_DRAFTED, T_KEPT, T_ROUND_S, T_ROUNDS, T_TOKENS
from hispec.simulate.system import route_numbers, with_latency
from hispec.simulate.tables import make_tables
from hispec.simulate.workload import make_workload
from tests.helpers.simulations import STAGES, experiment, run, share
from tests.helpers.sweeps import sweep

ROUTES: dict[str, dict[str, Any]] = {
    "exit": {"kind": "exit", "draft_layer": 4},
    "exit, checked": {"kind": "exit", "draft_layer": 4, "check_layer": 8, "most_checks": 3},
    "exit, gated": {
        "kind": "exit",
        "draft_layer": 4,
        "check_layer": 8,
        "most_checks": 3,
        "gate": {"right": 0.0, "wrong": 0.0},
    },
    "ngram": {"kind": "ngram"},
    "ngram, checked": {"kind": "ngram", "check_layer": 8, "most_checks": 3},
    "hybrid": {"kind": "hybrid", "draft_layer": 4, "num_exit_tokens": 2},
    "hybrid, checked": {
        "kind": "hybrid",
        "draft_layer": 4,
        "check_layer": 8,
        "most_checks": 3,
        "num_exit_tokens": 2,
    },
    "model": {"kind": "model"},
    "model, checked": {"kind": "model", "check_layer": 8, "most_checks": 2},
}


def of_route(name: str, kept: float, found: float = 1.0, **changes: Any) -> SimulationConfig:
    """Four requests at once, of 60 tokens after prompts of 1, by `name` with K = 4 and as many checks as
    there may be."""
    settings = ROUTES[name] | {"most_drafts": 4, "acceptance": share(kept)}
    if settings["kind"] in ("ngram", "hybrid"):
        settings["match"] = {"value": found}
    if settings["kind"] == "hybrid":
        settings["exit_acceptance"] = share(kept)
    if "check_layer" in settings:
        settings["verify_acceptance"] = share(kept)
    control = {"kind": "fixed", "route": name, "num_drafts": 4, "num_checks": settings.get("most_checks", 1)}
    requests = {
        "num": 4,
        "warm_up": 0.0,
        "prompt_tokens": {"value": 1},
        "output_tokens": {"value": 60},
        "max_tokens": 10_000,
    }
    values = {
        "routes": {name: settings},
        "requests": requests,
        "systems": {"only": {"control": control}},
        "arrivals": {"kind": "closed", "clients": [4]},
    }
    return experiment(**(values | changes))


@pytest.mark.parametrize("is_static", [False, True], ids=["packed", "static"])
@sweep(
    "name, kept, found",
    itertools.product(ROUTES, [1.0, 0.0], [1.0, 0.0]),
    lambda case: case[1] == case[2],
)
def test_rounds_cost_what_the_controller_expects_of_them(
    name: str, kept: float, found: float, is_static: bool
) -> None:
    """Where nothing is left to chance the two have to agree, stage by stage."""
    cold = {"cold/4": {"constant_ms": 0.7}, "cold/8": {"constant_ms": 1.1}}
    config = of_route(
        name,
        kept,
        found,
        latency={"stages": STAGES | cold, "is_static": is_static, "row_buckets": [6] if is_static else []},
    )
    done = run(config)
    route = config.routes[name].route
    grid = PlanGrid([route], with_latency(config)[1])
    plan = route.plan(4, route.most_checks)
    looks_up, is_found = route.kind in ("ngram", "hybrid"), found == 1.0 and route.kind in ("ngram", "hybrid")
    drafts = 4 if is_found or not looks_up else route.num_exit_tokens or 0
    reach = (np.arange(1, 5) <= drafts).astype(float)[None]
    none = np.zeros_like(reach)
    share_found = np.array([float(is_found and route.kind == "hybrid")])
    estimates = Estimates(
        reach * kept,
        np.full((1, MOST_TENTATIVE), kept),
        none if route.kind == "ngram" else np.ones((1, 4)),
        reach,
        share_found,
        np.full((1, MOST_CHECKS - 1), 1.0 - route.is_gated),
    )
    widths, size = grid.widths(estimates), grid.one(0, plan)
    rounds = int(done.totals[T_ROUNDS])
    assert rounds == np.ceil(60 / grid.tokens(widths, size)[0] - 1e-6)
    assert done.totals[T_ROUND_S] * 1e3 / rounds == pytest.approx(
        float(grid.milliseconds(widths, 4, 0.0, size)[0]), rel=1e-6
    )


def told(config: SimulationConfig) -> list[Observation]:
    """What a controller of this experiment's one fixed plan is told."""
    seen: list[Observation] = []

    class Told(FixedControl):
        def observe(self, observation: Observation) -> None:
            seen.append(observation)

    class Control:
        """Asked again after every 16 rounds, like one that decides."""

        is_due, rounds_left = True, 16

        def __init__(self) -> None:
            self._told = Told(route, plan)
            self.routes, self.choose, self.observe, self.forget, self.stats = (
                self._told.routes,
                self._told.choose,
                self._told.observe,
                self._told.forget,
                self._told.stats,
            )

    settings = config.systems["only"].control
    assert settings.route is not None and settings.num_drafts is not None
    route = config.routes[settings.route].route
    plan = route.plan(settings.num_drafts, settings.num_checks)
    latency, workload = with_latency(config)[1], make_workload(config, config.requests.num, 0)
    tables = make_tables(config, latency, workload)
    setup = Setup(config.engine, latency, workload, tables, 0, route_numbers(config, settings))
    replica = Replica(setup, FirstComeFirstServed(), Control(), make_predictor(None, 256))
    for request in range(len(workload)):
        replica.arrive(request, 0.0)
    while replica.end_s < np.inf:
        replica.advance()
    return seen


def gated(right: float, wrong: float) -> SimulationConfig:
    config = of_route("ngram, checked", 0.7, 0.8)
    route = config.routes["ngram, checked"]
    gate = GateSettings(right=right, wrong=wrong)
    return config.model_copy(update={"routes": {"ngram, checked": route.model_copy(update={"gate": gate})}})


def test_a_gate_that_is_always_right_loses_no_token() -> None:
    """Cycles after a wrong token bring nothing: without them rounds commit the same in less time."""
    never, perfect, always, blind = (
        run(config)
        for config in (
            of_route("ngram, checked", 0.7, 0.8),
            gated(1.0, 0.0),
            gated(1.0, 1.0),
            gated(0.3, 0.3),
        )
    )
    assert always.totals.tolist() == never.totals.tolist()
    assert perfect.totals[T_ROUNDS] == never.totals[T_ROUNDS] < blind.totals[T_ROUNDS]
    assert perfect.totals[T_ROUND_S] < never.totals[T_ROUND_S]
    assert perfect.totals[T_DRAFTED] < never.totals[T_DRAFTED]


def test_controllers_are_told_how_often_checks_went_on() -> None:
    went_on, asked, accepted, tentative = (
        np.concatenate([getattr(each, name) for each in told(gated(0.9, 0.1))])
        for name in ("went_on", "asked", "accepted", "tentative")
    )
    assert set((asked - went_on).tolist()) == {0, 1} and went_on.max() == 2 >= asked.max()
    is_right = accepted == tentative
    stopped = asked > went_on
    assert stopped[is_right].mean() < 0.5 < stopped[~is_right & (went_on < 2)].mean()


@pytest.mark.parametrize("name", ["exit", "exit, checked", "exit, gated", "ngram", "hybrid"])
def test_controllers_are_told_what_rounds_did(name: str) -> None:
    seen = told(of_route(name, 0.7, 0.5))
    assert sum(each.tokens for each in seen) == 4 * 60
    assert all(each.rounds <= 16 and each.num_rows <= 4 and each.seconds > 0.0 for each in seen)
    for each in seen:
        assert (
            (each.kept <= each.drafted).all() and (each.drafted <= each.caps).all() and (each.caps > 0).all()
        )
        assert (each.accepted <= each.tentative).all()
        assert set(each.numbers.tolist()) | set(each.rows.tolist()) <= set(range(4))
        assert (
            len(each.numbers) == len(each.caps) == len(each.drafted) == len(each.kept) == len(each.looked_up)
        )
    looked_up = np.concatenate([each.looked_up for each in seen])
    assert looked_up.any() == (name in ("ngram", "hybrid"))


def test_drafts_are_right_as_often_as_settings_say() -> None:
    """By position and over time; kept tokens of a cycle stop at the first wrong one, so the first position is
    the one to look at."""
    acceptance = share(0.8) | {"by_position": [1.0, 0.5], "drift": [[0.0, 1.0], [1e9, 1.0]]}
    routes = {"model": {"kind": "model", "most_drafts": 2, "acceptance": acceptance}}
    requests = {"num": 200, "prompt_tokens": {"value": 1}, "output_tokens": {"value": 200}}
    control = {"kind": "fixed", "route": "model", "num_drafts": 2}
    done = run(experiment(routes=routes, requests=requests, systems={"only": {"control": control}}))
    rounds = (
        done.totals[T_TOKENS] - done.totals[T_KEPT]
    )  # each commits one token more than it kept, but for the last of an output
    assert done.totals[T_KEPT] / rounds == pytest.approx(0.8 + 0.8 * 0.4, rel=0.03)


def test_acceptance_drifts() -> None:
    drift = {"drift": [[0.0, 1.0], [1.0, 1.0], [1.5, 0.0]]}
    routes = {"model": {"kind": "model", "most_drafts": 4, "acceptance": share(1.0) | drift}}
    requests = {
        "num": 1,
        "warm_up": 0.0,
        "prompt_tokens": {"value": 1},
        "output_tokens": {"value": 2000},
        "max_tokens": 2000,
    }
    control = {"kind": "fixed", "route": "model", "num_drafts": 4}
    done = run(
        experiment(
            routes=routes,
            requests=requests,
            systems={"only": {"control": control}},
            arrivals={"kind": "closed", "clients": [1]},
        )
    )
    assert 0.02 < done.totals[T_KEPT] / done.totals[T_DRAFTED] < 0.2


def test_the_same_draft_is_right_under_every_plan() -> None:
    """Common random numbers: with K = 1 and K = 4 the rounds that a request needs are those of one sequence
    of right and wrong drafts."""
    config = of_route("model", 0.6)
    systems = {f"K={k}": {"control": {"kind": "fixed", "route": "model", "num_drafts": k}} for k in (1, 4)}
    config = config.model_copy(
        update={"systems": experiment(routes={"model": config.routes["model"]}, systems=systems).systems}
    )
    one, four = run(config, "K=1"), run(config, "K=4")
    # No plan can need fewer rounds than there are wrong drafts, and longer ones never need more.
    assert four.totals[T_ROUNDS] < one.totals[T_ROUNDS]
    assert run(config, "K=4").totals.tolist() == four.totals.tolist()


def test_requests_of_a_class_are_drafted_as_the_class_says() -> None:
    classes = {
        "easy": {"weight": 1.0, "acceptance": {"model": {"value": 1.0}}, "output_tokens": {"value": 100}},
        "hard": {
            "weight": 3.0,
            "acceptance": {"model": {"value": 0.0}},
            "output_tokens": {"value": 50},
            "has_template": True,
        },
    }
    routes = {"model": {"kind": "model", "most_drafts": 4, "acceptance": share(0.5)}}
    workload = make_workload(experiment(routes=routes, requests={"num": 4000, "classes": classes}), 4000, 0)
    is_easy = workload.classes == 0
    assert is_easy.mean() == pytest.approx(0.25, abs=0.03)
    assert (workload.shares[0, is_easy, 0] == 1.0).all() and (workload.shares[0, ~is_easy, 0] == 0.0).all()
    assert set(workload.output_tokens[is_easy]) == {100} and set(workload.output_tokens[~is_easy]) == {50}


def test_kv_goes_to_host_memory_where_that_is_cheaper() -> None:
    engine: dict[str, Any] = {"max_num_seqs": 3, "num_kv_tokens": 400, "kv_bytes_per_token": 1024}
    outputs, prompts = {"kind": "exponential", "mean": 60}, {"kind": "uniform", "low": 50, "high": 150}
    requests = {"num": 200, "prompt_tokens": prompts, "output_tokens": outputs, "max_tokens": 200}
    dear = {**STAGES, "swap": {"constant_ms": 1000.0}}
    counts = {}
    for name, stages, swap_bytes in (
        ("kept", STAGES, 1 << 30),
        ("dear", dear, 1 << 30),
        ("no room", STAGES, 0),
    ):
        systems = {"only": {"scheduling": {"policy": "mlfq", "swap_bytes": swap_bytes}}}
        config = experiment(
            engine=engine,
            requests=requests,
            latency={"stages": stages},
            arrivals={"rates": [3.0]},
            systems=systems,
        )
        done = run(config)
        assert done.totals[T_TOKENS] == done.output_tokens
        counts[name] = (sum(each.swaps for each in done.counts), sum(each.recomputed for each in done.counts))
    assert counts["kept"][0] > 0 and counts["kept"][1] == 0
    assert counts["dear"][0] == counts["no room"][0] == 0
    assert counts["dear"][1] > 0 and counts["no room"][1] > 0


def test_moving_kv_counts_as_busy() -> None:
    """An engine with clients that send on at once is never idle."""
    engine: dict[str, Any] = {"max_num_seqs": 3, "num_kv_tokens": 400, "kv_bytes_per_token": 1024}
    outputs, prompts = {"kind": "exponential", "mean": 60}, {"kind": "uniform", "low": 50, "high": 150}
    config = experiment(
        engine=engine,
        requests={"num": 200, "prompt_tokens": prompts, "output_tokens": outputs, "max_tokens": 200},
        latency={"stages": {**STAGES, "swap": {"constant_ms": 1.9}}},
        arrivals={"kind": "closed", "clients": [6]},
        systems={"only": {"scheduling": {"policy": "mlfq"}}},
    )
    done = run(config)
    moved_s = sum(each.stall_s for each in done.counts)
    assert 0.0 < moved_s == pytest.approx(1.9e-3 * sum(each.swaps for each in done.counts))
    assert figures(config, config.systems["only"], [done])["utilisation"] == pytest.approx(1.0)


def test_goodput_takes_the_better_of_two_plans_and_plain_where_nothing_pays() -> None:
    requests = {"num": 300, "prompt_tokens": {"value": 10}, "output_tokens": {"value": 200}}
    for kept, expected in ((0.9, "model"), (0.02, "plain")):
        routes = {"model": {"kind": "model", "most_drafts": 4, "acceptance": share(kept)}}
        config = experiment(
            routes=routes, requests=requests, systems={"only": {"control": {"kind": "goodput"}}}
        )
        done = run(config)
        shares = {"plain": 0.0, "model": 0.0}
        for each in done.counts:
            for (route, _, _), rounds in each.rounds.items():
                shares["plain" if route < 0 else "model"] += rounds
        assert shares[expected] > 0.9 * sum(shares.values()), (kept, shares)
        assert done.totals[T_TOKENS] == done.output_tokens
