"""Length predictors of simulated engines: the engine's own, or the truth with or without an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..scheduling.lengths import LengthPredictor, OnlineLengths
from .config import PredictorSettings
from .distributions import Floats, Ints
from .workload import Workload

_APART = 1 << 20  # token ids between the prompts of two requests, so that they begin differently
_GROWTH = 1.25  # factor by which an output that is already longer than predicted is assumed to grow


class KnownLengths:
    """Predicts totals [requests], the true lengths times an error. `expect` announces the next request."""

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
    """Predicted lengths [requests]; None = the engine's own predictor is used."""
    if settings.kind == "online":
        return None
    errors: Floats = np.random.default_rng([seed, 3]).normal(0.0, settings.sigma or 0.0, len(output_tokens))
    return np.asarray(output_tokens * np.exp(errors), np.float64)


def make_predictor(totals: Floats | None, expected_tokens: int) -> LengthPredictor:
    return OnlineLengths(expected_tokens) if totals is None else KnownLengths(totals)


def prompt_of(workload: Workload, request: int) -> range:
    """Token ids that stand for a request's prompt: those of a class with a template begin alike."""
    kind = int(workload.classes[request])
    first = kind if workload.has_template[kind] else (request + len(workload.class_names)) * _APART
    return range(first, first + int(workload.prompt_tokens[request]))
