"""Predicts output lengths, on arrival and again while outputs grow."""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import ConfigError, shown

_log = logging.getLogger(__name__)
_WINDOW = 256  # recent lengths kept per class
_TEMPLATES = 256  # templates kept; the least recently used is dropped
_TEMPLATE_TOKENS = 16  # first prompt tokens, which identify a template
_PARENT_WEIGHT = 4.0  # weight of the wider class's mean in a narrower class, in lengths


class LengthPredictor(Protocol):
    """The interface of length predictors; users may supply their own."""

    def predictor(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Callable[[int], float]:
        """Returns, for a new request, a function from the number of tokens generated so far to the expected
        length of its output. It is called again as the output grows; results are clipped to
        [generated + 1, max_tokens]."""

    def finished(self, prompt_token_ids: Sequence[int], num_output: int) -> None:
        """Learns from a request that ended, by itself or at its max_tokens, with so many tokens."""


def check_predictor(given: Any) -> None:
    """Raises ConfigError for what is no LengthPredictor."""
    if not hasattr(given, "predictor"):
        raise ConfigError(
            f"length_predictor={shown(given)} is no LengthPredictor (hispec/scheduling/lengths.py); leave it"
            " out to learn lengths from ended requests"
        )


class _Lengths:
    """Recent output lengths of one class of requests, in the order they came and sorted."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # cumulative sums of the sorted lengths; None = out of date

    def add(self, length: int) -> None:
        """Adds a length and drops the oldest beyond the window. O(window)."""
        if len(self._recent) == _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = None

    def beyond(self, generated: int) -> tuple[int, float]:
        """Number of lengths > generated, and their total excess over it. O(log window)."""
        if self._sums is None:
            self._sums = [0, *itertools.accumulate(self._sorted)]
        first = bisect_right(self._sorted, generated)
        count = len(self._sorted) - first
        return count, self._sums[-1] - self._sums[first] - count * generated


class OnlineLengths:
    """Learns from finished requests, in three nested classes: prompts of the same template (first tokens) and
    about the same length; prompts of about the same length; all.

    Expected residual = mean of (L - generated) over the recent lengths L > generated of a class, in which the
    wider class's mean counts for `_PARENT_WEIGHT` lengths. Where no length was that long, lengths are taken
    as memoryless: the residual is that of a new request. While nothing has finished, `expected_tokens` is
    assumed. Memory is bounded: `_WINDOW` lengths for each of `_TEMPLATES` templates, for each power of two of
    prompt lengths, and for all.
    """

    def __init__(self, expected_tokens: int = 256) -> None:
        if expected_tokens < 1:
            raise ConfigError(f"expected_tokens={expected_tokens!r} must be at least 1")
        self._expected_tokens = expected_tokens
        self._all = _Lengths()
        self._by_size: dict[int, _Lengths] = {}
        self._by_template: OrderedDict[tuple[int, ...], _Lengths] = OrderedDict()

    def predictor(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Callable[[int], float]:
        if max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens!r} must be at least 1")
        classes = self._classes(prompt_token_ids)

        def predict(generated: int) -> float:
            mean = float(self._expected_tokens)
            for lengths in classes:
                mean = _blend(lengths, 0, mean)
            residual = mean
            if generated:
                for lengths in classes:
                    residual = _blend(lengths, generated, residual)
            return _clip(generated + residual, generated, max_tokens)

        return predict

    def finished(self, prompt_token_ids: Sequence[int], num_output: int) -> None:
        if num_output < 0:
            raise ConfigError(f"num_output={num_output!r} must be at least 0")
        for lengths in self._classes(prompt_token_ids):
            lengths.add(num_output)

    def _classes(self, prompt_token_ids: Sequence[int]) -> tuple[_Lengths, ...]:
        """The request's classes, from the widest to the narrowest."""
        size = len(prompt_token_ids).bit_length()
        by_size = self._by_size.setdefault(size, _Lengths())
        key = (size, *prompt_token_ids[:_TEMPLATE_TOKENS])
        by_template = self._by_template.get(key)
        if by_template is None:
            by_template = self._by_template[key] = _Lengths()
            if len(self._by_template) > _TEMPLATES:
                self._by_template.popitem(last=False)
        self._by_template.move_to_end(key)
        return self._all, by_size, by_template


class GuardedLengths:
    """A user's predictor; wherever it fails, the default answers in its place.

    num_failures   calls that raised an error or did not return a number; the first is logged
    """

    def __init__(self, hook: LengthPredictor, default: LengthPredictor) -> None:
        self.num_failures = 0
        self._hook, self._default = hook, default

    def predictor(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Callable[[int], float]:
        default = self._default.predictor(prompt_token_ids, max_tokens)
        try:
            predict_by_hook = self._hook.predictor(prompt_token_ids, max_tokens)
        except Exception as error:  # a hook is the caller's code
            self._failed(error)
            return default

        def predict(generated: int) -> float:
            try:
                total = float(predict_by_hook(generated))
                if math.isnan(total):
                    raise ValueError("it predicts nan tokens")
            except Exception as error:
                self._failed(error)
                return default(generated)
            return _clip(total, generated, max_tokens)

        return predict

    def finished(self, prompt_token_ids: Sequence[int], num_output: int) -> None:
        self._default.finished(prompt_token_ids, num_output)
        try:
            self._hook.finished(prompt_token_ids, num_output)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            _log.warning(
                "the length predictor failed (%s: %s); the default one answers instead",
                type(error).__name__,
                error,
            )


def make_lengths(expected_tokens: int, hook: LengthPredictor | None = None) -> LengthPredictor:
    """Makes the default predictor, or the user's with the default as fallback."""
    default = OnlineLengths(expected_tokens)
    return default if hook is None else GuardedLengths(hook, default)


def _blend(lengths: _Lengths, generated: int, wider: float) -> float:
    """Mean residual in a class, shrunk towards that of the wider class."""
    count, total = lengths.beyond(generated)
    return (total + _PARENT_WEIGHT * wider) / (count + _PARENT_WEIGHT)


def _clip(total: float, generated: int, max_tokens: int) -> float:
    return min(max(total, generated + 1.0), float(max_tokens))
