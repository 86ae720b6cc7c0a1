"""Looks for the fastest plans: all of a coarse grid, then the neighbours of the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..config import SpeculativeConfig
from .plans import kind_of, refined
from .predict import Prediction, Predictor

_REFINED = 20  # plans of each kind whose confidences are tried more finely


def search(predictor: Predictor, plans: Sequence[SpeculativeConfig]) -> tuple[list[Prediction], int]:
    """Predictions of all `plans` and of finer ones around the best of each kind, the fastest first; and how
    many these are."""
    found = predictor.predict_all(plans)
    near = [
        plan
        for prediction in best_of_each_kind(found, _REFINED)
        if prediction.plan is not None
        for plan in refined(prediction.plan)
    ]
    finer = predictor.predict_all(dict.fromkeys(near).keys() - set(plans))
    found = sorted(found + finer, key=lambda prediction: -prediction.tokens_per_s)
    return found, len(found)


def best_of_each_kind(predictions: Iterable[Prediction], top: int) -> list[Prediction]:
    """The first `top` of each kind, kind by kind in the order of their best; `predictions` has the fastest
    first."""
    kinds: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        if prediction.plan is not None:
            kinds.setdefault(kind_of(prediction.plan), []).append(prediction)
    return [prediction for of_kind in kinds.values() for prediction in of_kind[:top]]


def best_by_layers(predictions: Iterable[Prediction], top: int = 5) -> list[Prediction]:
    """The first `top` of each kind at each pair of layers: the whole search would make a file of many
    megabytes."""
    taken: dict[tuple[str, int | None, int | None], int] = {}
    kept = []
    for prediction in predictions:
        if (plan := prediction.plan) is None:
            continue
        place = kind_of(plan), plan.draft.layer, plan.check.layer if plan.check else None
        taken[place] = taken.get(place, 0) + 1
        if taken[place] <= top:
            kept.append(prediction)
    return kept
