"""The stages that a route's rounds run, and their costs of many plans at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..latency.model import NOTHING, LatencyModel, Linear, cold_stage
from .choice import Ints, Route
from .hazards import Floats

# What a round runs, in its order; cold: what the first of several passes over the first layers takes more;
# bare: verify in place of a check that has nothing to judge. A plain round is a verify alone.
SLOTS = ("lookup", "cold", "feed", "draft", "fill", "check", "bare", "verify")
LOOKUP_SLOT, COLD_SLOT, FEED_SLOT, DRAFT_SLOT, FILL_SLOT, CHECK_SLOT, BARE_SLOT, VERIFY_SLOT = range(
    len(SLOTS)
)
Passes = NDArray[np.float64]  # [3, slots, plans]


def slots_of(route: Route | None, along: Collection[int]) -> dict[int, list[str]]:
    """Names of the stages by slot; those of a slot are run over the same places. None = plain decoding.
    along: exits whose KV every round writes from whatever pass goes through their layer, unless the round
    computes it anyway."""
    if route is None:
        return {VERIFY_SLOT: ["plain", *(f"along/{layer}" for layer in sorted(along))]}
    low, high = route.draft_layer, route.check_layer
    out: dict[int, list[str]] = {VERIFY_SLOT: [f"verify/{low if high is None else high}"]}
    if high is not None:
        out[CHECK_SLOT], out[BARE_SLOT] = [f"check/{low}-{high}"], [f"verify/{low}"]
    if route.traits.looks_up:
        out[LOOKUP_SLOT] = ["lookup"]
    if route.traits.computes:
        name = "_model" if route.traits.has_model else f"/{low}"
        out[DRAFT_SLOT], out[FILL_SLOT] = [f"draft{name}"], [f"fill{name}"]
        if route.traits.is_mixed:
            out[FEED_SLOT] = [f"fill{name}"]
    drafts_by_exit = route.traits.computes and not route.traits.has_model
    if (cold_layer := low if drafts_by_exit else high) is not None:
        out[COLD_SLOT] = [cold_stage(cold_layer)]
    for layer in sorted(set(along) - {low, high}):
        if layer < low:
            passes = [slot for slot in (DRAFT_SLOT, FILL_SLOT, FEED_SLOT) if slot in out]
        else:
            passes = (
                [CHECK_SLOT, BARE_SLOT]
                if high is not None and layer < high
                else [VERIFY_SLOT]
                if high is None
                else [VERIFY_SLOT, BARE_SLOT]
            )
        for slot in passes:
            out[slot].append(f"along/{layer}")
    return out


class _Layer:
    """At most one stage per slot of each plan, as arrays [slots, plans] of Linear's fields, and
    [bends, slots, plans] of its bends."""

    def __init__(self, stages: Sequence[Mapping[int, Linear]], route: Ints) -> None:
        rows = [[stages[index].get(slot, NOTHING) for index in route.tolist()] for slot in range(len(SLOTS))]

        def field(name: str) -> Floats:
            return np.array([[getattr(stage, name) for stage in row] for row in rows])

        self.least, self.row = field("least_ms"), field("row_ms")
        self.context, self.pair = field("context_ms"), field("pair_ms")
        bends = [[stage.bends() for stage in row] for row in rows]
        most = max(len(each) for row in bends for each in row)
        padded = [[[*each, *[(0.0, 0.0)] * (most - len(each))] for each in row] for row in bends]
        self.bends, self.slopes = np.moveaxis(np.array(padded), (3, 2), (0, 1))

    def milliseconds(self, passes: Passes, context_per_row: float) -> Floats:
        """As Linear says, each pass being the mean of its slot's."""
        num, rows, tokens = passes
        beyond = np.maximum(tokens - self.bends * num, 0.0)
        total = (
            self.least * num
            + (self.row + context_per_row * self.context) * rows
            + (self.slopes * beyond).sum(axis=0)
            + (context_per_row * self.pair) * tokens
        )
        return total.sum(axis=0)


class StageCosts:
    """Of plans, by their routes. Raises ConfigError if the latency model lacks a stage."""

    def __init__(
        self, slots: Sequence[Mapping[int, Sequence[str]]], latency: LatencyModel, route: Ints
    ) -> None:
        """slots: of each route; route [plans]"""
        depth = max(len(names) for of_route in slots for names in of_route.values())
        layers = [
            [{slot: latency[names[at]] for slot, names in each.items() if at < len(names)} for each in slots]
            for at in range(depth)
        ]
        self._layers = [_Layer(stages, route) for stages in layers]
        self._round = latency["round"]

    def milliseconds(self, passes: Passes, rows: int, context_tokens: float) -> Floats:
        """[plans]: of rounds; passes [3, slots, plans]: how many, and the rows and positions of all of them
        together."""
        total = np.full(passes.shape[2], float(self._round(float(rows), float(rows), float(context_tokens))))
        for layer in self._layers:
            total += layer.milliseconds(passes, context_tokens / rows)
        return total
