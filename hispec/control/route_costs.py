"""The stages that a route's rounds run, and their costs of many plans at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..latency.model import LatencyModel, cold_stage, num_bends, terms
from .choice import Ints, Route
from .hazards import Floats

# What a round runs, in its order; cold: what the first of several passes over the first layers takes more;
# bare: verify in place of a check that has nothing to judge. A plain round is a verify alone.
SLOTS = ("lookup", "cold", "feed", "draft", "fill", "check", "bare", "verify")
LOOKUP_SLOT, COLD_SLOT, FEED_SLOT, DRAFT_SLOT, FILL_SLOT, CHECK_SLOT, BARE_SLOT, VERIFY_SLOT = range(
    len(SLOTS)
)
Passes = NDArray[np.float64]  # [3, slots, plans]


def stages_by_slot(route: Route | None, along: Collection[int]) -> dict[int, list[str]]:
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
    if (cold_layer := low if route.traits.in_trunk else high) is not None:
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
    if high in along:  # a check's own pass has its exit's KV; verify in its place goes through its layer, too
        out[BARE_SLOT].append(f"along/{high}")
    return out


def layers_of(route: Route, num_layers: int) -> Ints:
    """[slots]: layers of the model in a pass; a draft model's own are none of them."""
    low = route.draft_layer
    top = low if route.check_layer is None else route.check_layer
    out = np.zeros(len(SLOTS), np.int64)
    out[[DRAFT_SLOT, FILL_SLOT, FEED_SLOT]] = low
    out[[CHECK_SLOT, BARE_SLOT, VERIFY_SLOT]] = top - low, num_layers - low, num_layers - top
    return out


def static_passes(
    drafts: Any, computed: Any, checks: Any, has_check: Any, computes: Any, branches: int = 1
) -> dict[int, tuple[Any, Any]]:
    """Of rounds of static shapes, in which none is left out: passes by slot, and places of a row in each of
    them; also of slots that the route has not. Numbers, or arrays [plans]: K, how many of them are computed,
    R; whether there is a check, whether drafts are computed."""
    places = branches * drafts + 1
    return {
        LOOKUP_SLOT: (checks, 1),
        COLD_SLOT: (np.where(computes, checks, 1), 1),
        FEED_SLOT: (checks, places),
        DRAFT_SLOT: (checks * computed, 1),
        FILL_SLOT: (checks, branches),
        CHECK_SLOT: (checks, places),
        VERIFY_SLOT: (1, np.where(has_check, checks * (drafts + 1), places)),  # a check leaves a chain
    }


class PlanCosts:
    """Of plans, by their routes. Raises ConfigError if the latency model lacks a stage."""

    def __init__(
        self, slots: Sequence[Mapping[int, Sequence[str]]], latency: LatencyModel, route: Ints
    ) -> None:
        """slots: of each route; route [plans]"""
        stages = [
            [[latency[name] for name in of_route.get(slot, ())] for of_route in slots]
            for slot in range(len(SLOTS))
        ]
        most = max(num_bends(each) for of_slot in stages for each in of_slot)
        of_routes = np.array([[terms(each, most) for each in of_slot] for of_slot in stages])
        # [terms, slots, plans]
        (self._least, self._row, self._context, self._pair), self._bends = np.split(
            np.moveaxis(of_routes[:, route], 2, 0), [4]
        )
        self._round = latency["round"]

    def milliseconds(self, passes: Passes, rows: int, paid: int, context_tokens: float) -> Floats:
        """[plans]: of rounds of so many rows, run as `paid` rows, of which those that stand for none attend
        to nothing; passes [3, slots, plans]: how many, and the rows and positions of all of them together,
        each pass being the mean of its slot's."""
        (num, of_rows, tokens), each = passes, context_tokens / paid
        beyond = np.maximum(tokens - self._bends[0::2] * num, 0.0)
        total = (
            self._least * num
            + (self._row + each * self._context) * of_rows
            + (self._bends[1::2] * beyond).sum(axis=0)
            + (each * self._pair) * tokens
        )
        return total.sum(axis=0) + float(self._round(float(rows), float(rows), context_tokens))
