"""The costs of all stages of a profile. Passes through the model's layers are fitted together: they differ
in how many layers they go through and what is read behind them, so that each of them says something of all.

A stage alone has a few dozen points, each as noisy as a machine that others share. On one such machine
verifies over one token seemed to take a fifth less than plain decoding, which is the same pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .fit import (
    LEAST_POINTS,
    Floats,
    Point,
    Predict,
    StageFit,
    Terms,
    by_stage,
    fit_stage,
    held_out,
    most_with_knots,
    non_negative,
    predictor_of,
)
from .model import Linear, cold_stage

_WORTH = 0.9  # knots are believed in if they lower the squared error of held-out points to this share
_WEIGHT_OF_PLAIN = 2.0  # plain decoding is sampled more often, and all else is compared with it
_WHOLE = "verify/0"  # where passes are linked, plain decoding is one over a token of each row


@dataclass(frozen=True)
class _Made:
    """What a pass is made of.

    layers      how many it goes through
    is_again    whether it follows another over the same layers, which a near cache may hold
    read        behind them: "model" or "exit/D"; None: nothing
    """

    layers: int
    is_again: bool
    read: str | None

    def parts(self) -> dict[tuple[bool, str], float]:
        """How much of what it has: of a layer, and of what is read."""
        found = {(self.is_again, "layer"): float(self.layers)}
        return found if self.read is None else found | {(self.is_again, self.read): 1.0}


def fit_profile(points: Iterable[Point], num_layers: int) -> dict[str, StageFit]:
    """The cost of each stage that has points, of a model with so many layers: of passes through them
    together, if they were timed as passes alone, and unless one by one they predict held-out points better;
    of other stages by itself. Plain decoding costs what a verify of the whole model does, however they are
    fitted: the speed of a plan is a ratio of the two. On a GPU, and where passes are not linked, a stage has
    work of its own besides its layers."""
    stages = by_stage(points)
    order = list(stages)
    if not any(stage.startswith("first/") for stage in stages):
        return {stage: fit_stage(each) for stage, each in stages.items()}
    if (plain := stages.pop("plain", None)) is not None:
        stages[_WHOLE] = [replace(point, stage=_WHOLE) for point in plain] + stages.get(_WHOLE, [])
    found = {stage: fit_stage(each) for stage, each in stages.items()}
    made = {stage: of for stage in stages if (of := _made_of(stage, num_layers))}
    passes = {stage: stages[stage] for stage in made}
    if sum(map(len, passes.values())) >= LEAST_POINTS:
        joint = _fit_passes(passes, made)
        if _error(joint) < _error({stage: found[stage] for stage in joint}):
            found |= joint
    if plain is not None:
        found["plain"] = found[_WHOLE]
    return {stage: found[stage] for stage in order if stage in found}


def _error(fits: Mapping[str, StageFit]) -> float:
    """The sum of the shares by which held-out points are missed."""
    return sum(each.num_points * each.mean_error for each in fits.values() if each.mean_error is not None)


def _fit_passes(passes: Mapping[str, list[Point]], made: Mapping[str, _Made]) -> dict[str, StageFit]:
    points = [point for each in passes.values() for point in each]

    def fitted(taken: Sequence[Point], most: float) -> Predict:
        return _predictor_of(_costs(taken, made, most))

    most = most_with_knots(points, fitted, _WORTH)
    costs, predicted = _costs(points, made, most), held_out(points, lambda taken: fitted(taken, most))
    found, first = {}, 0
    for stage, each in passes.items():
        of_stage = predicted[first : first + len(each)]
        first += len(each)
        if len(each) < LEAST_POINTS:
            found[stage] = StageFit(costs[stage], len(each), None, None)
        else:
            found[stage] = StageFit.of(costs[stage], each, of_stage)
    return found


def _costs(points: Sequence[Point], made: Mapping[str, _Made], most: float) -> dict[str, Linear]:
    """The cost of each stage that is `made` of something, with knots up to so many tokens: what it is made of
    has the same terms in all of them."""
    terms = Terms.of(points, most)
    parts = list(dict.fromkeys(part for each in made.values() for part in each.parts()))
    amounts = {
        stage: np.array([each.parts().get(part, 0.0) for part in parts]) for stage, each in made.items()
    }
    shares = np.stack([amounts[point.stage] for point in points])
    is_plain = [point.stage == _WHOLE and point.tokens == point.rows for point in points]
    weights = np.where(is_plain, _WEIGHT_OF_PLAIN, 1.0)
    ms = np.array([point.ms for point in points])
    columns = (shares[:, :, None] * terms.columns(points)[:, None, :]).reshape(len(points), -1)
    found = non_negative(columns * (weights / ms)[:, None], weights).reshape(len(parts), -1)
    return {stage: terms.linear(amount @ found) for stage, amount in amounts.items()}


def _predictor_of(costs: Mapping[str, Linear]) -> Predict:
    def predict(points: Sequence[Point]) -> Floats:
        places: dict[str, list[int]] = {}
        for place, point in enumerate(points):
            places.setdefault(point.stage, []).append(place)
        found = np.empty(len(points))
        for stage, of_stage in places.items():
            found[of_stage] = predictor_of(costs[stage])([points[place] for place in of_stage])
        return found

    return predict


def _made_of(stage: str, num_layers: int) -> _Made | None:
    """None: it is no pass through the model's layers."""
    kind, _, where = stage.partition("/")
    low, _, high = where.partition("-")
    if kind == "verify":
        return _Made(num_layers - int(low), False, "model")
    if kind == "check":
        return _Made(int(high) - int(low), int(low) == 0, f"exit/{high}")
    if kind == "first":
        return _Made(int(low), False, f"exit/{low}")
    if kind in ("draft", "fill"):
        return _Made(int(low), True, f"exit/{low}" if kind == "draft" else None)
    return None


def cold_stages(fits: Mapping[str, StageFit], layers: Iterable[int]) -> dict[str, StageFit]:
    """Of draft layers, the costs of their `cold` stages, where first passes were measured. One over a token
    of a single row tells them: weights are read once whatever it is."""
    found = {}
    for layer in layers:
        if (first := fits.get(f"first/{layer}")) is not None:
            more = float(first.cost(1.0, 1.0, 0.0)) - float(fits[f"draft/{layer}"].cost(1.0, 1.0, 0.0))
            cost = Linear(constant_ms=max(0.0, more))
            found[cold_stage(layer)] = StageFit(cost, first.num_points, None, None)
    return found
