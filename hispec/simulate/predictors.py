"""Length predictors of simulated engines: the engine's own, or one that knows the truth, more or less."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..scheduling.lengths import LengthPredictor, OnlineLengths
from .config import PredictorSettings
from .distributions import Floats, Ints
from .workload import Workload

_APART = 1 << 20  # tokens between the prompts of two requests, so that they begin differently
_GROWTH = 1.25  # an output that is longer than was predicted is taken to grow by a quarter


class KnownLengths:
    """The true length of each request times its error [requests]; who comes next is told by `expect`."""

    def __init__(self, totals: Floats) -> None:
        self._totals = totals
        self._next = 0

    def expect(self, request: int) -> None:
        self._next = request

    def predictor(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Callable[[int], float]:
        total = float(self._totals[self._next])

        def predict(generated: int) -> float:
            return min(
                float(max_tokens),
                max(total, _GROWTH * generated if generated >= total else 0.0, generated + 1.0),
            )

        return predict

    def finished(self, prompt_token_ids: Sequence[int], num_output: int) -> None:
        pass


def predicted_lengths(settings: PredictorSettings, output_tokens: Ints, seed: int) -> Floats | None:
    """[requests] what is predicted of each; None: the engine's own predictor does."""
    if settings.kind == "online":
        return None
    errors: Floats = np.random.default_rng([seed, 3]).normal(0.0, settings.sigma or 0.0, len(output_tokens))
    return np.asarray(output_tokens * np.exp(errors), np.float64)


def make_predictor(totals: Floats | None, expected_tokens: int) -> LengthPredictor:
    return OnlineLengths(expected_tokens) if totals is None else KnownLengths(totals)


def prompt_of(workload: Workload, request: int) -> range:
    """Token ids that stand for its prompt: those of a class with a template begin alike."""
    kind = int(workload.classes[request])
    first = kind if workload.has_template[kind] else (request + len(workload.class_names)) * _APART
    return range(first, first + int(workload.prompt_tokens[request]))
