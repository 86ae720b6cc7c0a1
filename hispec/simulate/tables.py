"""Costs, acceptance and requests of an experiment as the arrays that compiled rounds read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..control.route_costs import (
    BARE_SLOT,
    CHECK_SLOT,
    DRAFT_SLOT,
    FEED_SLOT,
    FILL_SLOT,
    LOOKUP_SLOT,
    SLOTS,
    VERIFY_SLOT,
    slots_of,
)
from ..latency.model import LatencyModel, Linear
from .config import MOST_POINTS, AcceptanceSettings, SimulationConfig
from .distributions import Floats, Ints
from .workload import Workload

_NUM_TERMS = 4  # least, of a row, of a context token, of a pair


class Tables(NamedTuple):
    """Costs of stages are arrays [terms] of seconds: the least, of a row, of a context token, of a pair; then
    the tokens of each bend of a Linear, and what each token beyond costs more. Of those with fewer bends, the
    last are nothing.

    stages        [routes, slots, terms] of the passes of a round (see control/route_costs.py)
    plain, prefill, round_cost   [terms]
    passes        [routes, slots] attained service: a pass's layers over all layers
    buckets       row counts that rounds of static shapes are padded to
    looks_up      [routes] whether drafts are looked up
    exit_tokens   [routes] most drafts in a cycle in which nothing is found; 0 = of prompt lookup alone
    has_check, is_gated   [routes]
    gates         [routes, 2] share of checks that go on where they are wrong, and right
    positions     [routes, 3, 32] factors of an acceptance rate by position in the cycle: of drafts, of the
                  drafts of a hybrid's exit, of tentative tokens
    drift         [routes, 3, 2, points] of the same: seconds and factors
    shares        [routes, requests, 4], seeds [requests]: as Workload
    recorded_routes, recorded_rounds, recorded_cycles: as Recorded
    max_prefill_tokens, block_size: as EngineSettings
    """

    stages: Floats
    plain: Floats
    prefill: Floats
    round_cost: Floats
    passes: Floats
    is_static: bool
    buckets: Ints
    looks_up: NDArray[np.bool_]
    exit_tokens: Ints
    has_check: NDArray[np.bool_]
    is_gated: NDArray[np.bool_]
    gates: Floats
    positions: Floats
    drift: Floats
    shares: Floats
    seeds: NDArray[np.uint64]
    recorded_routes: Ints
    recorded_rounds: Ints
    recorded_cycles: Ints
    max_prefill_tokens: int
    block_size: int


def make_tables(config: SimulationConfig, latency: LatencyModel, workload: Workload) -> Tables:
    """Raises ConfigError if the latency model lacks a stage that a route runs."""
    routes, num_layers = list(config.routes.values()), config.engine.num_layers
    num = max(1, len(routes))
    num_bends = max((len(each.bends()) for each in latency.stages.values()), default=1)
    stages = np.zeros((num, len(SLOTS), _NUM_TERMS + 2 * num_bends))
    passes = np.zeros((num, len(SLOTS)))
    looks_up, has_check = np.zeros(num, np.bool_), np.zeros(num, np.bool_)
    is_gated, gates = np.zeros(num, np.bool_), np.ones((num, 2))
    exit_tokens, positions = np.zeros(num, np.int64), np.ones((num, 3, 32))
    drift = np.zeros((num, 3, 2, MOST_POINTS))
    drift[:, :, 1] = 1.0
    for index, route in enumerate(routes):
        slots, low, high = (
            slots_of(route.route, ()),
            route.draft_layer,
            route.check_layer or route.draft_layer,
        )
        for slot, (name,) in slots.items():
            stages[index, slot] = _seconds(latency[name], num_bends)
        looks_up[index], has_check[index] = LOOKUP_SLOT in slots, CHECK_SLOT in slots
        if route.gate is not None:
            is_gated[index], gates[index] = True, (route.gate.wrong, route.gate.right)
        exit_tokens[index] = (route.num_exit_tokens or 32) if DRAFT_SLOT in slots else 0
        passes[index, [DRAFT_SLOT, FILL_SLOT, FEED_SLOT]] = low / num_layers
        passes[index, CHECK_SLOT] = (high - low) / num_layers
        passes[index, BARE_SLOT], passes[index, VERIFY_SLOT] = 1.0 - low / num_layers, 1.0 - high / num_layers
        for which, settings in enumerate((route.acceptance, route.exit_acceptance, route.verify_acceptance)):
            if settings is not None:
                _put_acceptance(settings, positions[index, which], drift[index, which])
    return Tables(
        stages,
        _seconds(latency["plain"], num_bends),
        _seconds(latency["prefill"], num_bends),
        _seconds(latency["round"], num_bends),
        passes,
        latency.is_static,
        np.array(latency.row_buckets, np.int64),
        looks_up,
        exit_tokens,
        has_check,
        is_gated,
        gates,
        positions,
        drift,
        workload.shares,
        workload.seeds,
        workload.recorded.routes,
        workload.recorded.rounds,
        workload.recorded.cycles,
        config.engine.max_prefill_tokens,
        config.engine.block_size,
    )


def _put_acceptance(settings: AcceptanceSettings, positions: Floats, drift: Floats) -> None:
    factors = settings.by_position
    positions[: len(factors)], positions[len(factors) :] = factors, factors[-1]
    if settings.drift:
        points = np.array(settings.drift).T
        drift[:, : points.shape[1]], drift[:, points.shape[1] :] = points, points[:, -1:]


def _seconds(cost: Linear, num_bends: int) -> Floats:
    terms = [cost.least_ms, cost.row_ms, cost.context_ms, cost.pair_ms]
    bends = [(tokens, slope / 1e3) for tokens, slope in cost.bends()]
    padded = [*bends, *[(0.0, 0.0)] * (num_bends - len(bends))]
    return np.array([*(ms / 1e3 for ms in terms), *(value for bend in padded for value in bend)])
