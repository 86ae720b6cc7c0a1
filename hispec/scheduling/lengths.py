"""How long outputs will be, predicted while they grow."""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import ConfigError

_log = logging.getLogger(__name__)
_WINDOW = 256  # recent lengths kept of a class
_TEMPLATES = 256  # templates kept, the least recently seen makes room
_TEMPLATE_TOKENS = 16  # first tokens that tell templates apart
_PARENT_WEIGHT = 4.0  # lengths that the wider class counts for in a narrower one


class LengthPredictor(Protocol):
    """What users may put in place of the default."""

    def predictor(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Callable[[int], float]:
        """Of a request that has come: tokens that there are already -> expected length of its output. It is
        asked again as the output grows; what it says is cut to [generated + 1, max_tokens]."""

    def finished(self, prompt_token_ids: Sequence[int], num_output: int) -> None:
        """A request has ended by itself, or at its max_tokens, with so many tokens."""


class _Lengths:
    """Recent lengths of one class, in the order of arrival and sorted."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # of the first 0, 1, .. sorted lengths; None = out of date

    def add(self, length: int) -> None:
        """O(window), once per finished request."""
        if len(self._recent) == _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = None

    def beyond(self, generated: int) -> tuple[int, float]:
        """How many were longer, and by how much in all. O(log window)."""
        if self._sums is None:
            self._sums = [0, *itertools.accumulate(self._sorted)]
        first = bisect_right(self._sorted, generated)
        count = len(self._sorted) - first
        return count, self._sums[-1] - self._sums[first] - count * generated


class OnlineLengths:
    """Learns from what finished: by prompts that begin alike (a template) and are of about the same length,
    among prompts of about the same length, among all.

    Expected residual = mean of (L - generated) over the recent lengths L > generated, the wider class's
    counting for `_PARENT_WEIGHT` of them. Where nobody was as long, lengths are taken as memoryless: as much
    again as is expected of a new request; `expected_tokens` while nothing has finished. Memory is bounded:
    `_WINDOW` lengths of `_TEMPLATES` templates, of each power of two of prompt lengths, and of all.
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
            return _cut(generated + residual, generated, max_tokens)

        return predict

    def finished(self, prompt_token_ids: Sequence[int], num_output: int) -> None:
        if num_output < 0:
            raise ConfigError(f"num_output={num_output!r} must be at least 0")
        for lengths in self._classes(prompt_token_ids):
            lengths.add(num_output)

    def _classes(self, prompt_token_ids: Sequence[int]) -> tuple[_Lengths, ...]:
        """From the widest to the narrowest."""
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
    """A user's predictor, behind which the default stands: whatever it raises or says, requests go on.

    num_failures   calls that raised an error, or gave what is no number; logged once
    """

    def __init__(self, hook: LengthPredictor, default: LengthPredictor) -> None:
        self.num_failures = 0
        self._hook, self._default = hook, default

    def predictor(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Callable[[int], float]:
        default = self._default.predictor(prompt_token_ids, max_tokens)
        try:
            of_hook = self._hook.predictor(prompt_token_ids, max_tokens)
        except Exception as error:  # the caller's code, like all of a hook's
            self._failed(error)
            return default

        def predict(generated: int) -> float:
            try:
                total = float(of_hook(generated))
                if math.isnan(total):
                    raise ValueError("it predicts nan tokens")
            except Exception as error:
                self._failed(error)
                return default(generated)
            return _cut(total, generated, max_tokens)

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
    """The default predictor, or the user's with the default behind it."""
    default = OnlineLengths(expected_tokens)
    return default if hook is None else GuardedLengths(hook, default)


def _blend(lengths: _Lengths, generated: int, wider: float) -> float:
    """Mean residual in a class, given that of the wider one."""
    count, total = lengths.beyond(generated)
    return (total + _PARENT_WEIGHT * wider) / (count + _PARENT_WEIGHT)


def _cut(total: float, generated: int, max_tokens: int) -> float:
    return min(max(total, generated + 1.0), float(max_tokens))
