"""How fast the machine is while something else runs on it: one pass, timed now and then."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from ee_models.decoder import Decoder

from ..latency.model import LatencyModel
from .stage_bench import Rig
from .timing import Timed

_LEAST_CONTEXT = 2  # positions that a row can attend to
_MOST_CONTEXT = 512  # beyond, a pass would take as long for its context as for its weights


class Yardstick:
    """A pass of plain decoding over `num_rows` rows in the middle of their answers. On a CPU alone: a GPU
    that is ours keeps its speed, and a pass there would have to be captured."""

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, num_rows: int
    ) -> None:
        """prompts: of which there is one or more; max_tokens: of an answer at most. Memory is taken until the
        context ends."""
        length = round(statistics.fmean(map(len, prompts))) + max_tokens // 2
        self._length = max(_LEAST_CONTEXT, min(length, _MOST_CONTEXT, decoder.max_positions - 1))
        self._num_rows, self._ms = num_rows, list[float]()
        self._rigs = ExitStack()
        self._plain: Timed | None = None
        if decoder.device.type == "cpu":
            context = [token for prompt in prompts for token in prompt]
            context = (context * -(-self._length // len(context)))[: self._length]
            rig = Rig(decoder, [], context, num_rows, 1)
            self._rigs.callback(rig.close)
            self._plain = rig.plain(num_rows)

    def __enter__(self) -> Yardstick:
        return self

    def __exit__(self, *_: object) -> None:
        self._rigs.close()
        self._plain = None

    def measure(self) -> None:
        """Times the pass once more."""
        if self._plain is None:
            return
        with torch.inference_mode():
            started = time.perf_counter()
            ms = self._plain()
            self._ms.append(1e3 * (time.perf_counter() - started) if ms is None else ms)

    def drift(self, latency: LatencyModel) -> float:
        """The median of the passes over what one takes by `latency`; 1 if none was timed."""
        if not self._ms:
            return 1.0
        rows = float(self._num_rows)
        return statistics.median(self._ms) / float(latency["plain"](rows, rows, rows * self._length))
