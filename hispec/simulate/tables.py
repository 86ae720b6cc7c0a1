"""Costs, acceptance and requests of an experiment as the arrays that compiled rounds read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..control.route_costs import CHECK_SLOT, LOOKUP_SLOT, SLOTS, layers_of, stages_by_slot
from ..latency.model import LatencyModel, Linear, num_bends, terms
from .config import MOST_POINTS, AcceptanceSettings, SimulationConfig
from .distributions import Floats, Ints
from .workload import Workload


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
    most = max((num_bends([each]) for each in latency.stages.values()), default=1)
    stages = np.zeros((num, len(SLOTS), 4 + 2 * most))
    passes = np.zeros((num, len(SLOTS)))
    looks_up, has_check = np.zeros(num, np.bool_), np.zeros(num, np.bool_)
    is_gated, gates = np.zeros(num, np.bool_), np.ones((num, 2))
    exit_tokens, positions = np.zeros(num, np.int64), np.ones((num, 3, 32))
    drift = np.zeros((num, 3, 2, MOST_POINTS))
    drift[:, :, 1] = 1.0
    for index, route in enumerate(routes):
        slots = stages_by_slot(route.route, ())
        for slot, names in slots.items():
            stages[index, slot] = _seconds([latency[name] for name in names], most)
        passes[index] = layers_of(route.route, num_layers) / num_layers
        looks_up[index], has_check[index] = LOOKUP_SLOT in slots, CHECK_SLOT in slots
        if route.gate is not None:
            is_gated[index], gates[index] = True, (route.gate.wrong, route.gate.right)
        exit_tokens[index] = route.route.most_computed
        for which, settings in enumerate((route.acceptance, route.exit_acceptance, route.verify_acceptance)):
            if settings is not None:
                _put_acceptance(settings, positions[index, which], drift[index, which])
    return Tables(
        stages,
        _seconds([latency["plain"]], most),
        _seconds([latency["prefill"]], most),
        _seconds([latency["round"]], most),
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


def _seconds(stages: Sequence[Linear], most_bends: int) -> Floats:
    ms = terms(stages, most_bends)
    ms[[0, 1, 2, 3, *range(5, len(ms), 2)]] /= 1e3
    return ms
