"""Settings of stages and routes as the arrays that compiled rounds read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config import TRAITS
from ..errors import ConfigError
from ..latency.model import LatencyModel, Linear
from ..latency.profile import load
from .config import AcceptanceSettings, LatencySettings, RouteSettings
from .distributions import Floats, Ints

COMPUTED, LOOKED_UP, HYBRID = range(3)  # who drafts
# Columns of Costs.routes: who drafts, stages of passes (-1 = none), tokens of a hybrid's exit, whether there
# is a check tier.
KIND, PASS, FILL, CHECK, VERIFY, EXIT_TOKENS, HAS_CHECK, PLAIN_VERIFY = range(8)
PLAIN_STAGE, PREFILL_STAGE, ROUND_STAGE, LOOKUP_STAGE = range(4)
MOST_POINTS = 64


@dataclass(frozen=True)
class Costs:
    """What rounds cost and how right their drafts are.

    stages     [stages, 6] constant, per row, per token, per context token, per pair, in seconds; free tokens:
               as Linear
    buckets    numbers of rows that rounds are rounded up to; empty = rounds are packed
    routes     [routes, 8], as above
    passes     [routes, 4] passes over the whole model, for attained service: of a pass of the draft tier, a
               check, verify, verify without a check
    positions  [routes, 3, 32] factors of a chance, by place in its cycle: drafts, a hybrid's exit's,
               tentative tokens
    drift      [routes, 3, 2, points] seconds and factors
    """

    latency: LatencyModel
    stages: Floats
    is_static: bool
    buckets: Ints
    routes: Ints
    passes: Floats
    positions: Floats
    drift: Floats

    def prefill_s(self, num_positions: int) -> float:
        return self.latency["prefill"](1, num_positions, num_positions) / 1e3

    def plain_s(self, rows: int, context_tokens: int) -> float:
        return self.latency["plain"](rows, rows, context_tokens) / 1e3

    def swap_s(self, num_positions: int) -> float | None:
        """There and back; None without a `swap` stage."""
        return self.latency["swap"](1, num_positions, num_positions) / 1e3 if "swap" in self.latency else None


def latency_of(settings: LatencySettings) -> LatencyModel:
    """Raises ConfigError for a profile that cannot be read."""
    if settings.stages is not None:
        stages = {name: Linear(**each.model_dump()) for name, each in settings.stages.items()}
        return LatencyModel(stages, settings.is_static, settings.row_buckets)
    assert settings.path is not None
    return load(Path(settings.path)).model()


def make_costs(latency: LatencyModel, routes: Mapping[str, RouteSettings], num_layers: int) -> Costs:
    """Raises ConfigError if the latency model lacks a stage that a route runs."""
    names = ["plain", "prefill", "round", "lookup"]
    table = np.full((max(1, len(routes)), 8), -1, np.int64)
    passes, positions = np.zeros((max(1, len(routes)), 4)), np.ones((max(1, len(routes)), 3, 32))
    drift = np.zeros((max(1, len(routes)), 3, 2, MOST_POINTS))
    drift[:, :, 1] = 1.0

    def stage(name: str) -> int:
        if name not in names:
            names.append(name)
        return names.index(name)

    for index, route in enumerate(routes.values()):
        layer, check, top = route.draft_layer, route.check_layer, route.check_layer or route.draft_layer
        traits = TRAITS[route.kind]
        table[index, KIND] = HYBRID if traits.is_mixed else COMPUTED if traits.computes else LOOKED_UP
        if traits.has_model:
            table[index, PASS], table[index, FILL] = stage("draft_model"), stage("fill_model")
        elif traits.computes:
            table[index, PASS], table[index, FILL] = stage(f"draft/{layer}"), stage(f"fill/{layer}")
        table[index, HAS_CHECK] = check is not None
        if check is not None:
            table[index, CHECK] = stage(f"check/{layer}-{check}")
        table[index, VERIFY], table[index, PLAIN_VERIFY] = stage(f"verify/{top}"), stage(f"verify/{layer}")
        table[index, EXIT_TOKENS] = route.num_exit_tokens or 32
        passes[index] = (
            layer / num_layers,
            (top - layer) / num_layers,
            1.0 - top / num_layers,
            1.0 - layer / num_layers,
        )
        for which, settings in enumerate((route.acceptance, route.exit_acceptance, route.verify_acceptance)):
            if settings is not None:
                _put_acceptance(settings, positions[index, which], drift[index, which])
    stages = np.array([_seconds(latency, name) for name in names])
    buckets = np.array(latency.row_buckets if latency.is_static else (), np.int64)
    return Costs(latency, stages, latency.is_static, buckets, table, passes, positions, drift)


def _put_acceptance(settings: AcceptanceSettings, positions: Floats, drift: Floats) -> None:
    factors = settings.by_position
    positions[: len(factors)], positions[len(factors) :] = factors, factors[-1]
    if len(settings.drift) > MOST_POINTS:
        raise ConfigError(f"drift has {len(settings.drift)} points; {MOST_POINTS} at most")
    if settings.drift:
        points = np.array(settings.drift).T
        drift[:, : points.shape[1]], drift[:, points.shape[1] :] = points, points[:, -1:]


def _seconds(latency: LatencyModel, name: str) -> tuple[float, ...]:
    stage = latency[name]
    return (
        stage.constant_ms / 1e3,
        stage.row_ms / 1e3,
        stage.token_ms / 1e3,
        stage.context_ms / 1e3,
        stage.pair_ms / 1e3,
        stage.free_tokens,
    )
