"""How fast the machine is while something else runs on it: a few passes, timed now and then."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from ee_models.decoder import Decoder

from ..latency.drift import STEADY, Drift
from ..latency.model import LatencyModel
from ..utils.means import trimmed_mean
from .stage_bench import Rig
from .timing import Timed

_WIDTHS = 2, 4, 16, 64  # positions of a row, beside one
_MOST_TOKENS = 128  # of a pass, but for one over a single position of each row
_LEAST_CONTEXT = 2  # positions that a row can attend to
_PROMPT_TOKENS = 128  # of a prompt's pass, which waits for arithmetic where those of few tokens do for memory
_MOST_CONTEXT = 512  # beyond, a pass would take as long for its context as for its weights


@dataclass
class _Pass:
    """A pass, by its stage of the latency model, and the milliseconds that it took each time."""

    stage: str
    num_tokens: int
    rows: int
    context_tokens: int
    run: Timed
    ms: list[float] = field(default_factory=list)


class Yardstick:
    """Passes through the whole model over `num_rows` rows in the middle of their answers: plain decoding's,
    of several positions of each row, as other plans verify them, and over a part of a prompt. On a CPU alone:
    a GPU that is ours keeps its speed, and a pass there would have to be captured."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        num_rows: int,
        widest: int = 1,
    ) -> None:
        """prompts: of which there is one or more; max_tokens: of an answer at most; widest: positions of a
        row in a pass at most. Memory is taken until the context ends."""
        widest = max(1, min(widest, _MOST_TOKENS // num_rows, decoder.max_positions - _LEAST_CONTEXT))
        length = round(statistics.fmean(map(len, prompts))) + max_tokens // 2
        self._length = max(_LEAST_CONTEXT, min(length, _MOST_CONTEXT, decoder.max_positions - widest))
        self._timed, self._is_open = 0, True
        self._passes: list[_Pass] = []
        self._rigs = ExitStack()
        if decoder.device.type == "cpu":
            context = [token for prompt in prompts for token in prompt]
            context = (context * -(-self._length // len(context)))[: self._length]
            rig = Rig(decoder, [], context, num_rows, widest)
            self._rigs.callback(rig.close)
            of_rows = num_rows, num_rows * self._length
            self._passes.append(_Pass("plain", num_rows, *of_rows, rig.plain(num_rows)))
            for width in _WIDTHS:
                if width <= widest:
                    run = rig.verify(num_rows, width, 0)
                    self._passes.append(_Pass("verify/0", num_rows * width, *of_rows, run))
            of_prompt = min(_PROMPT_TOKENS, self._length - 1)
            if of_prompt > max(_PROMPT_TOKENS // 2, self._passes[-1].num_tokens):
                self._passes.append(_Pass("prefill", of_prompt, 1, self._length - 1, rig.prefill(of_prompt)))

    def __enter__(self) -> Yardstick:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._rigs.close()

    def measure(self) -> None:
        """Times one pass more, each of them in its turn."""
        if not self._passes or not self._is_open:
            return
        each = self._passes[self._timed % len(self._passes)]
        self._timed += 1
        with torch.inference_mode():
            started = time.perf_counter()
            ms = each.run()
            each.ms.append(1e3 * (time.perf_counter() - started) if ms is None else ms)

    def measure_all(self) -> None:
        """Times every pass once more."""
        for _ in self._passes:
            self.measure()

    def drift(self, latency: LatencyModel) -> Drift:
        """Means of the passes over what they take by `latency`; STEADY if none was timed."""
        found = {
            float(each.num_tokens): trimmed_mean(each.ms)
            / float(latency[each.stage](float(each.rows), float(each.num_tokens), float(each.context_tokens)))
            for each in self._passes
            if each.ms
        }
        return Drift(tuple(found), tuple(found.values())) if found else STEADY
