"""What rounds of static shapes are predicted to run is what an engine runs in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from ee_models.decoder import Decoder
from hispec.config import SpeculativeConfig
from hispec.errors import build
from hispec.latency.model import LatencyModel, Linear
from hispec.profile.replay import Rounds
from hispec.profile.round_cost import PassTimes, round_costs
from hispec.sampling_params import SamplingParams
from tests.helpers.drafters import ALL, draft_decoder, drafter_engine
from tests.helpers.support import random_prompts

NO_ROUNDS = cast(Rounds, None)  # which are all alike


def times_by_layers(num_layers: int, token_ms: float = 0.0, **further: float) -> PassTimes:
    """A pass takes a millisecond a layer, with rows in buckets of 1 and 4."""
    ends = range(num_layers + 1)
    ms = {"plain": float(num_layers)}
    ms |= {f"{stage}/{hi}": float(hi) for stage in ("draft", "fill") for hi in ends}
    ms |= {f"verify/{lo}": float(num_layers - lo) for lo in ends}
    ms |= {f"check/{lo}-{hi}": float(hi - lo) for lo in ends for hi in ends if hi > lo}
    ms |= {f"shadow/{hi}": 0.0 for hi in ends if hi} | {"draft_model": 0.0, "fill_model": 0.0} | further
    stages: Mapping[str, Linear] = {
        name: Linear(constant_ms=cost, token_ms=token_ms) for name, cost in ms.items()
    }
    return PassTimes(LatencyModel(stages, is_static=True, row_buckets=(1, 4)), 0)


@pytest.mark.parametrize("name", ALL)
def test_layers_of_a_round_are_those_that_an_engine_runs(
    tiny_decoder: Decoder, tiny_path: Path, name: str
) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], draft_decoder(tiny_path), is_static=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.add_request(random_prompts((8,))[0], params)
    while engine.has_unfinished():
        engine.step()
    stats, num_layers = engine.stats(), tiny_decoder.config.num_layers
    ran = stats["layer_passes"] - stats["prefill_layer_passes"]
    plan = build(SpeculativeConfig, ALL[name])
    cost = round_costs(plan, NO_ROUNDS, [1], times_by_layers(num_layers), num_layers)[1]
    # A round may have been launched before it was known that the one before was the last.
    assert ran in (stats["rounds"] * cost.layers, (stats["rounds"] + 1) * cost.layers)
    assert cost.ms == pytest.approx(cost.layers)


def test_every_place_of_a_round_costs() -> None:
    values: dict[str, Any] = {
        "draft": {"kind": "hybrid", "layer": 2, "num_exit_tokens": 1},
        "check": {"kind": "exit", "layer": 5},
        "num_draft_tokens": 3,
        "num_checks": 2,
    }
    plan, times = build(SpeculativeConfig, values), times_by_layers(8, token_ms=1.0, lookup=10.0)
    costs = round_costs(plan, NO_ROUNDS, [1, 3], times, 8)
    # In each of two cycles a lookup; the exit's layers over four places, and over one twice; a check over
    # four. Verify is over eight.
    layers = 2 * (2 + 2 + 2 + 3) + 3
    tokens = 2 * (1 + 4 + 1 + 1 + 4) + 8
    assert costs[1] == (2 * 10.0 + layers + tokens, layers)
    assert costs[3] == (2 * 10.0 + layers + 4 * tokens, layers), "three rows run as four"
    tree = build(SpeculativeConfig, {**values, "draft": {"layer": 2}, "num_branches": 2})
    # In each of two cycles the exit's layers over one place, and twice, and to fill, over one of each branch,
    # with logits in parts; a check over seven. Of a tree it leaves a chain: verify is over eight.
    layers, tokens = 2 * (2 + 2 + 2 + 2 + 3) + 3, 2 * (1 + 2 * (2 + 2) + 2 + 7) + 8
    cold = times_by_layers(8, token_ms=1.0, **{"cold/2": 5.0})
    assert round_costs(tree, NO_ROUNDS, [1], cold, 8)[1] == (2 * (5.0 + 1.0) + layers + tokens, layers)
    plain = round_costs(None, NO_ROUNDS, [1, 3], times, 8)
    assert (plain[1], plain[3]) == ((8.0 + 1.0, 8), (8.0 + 4.0, 8))
