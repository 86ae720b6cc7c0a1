"""Discrete-time hazards of runs of accepted tokens, from censored observations [the Kaplan-Meier
estimator]."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .choice import Ints

Floats = NDArray[np.float64]
_NEAR = 0.5  # weight per position of distance, of earlier positions' counts in a position's prior
_SURPRISE = 3.0  # standard errors between expected and seen, beyond which older counts lose weight
_RECENT = 8.0  # rounds after which surprise is halved
_CORRELATED = 2.0  # variance of real runs over that of independent ones: there are easy and hard passages


class HazardTable:
    """For each of `num` entries and each position 1 to `width`: runs that reached the position (`survived`),
    among those that reached the one before and were not censored there (`at_risk`).

    survived / at_risk is unbiased however run caps were chosen, as long as they were chosen before the
    outcome was known. accepted / drafted is biased, since drafts after the first rejected one are never
    judged.

    Counts are halved every `window` rounds. An entry that was not observed for long loses them only at its
    next observation, and then keeps at least `weight`: old knowledge is the prior of the new. Where new
    counts contradict the old, these lose weight at once.
    """

    def __init__(self, num: int, width: int, window: float, weight: float) -> None:
        self.survived, self.at_risk = np.zeros((num, width)), np.zeros((num, width))
        self.last_round = np.full(num, -np.inf)
        # Seen minus expected successes, of late, and their variance.
        self._excess, self._variance = np.zeros(num), np.zeros(num)
        self._width, self._weight, self._decay = width, weight, math.log(2.0) / window
        distance = np.arange(width)[None, :] - np.arange(width)[:, None]
        self._nearness = np.where(distance > 0, _NEAR ** np.maximum(distance, 0), 0.0)

    def add(self, index: int, lengths: Ints, caps: Ints, round_index: float, rounds: int) -> None:
        """Runs of these lengths, each censored at its cap, seen in the last `rounds` rounds up to
        `round_index`."""
        width, lengths = self._width, np.minimum(lengths, caps)
        reached = np.bincount(np.minimum(lengths, width), minlength=width + 1)
        tried = np.bincount(np.minimum(np.minimum(lengths + 1, caps), width), minlength=width + 1)
        survived, at_risk = (each[::-1].cumsum()[-2::-1].astype(np.float64) for each in (reached, tried))
        self.add_counts(index, survived, at_risk, round_index, rounds)

    def add_counts(
        self, index: int, survived: Floats, at_risk: Floats, round_index: float, rounds: int
    ) -> None:
        """As `add`, for runs already counted by position [width]."""
        if at_risk.sum() <= 0:
            return
        old_survived, old_risk = self.survived[index], self.at_risk[index]
        old, factor = old_risk.sum(), 1.0
        if old > 0:
            age = max(round_index - self.last_round[index], 0.0)
            factor = max(math.exp(-self._decay * age), min(1.0, self._weight / old))
            factor *= self._discount(index, survived, at_risk, 0.5 ** (age / _RECENT))
        fresh = -math.expm1(-self._decay * rounds) / (self._decay * rounds)  # mean weight of these rounds
        self.survived[index] = factor * old_survived + fresh * survived
        self.at_risk[index] = factor * old_risk + fresh * at_risk
        self.last_round[index] = round_index

    def _discount(self, index: int, survived: Floats, at_risk: Floats, kept: float) -> float:
        """The weight of older counts beside these: 1, or less if recent ones, of which a share `kept` still
        counts, contradict them."""
        old_risk = self.at_risk[index]
        hazards = (self.survived[index] + 1.0) / (old_risk + 2.0)
        expected = at_risk * hazards
        variance = ((expected - expected * hazards) * (1.0 + at_risk / (old_risk + 2.0))).sum()
        self._excess[index] = kept * self._excess[index] + survived.sum() - expected.sum()
        self._variance[index] = kept * self._variance[index] + variance
        surprise = self._excess[index] ** 2 / (_CORRELATED * self._variance[index] + 1.0)
        if surprise <= _SURPRISE**2:
            return 1.0
        factor = min(0.5, float(_SURPRISE**2 / surprise))
        self._excess[index] *= factor
        self._variance[index] *= factor
        return factor

    def pooled(self, prior: Floats, weight: Floats | float | None = None) -> Floats:
        """[num]: the success rate over all positions, with `weight` (None = the table's) counts of the prior
        [num]."""
        weight = self._weight if weight is None else weight
        return (self.survived.sum(1) + weight * prior) / (self.at_risk.sum(1) + weight)

    def hazards(self, prior: Floats, prior_weight: Floats | float | None = None) -> Floats:
        """[num, width]: P(position reached | the one before reached). A position with few counts is drawn
        towards earlier positions, the nearest most, these towards the entry's mean, and this towards the
        prior [num]."""
        weight = self._weight
        near_risk = self.at_risk @ self._nearness
        near = (self.survived @ self._nearness + weight * self.pooled(prior, prior_weight)[:, None]) / (
            near_risk + weight
        )
        return (self.survived + weight * near) / (self.at_risk + weight)

    def counts(self, round_index: float) -> Floats:
        """[num]: how many counts would be left if the entry were observed at `round_index`."""
        with np.errstate(invalid="ignore"):
            age = np.maximum(round_index - self.last_round, 0.0)
            return np.where(
                np.isfinite(self.last_round), self.at_risk.sum(1) * np.exp(-self._decay * age), 0.0
            )


def survival(hazards: Floats) -> Floats:
    """[..., width] -> [..., width + 1]: P(position reached), which is 1 at position 0."""
    return np.concatenate([np.ones((*hazards.shape[:-1], 1)), np.cumprod(hazards, axis=-1)], axis=-1)


def shift_log_odds(hazards: Floats, shift: Floats | float) -> Floats:
    """Hazards whose odds are exp(shift) times as high."""
    odds = np.exp(shift)
    return hazards * odds / (1.0 - hazards + hazards * odds)
