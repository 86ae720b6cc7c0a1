"""Fits the costs of stages to measured points, and says how well the fit predicts points that were held
out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .model import Linear

Floats = NDArray[np.float64]
_FOLDS = 3
LEAST_POINTS = 6  # from which on a third of them can be held out
_WORTH = 0.5  # knots are believed in only if they lower the squared error of held-out points to this share
_ALIKE = 1e-6  # share of a column that others must leave unexplained, or it says nothing that they do not
# Of coefficients that say the same, the first is kept.
_COEFFICIENTS = ("constant_ms", "token_ms", "context_ms", "pair_ms", "row_ms")
_OF_TOKENS = _COEFFICIENTS.index("token_ms")
_ITERATIONS = 3  # of least squares, for each coefficient: each takes one in, and may drop others
_SLACK = 1e-9  # gradient of a coefficient that would be taken in for rounding's sake alone


@dataclass(frozen=True)
class Point:
    """A pass that was timed: what it was run over (see Linear), and its milliseconds."""

    stage: str
    rows: int
    tokens: int
    context_tokens: int
    ms: float

    def __post_init__(self) -> None:
        if self.rows < 1 or min(self.tokens, self.context_tokens) < 0 or not 0.0 < self.ms < float("inf"):
            raise ConfigError(
                f"{self}: a measured pass has at least one row, no negative counts, and a time above 0"
            )


Predict = Callable[[Sequence[Point]], Floats]  # points -> milliseconds of each


@dataclass(frozen=True)
class StageFit:
    """The cost of a stage, of `num_points` points.

    r2, mean_error   of points that were held out, each third in turn: the share of their variance that is
                     explained, and the mean of |predicted - measured| / measured; None where there are too
                     few points to hold any out
    """

    cost: Linear
    num_points: int
    r2: float | None
    mean_error: float | None

    @classmethod
    def of(cls, cost: Linear, points: Sequence[Point], predicted: Floats) -> StageFit:
        """predicted [points]: without each of them"""
        ms = np.array([point.ms for point in points])
        variance = float(((ms - ms.mean()) ** 2).sum())
        r2 = 1.0 - float(((predicted - ms) ** 2).sum()) / variance if variance > 0 else None
        return cls(cost, len(points), r2, float((np.abs(predicted - ms) / ms).mean()))

    @property
    def is_poor(self) -> bool:
        """Whether the cost is not to be relied on. A stage that costs the same everywhere has no variance to
        explain, but small errors."""
        return (
            self.r2 is not None and self.mean_error is not None and self.r2 < 0.9 and self.mean_error > 0.15
        )


def fit(points: Iterable[Point]) -> dict[str, StageFit]:
    """The cost of each stage that has points, each by itself."""
    return {stage: fit_stage(each) for stage, each in by_stage(points).items()}


def by_stage(points: Iterable[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.stage, []).append(point)
    return found


def fit_stage(points: Sequence[Point]) -> StageFit:
    """Non-negative least squares of relative errors over all points; up to which number of tokens there are
    knots, by what is held out."""
    if not points:
        raise ConfigError(
            "a stage without a measured pass has no cost; measure again: hispec profile JOB.yaml --latency"
        )
    if len(points) < LEAST_POINTS:
        return StageFit(_linear(points, 0.0), len(points), None, None)
    return StageFit.of(_best(points), points, held_out(points, lambda taken: predictor_of(_best(taken))))


def _best(points: Sequence[Point]) -> Linear:
    return _linear(
        points, most_with_knots(points, lambda taken, most: predictor_of(_linear(taken, most)), _WORTH)
    )


def most_with_knots(
    points: Sequence[Point], fitted: Callable[[Sequence[Point], float], Predict], worth: float
) -> float:
    """The number of tokens up to which knots lower the squared error of held-out points most, as far as each
    more of them lowers it to a share of `worth`; fitted: with knots up to so many tokens."""

    def error(most: float) -> float:
        return squared_error(points, held_out(points, lambda taken: fitted(taken, most)))

    best, least = 0.0, error(0.0)
    for most in _ends(points):
        if (found := error(most)) < worth * least:
            best, least = most, found
    return best


def squared_error(points: Sequence[Point], predicted: Floats) -> float:
    """Of the shares by which predictions [points] miss."""
    ms = np.array([point.ms for point in points])
    return float((((predicted - ms) / ms) ** 2).sum())


def _ends(points: Sequence[Point]) -> Iterator[float]:
    """Numbers of tokens up to which there may be knots: each about twice the one before, and the last but one
    that was measured, since beyond it there must be something to tell what a token costs."""
    tokens = sorted({float(point.tokens) for point in points})[1:-1]
    last = 0.0
    for each in tokens:
        if each >= 2 * last or each == tokens[-1]:
            yield each
            last = each


def held_out(points: Sequence[Point], fitted: Callable[[Sequence[Point]], Predict]) -> Floats:
    """[points]: the prediction of each by a fit to two thirds of the points, without itself."""
    order = np.random.default_rng(0).permutation(len(points))
    found = np.empty(len(points))
    for fold in range(_FOLDS):
        out = order[fold::_FOLDS]
        predict = fitted([points[at] for at in np.setdiff1d(order, out)])
        found[out] = predict([points[at] for at in out])
    return found


def predictor_of(cost: Linear) -> Predict:
    def predict(points: Sequence[Point]) -> Floats:
        rows, tokens, context_tokens, _ = _counts(points)
        return cost(rows, tokens, context_tokens)

    return predict


def _linear(points: Sequence[Point], most: float) -> Linear:
    terms = Terms.of(points, most)
    ms = np.array([point.ms for point in points])
    return terms.linear(non_negative(terms.columns(points) / ms[:, None]))


@dataclass(frozen=True)
class Terms:
    """What a cost is a sum of: coefficients, by places in _COEFFICIENTS, and stretches between knots."""

    told: tuple[int, ...]
    knots: tuple[float, ...]

    @classmethod
    def of(cls, points: Sequence[Point], most: float) -> Terms:
        """Those that the points tell apart, with a knot at every measured number of tokens up to `most`, if
        that are two or more."""
        told = _told_apart(_columns(points))
        tokens = {float(point.tokens) for point in points if point.tokens <= most}
        has_knots = len(tokens) > 1 and _OF_TOKENS in told
        return cls(tuple(told), tuple(sorted(tokens)) if has_knots else ())

    def columns(self, points: Sequence[Point]) -> Floats:
        """[points, terms]: what each point has of each."""
        columns, tokens = _columns(points), _counts(points)[1]
        if self.knots:
            columns[:, _OF_TOKENS] = np.maximum(tokens - self.knots[-1], 0.0)
        # A stretch between two knots is a column of its own: the share of it that a pass has behind it.
        stretches = [np.clip((tokens - low) / (high - low), 0.0, 1.0) for low, high in pairwise(self.knots)]
        return np.column_stack((columns[:, list(self.told)], *stretches))

    def linear(self, found: Floats) -> Linear:
        """The cost of so much [terms] of each."""
        values, risen = found[: len(self.told)].tolist(), [0.0, *found[len(self.told) :].cumsum().tolist()]
        return Linear(
            **{_COEFFICIENTS[at]: value for at, value in zip(self.told, values, strict=True)},
            knots=tuple(zip(self.knots, risen, strict=True)) if self.knots else (),
        )


def _counts(points: Sequence[Point]) -> Floats:
    """[4, points]: rows, tokens, context tokens, milliseconds."""
    return np.array([(point.rows, point.tokens, point.context_tokens, point.ms) for point in points], float).T


def _columns(points: Sequence[Point]) -> Floats:
    """[points, coefficients]: what each point has of each, without knots."""
    rows, tokens, context_tokens, _ = _counts(points)
    return np.stack(
        (np.ones_like(rows), tokens, context_tokens, tokens * context_tokens / rows, rows), axis=1
    )


def _told_apart(columns: Floats) -> list[int]:
    """Columns of [points, coefficients] that are no sum of those before them."""
    told: list[int] = []
    basis: list[Floats] = []
    for at, column in enumerate(columns.T):
        size = float(np.linalg.norm(column))
        rest = column - sum((float(axis @ column) * axis for axis in basis), np.zeros_like(column))
        if size > 0 and float(np.linalg.norm(rest)) > _ALIKE * size:
            told.append(at)
            basis.append(rest / np.linalg.norm(rest))
    return told


def non_negative(relative: Floats, target: Floats | None = None) -> Floats:
    """The x >= 0 that minimises |relative @ x - target|, relative [points, coefficients] in shares of what
    was measured, target [points] their weights, None = 1 each: Lawson's and Hanson's active sets (Solving
    Least Squares Problems, chapter 23)."""
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0  # a stretch that no point reaches
    scaled = relative / scale
    gram = scaled.T @ scaled
    wanted = scaled.sum(axis=0) if target is None else scaled.T @ target
    found, taken = np.zeros(len(scale)), np.zeros(len(scale), bool)
    for _ in range(_ITERATIONS * len(scale)):
        gradient = np.where(taken, -np.inf, wanted - gram @ found)
        best = int(gradient.argmax())
        if gradient[best] <= _SLACK:
            break
        taken[best] = True
        while True:
            solved = np.zeros(len(scale))
            solved[taken] = np.linalg.lstsq(gram[np.ix_(taken, taken)], wanted[taken], rcond=None)[0]
            falling = taken & (solved <= 0)
            if not falling.any():
                break
            # As far towards the solution as nothing is below 0; what is 0 then leaves.
            share = (found[falling] / (found[falling] - solved[falling])).min()
            found += share * (solved - found)
            taken &= found > _SLACK
            found[~taken] = 0.0
        found = solved
    return found / scale
