"""A separate small model as the drafter: its own layers, with KV at the same slots as the target's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from ..decoding.acceptance import Judge
from ..decoding.batch import RoundBatch, Span
from ..decoding.stages import DecoderLike, Pass, PassCounts, Stages
from ..sampling.logits import Logits
from .autoregressive import ComputedDrafter


class ModelHead:
    """A draft model. Its KV has the target's blocks and slots, so that prefix cache, preemption and rollback
    cover it: it is valid wherever the target's is, since it computes every token that the target computes."""

    def __init__(self, decoder: DecoderLike, kv: PagedKV, vocab_size: int, counts: PassCounts) -> None:
        """vocab_size: the target's; what is beyond the drafter's own can never be proposed."""
        config = decoder.config
        self._num_layers = config.num_layers
        self._last_token, self._num_missing = config.vocab_size - 1, vocab_size - config.vocab_size
        self._vocab_size = vocab_size
        self._kv = kv
        self._stages = Stages(decoder, config.num_layers, kv, None, counts)

    def logits(self, batch: RoundBatch, span: Span, asks_probability: bool) -> Logits:
        over = replace(self._pass(batch, span), asks_probability=asks_probability)
        logits = self._stages.compute(_unwatched(batch), span, over)
        if self._num_missing == 0:
            return logits
        if self._num_missing < 0:
            values = logits.values[:, : self._vocab_size]
            return Logits(values, self._vocab_size, asks_probability=asks_probability)
        values = torch.nn.functional.pad(logits.values, (0, self._num_missing), value=float("-inf"))
        return Logits(values, self._vocab_size, asks_probability=asks_probability)

    def fill(self, batch: RoundBatch, span: Span) -> None:
        self._stages.advance(_unwatched(batch), span, self._pass(batch, span))

    def _pass(self, batch: RoundBatch, span: Span) -> Pass:
        return Pass(0, self._num_layers, token_ids=self._known(span.read_tokens(batch)))

    def prefill(self, token_ids: Tensor, view: BatchView) -> None:
        self._stages.prefill(self._known(token_ids), view)

    def move(self, batch: RoundBatch, sources: Tensor, targets: Tensor) -> None:
        self._stages.move(batch, self._num_layers, sources, targets)

    def _known(self, token_ids: Tensor) -> Tensor:
        """Tokens within the draft model's vocabulary. A target may pad its own further; such a token is
        hardly ever chosen, but must not be out of range."""
        return token_ids.clamp(max=self._last_token)


def _unwatched(batch: RoundBatch) -> RoundBatch:
    """What a round watches are exits of the target."""
    return batch if batch.watch is None else replace(batch, watch=None)


class ModelDrafter(ComputedDrafter):
    """Drafts by a separate model. All plans' have one head, and its KV."""

    def __init__(self, head: ModelHead, judge: Judge, confidence: float | None = None) -> None:
        super().__init__(head, judge, confidence)
        self.head = head

    def prefill(self, token_ids: Tensor, view: BatchView) -> None:
        self.head.prefill(token_ids, view)

    def move(self, batch: RoundBatch, sources: Tensor, targets: Tensor) -> None:
        self.head.move(batch, sources, targets)
