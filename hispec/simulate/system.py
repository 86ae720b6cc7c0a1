"""One of the systems that are compared, with all its parts."""

from __future__ import annotations

from typing import Literal

from ..config import GoodputConfig
from ..control.choice import Control, FixedControl
from ..control.controller import GoodputControl
from ..errors import ConfigError
from ..scheduling.make import make_policy
from ..scheduling.policy import Policy
from ..scheduling.sjf import ShortestRemaining
from .batch_state import Setup
from .config import ControlSettings, SimulationConfig, SystemSettings
from .costs import Costs
from .predictors import make_predictor, predicted_lengths
from .replica import Replica
from .row_columns import Tables
from .workload import Workload


def make_replicas(
    config: SimulationConfig, system: SystemSettings, costs: Costs, workload: Workload, seed: int
) -> list[Replica]:
    """Raises ConfigError if a request can never have its blocks."""
    _check_room(config, workload)
    setup = Setup(
        config.engine,
        costs,
        workload,
        tables_of(costs, workload),
        system.scheduling.swap_bytes,
        route_numbers(config, system.control),
    )
    totals = predicted_lengths(system.predictor, workload.output_tokens, seed)
    replicas = []
    for index in range(config.replicas):
        control = make_control(config, system.control, costs, seed + index)
        left = None if system.srtf is None else _Left(setup, system.srtf, system.control.num_drafts or 0)
        policy: Policy = (
            make_policy(system.scheduling)
            if left is None
            else ShortestRemaining(left, system.scheduling.review_rounds)
        )
        replicas.append(
            Replica(index, setup, policy, control, make_predictor(totals, system.scheduling.expected_tokens))
        )
        if left is not None:
            left.replica = replicas[-1]
    return replicas


def tables_of(costs: Costs, workload: Workload) -> Tables:
    rounds, cycles = workload.recorded.rounds, workload.recorded.cycles
    return Tables(
        costs.stages,
        costs.is_static,
        costs.buckets,
        costs.routes,
        costs.passes,
        costs.positions,
        costs.drift,
        rounds,
        cycles,
    )


def route_numbers(config: SimulationConfig, control: ControlSettings) -> tuple[int, ...]:
    """Which of the experiment's routes those of a controller are."""
    names = {"plain": (), "fixed": (control.route,), "goodput": control.routes or tuple(config.routes)}[
        control.kind
    ]
    return tuple(list(config.routes).index(name) for name in names if name is not None)


def make_control(config: SimulationConfig, settings: ControlSettings, costs: Costs, seed: int) -> Control:
    every = [each.route for each in config.routes.values()]
    routes = [every[number] for number in route_numbers(config, settings)]
    if settings.kind == "plain":
        return FixedControl(None)
    if settings.kind == "fixed":
        return FixedControl(routes[0], routes[0].plan(settings.num_drafts or 0, settings.num_checks))
    return GoodputControl(routes, costs.latency, settings.goodput or GoodputConfig(), seed=seed)


class _Left:
    """What a request still needs: the true rounds, what is left of its prompt by what that costs in rounds;
    its true tokens; or those predicted."""

    replica: Replica

    def __init__(
        self, setup: Setup, what: Literal["service", "tokens", "predicted"], num_drafts: int
    ) -> None:
        from .round_parts_numba import rounds_left

        self._setup, self._what, self._num_drafts, self._rounds_left = setup, what, num_drafts, rounds_left
        self._route = setup.route_numbers[0] if setup.route_numbers else 0
        self._prefill_rounds = setup.costs.prefill_s(1024) / 1024 / setup.costs.plain_s(1, 256)
        self._known: dict[
            int, tuple[int, int]
        ] = {}  # by request: output tokens when it was asked last, rounds left then

    def __call__(self, request: int) -> float:
        workload, costs = self._setup.workload, self._setup.costs
        output, left = self.replica.progress_of(request)
        if self._what == "predicted":
            return self.replica.predicted(request, output) - output
        if self._what == "tokens":
            return float(workload.output_tokens[request] - output)
        known = self._known.get(request)
        if known is None or known[0] != output:
            rounds = self._rounds_left(
                workload.seeds[request],
                workload.shares[self._route, request],
                costs.positions[self._route],
                costs.routes[self._route],
                self._num_drafts,
                output,
                workload.output_tokens[request],
            )
            known = self._known[request] = output, int(rounds)
        return known[1] + left * self._prefill_rounds


def _check_room(config: SimulationConfig, workload: Workload) -> None:
    room = config.engine.num_kv_tokens
    if room is None:
        return
    window = max((each.most_checks * (each.most_drafts + 1) for each in config.routes.values()), default=1)
    largest = int((workload.prompt_tokens + workload.output_tokens).max()) + window + config.engine.block_size
    if largest > room:
        raise ConfigError(
            f"engine.num_kv_tokens={room} is less than one request may need ({largest} positions); raise it,"
            " or limit requests.*_tokens with `most`"
        )
