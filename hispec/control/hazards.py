"""How far runs of tokens get, place by place, where how far each might have gone differs: hazards [Kaplan and
Meier]."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .choice import Ints

Floats = NDArray[np.float64]
# what an earlier place's counts weigh per place of distance, where a place is to be told from those before it
_NEAR = 0.5
_SURPRISE = (
    3.0  # standard errors between what was expected and what was seen, beyond which older counts lose weight
)
_RECENT = 8.0  # rounds, after which surprise is halved
_CORRELATED = 2.0  # variance of real runs, in that of independent ones: easy and hard passages


class HazardTable:
    """Of each of `num` things: how many runs got to a place (1 to `width`), among those that got to the one
    before and might have gone on.

    The share of them is unbiased however the limits of runs were chosen, as long as that was before their
    outcome was known; the share of kept tokens among all is not, since what stands after the first wrong one
    is never judged.

    Counts are halved every `window` rounds. What was not observed for long loses them only when it is
    observed again, and then keeps as many as `weight`: what was known is the prior of what is new. Where new
    counts contradict the old, these lose weight at once.
    """

    def __init__(self, num: int, width: int, window: float, weight: float) -> None:
        self.survived, self.at_risk = np.zeros((num, width)), np.zeros((num, width))
        self.seen_at = np.full(num, -np.inf)  # round of the last observation
        self._excess, self._spread = (
            np.zeros(num),
            np.zeros(num),
        )  # of what was seen lately over what was expected
        self._width, self._weight, self._halving = width, weight, math.log(2.0) / window
        distance = np.arange(width)[None, :] - np.arange(width)[:, None]
        self._nearness = np.where(distance > 0, _NEAR ** np.maximum(distance, 0), 0.0)

    def add(self, index: int, lengths: Ints, caps: Ints, now: float, rounds: int) -> None:
        """Runs of these lengths, each of which might have been as long as its cap, seen in the last `rounds`
        rounds before `now`."""
        width = self._width
        lengths = np.minimum(lengths, caps)
        far = np.bincount(np.minimum(lengths, width), minlength=width + 1)
        tried = np.bincount(np.minimum(np.minimum(lengths + 1, caps), width), minlength=width + 1)
        self.count(
            index,
            far[::-1].cumsum()[-2::-1].astype(np.float64),
            tried[::-1].cumsum()[-2::-1].astype(np.float64),
            now,
            rounds,
        )

    def count(self, index: int, survived: Floats, at_risk: Floats, now: float, rounds: int) -> None:
        """As `add`, for runs that were counted by place [width]."""
        total = at_risk.sum()
        if total <= 0:
            return
        old_survived, old_risk = self.survived[index], self.at_risk[index]
        old, factor = old_risk.sum(), 1.0
        if old > 0:
            age = max(now - self.seen_at[index], 0.0)
            factor = max(math.exp(-self._halving * age), min(1.0, self._weight / old))
            factor *= self._trust(index, survived, at_risk, 0.5 ** (age / _RECENT))
        fresh = -math.expm1(-self._halving * rounds) / (self._halving * rounds)  # their mean weight
        self.survived[index] = factor * old_survived + fresh * survived
        self.at_risk[index] = factor * old_risk + fresh * at_risk
        self.seen_at[index] = now

    def _trust(self, index: int, survived: Floats, at_risk: Floats, kept: float) -> float:
        """What older counts are worth beside these: less if the last ones, of which so much is kept,
        contradict them."""
        old_risk = self.at_risk[index]
        hazards = (self.survived[index] + 1.0) / (old_risk + 2.0)
        expected = at_risk * hazards
        variance = ((expected - expected * hazards) * (1.0 + at_risk / (old_risk + 2.0))).sum()
        self._excess[index] = kept * self._excess[index] + survived.sum() - expected.sum()
        self._spread[index] = kept * self._spread[index] + variance
        surprise = self._excess[index] ** 2 / (_CORRELATED * self._spread[index] + 1.0)
        if surprise <= _SURPRISE**2:
            return 1.0
        factor = min(0.5, float(_SURPRISE**2 / surprise))
        self._excess[index] *= factor
        self._spread[index] *= factor
        return factor

    def pooled(self, prior: Floats, weight: Floats | float | None = None) -> Floats:
        """[num]: the share of all places that were got to, with so many counts of the prior [num]; None =
        `weight`."""
        weight = self._weight if weight is None else weight
        return (self.survived.sum(1) + weight * prior) / (self.at_risk.sum(1) + weight)

    def hazards(self, prior: Floats, prior_weight: Floats | float | None = None) -> Floats:
        """[num, width]: the chance to get from one place to the next. A place with few counts takes after
        those before it, the nearest most, and these after all of the thing's places, and these after the
        prior [num]."""
        weight = self._weight
        near_risk = self.at_risk @ self._nearness
        near = (self.survived @ self._nearness + weight * self.pooled(prior, prior_weight)[:, None]) / (
            near_risk + weight
        )
        return (self.survived + weight * near) / (self.at_risk + weight)

    def counts(self, now: float) -> Floats:
        """[num]: how many counts there would be if it were observed now."""
        with np.errstate(invalid="ignore"):
            return np.where(
                np.isfinite(self.seen_at),
                self.at_risk.sum(1) * np.exp(-self._halving * np.maximum(now - self.seen_at, 0.0)),
                0.0,
            )


def survival(hazards: Floats) -> Floats:
    """[..., width] -> [..., width + 1]: the chance to get so far, of which place 0 is sure."""
    return np.concatenate([np.ones((*hazards.shape[:-1], 1)), np.cumprod(hazards, axis=-1)], axis=-1)


def shifted(hazards: Floats, shift: Floats | float) -> Floats:
    """Hazards whose odds are exp(shift) times as high."""
    if np.all(np.asarray(shift) == 0.0):
        return hazards
    odds = np.exp(shift)
    return hazards * odds / (1.0 - hazards + hazards * odds)
