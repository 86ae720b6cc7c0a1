"""A separate small model as the drafter: its own layers, with KV at the same slots as the target's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from ..decoding.acceptance import Judge
from ..decoding.batch import RoundBatch, Span
from ..decoding.stages import DecoderLike, PassCounts, Stages
from .autoregressive import ComputedDrafter


class ModelHead:
    """A draft model. Its KV has the target's blocks and slots, so that prefix cache, preemption and rollback
    cover it: it is valid wherever the target's is, since it computes every token that the target computes."""

    def __init__(self, decoder: DecoderLike, kv: PagedKV, vocab_size: int, counts: PassCounts) -> None:
        """vocab_size: the target's; what is beyond the drafter's own can never be proposed."""
        config = decoder.config
        self._decoder, self._num_layers = decoder, config.num_layers
        self._last_token, self._num_missing = config.vocab_size - 1, vocab_size - config.vocab_size
        self._kv = kv
        self._stages = Stages(decoder, config.num_layers, kv, None, counts)

    @property
    def num_bytes(self) -> int:
        return self._kv.num_bytes

    def feed(self, batch: RoundBatch, span: Span) -> Tensor:
        hidden = self._decoder.embed(self._known(batch.tokens[span.rows, span.columns]))
        if batch.watch is not None:  # it watches exits of the target
            batch = replace(batch, watch=None)
        return self._stages.run(hidden, 0, self._num_layers, batch, span)

    def logits(self, hidden: Tensor, span: Span) -> Tensor:
        logits = self._stages.logits(hidden, self._num_layers, span)
        if self._num_missing <= 0:
            return logits[:, : logits.shape[1] + self._num_missing]
        return torch.nn.functional.pad(logits, (0, self._num_missing), value=float("-inf"))

    def fill(self, hidden: Tensor, span: Span) -> None:
        """Nothing: `feed` has written all KV."""

    def prefill(self, token_ids: Tensor, view: BatchView) -> None:
        self._stages.prefill(self._known(token_ids), view)

    def move(self, batch: RoundBatch, sources: Tensor, targets: Tensor) -> None:
        self._stages.move(batch, self._num_layers, sources, targets)

    def _known(self, token_ids: Tensor) -> Tensor:
        """Tokens within the draft model's vocabulary. A target may pad its own further; such a token is
        hardly ever chosen, but must not be out of range."""
        return token_ids.clamp(max=self._last_token)


class ModelDrafter(ComputedDrafter):
    """Drafts by a separate model."""

    def __init__(self, head: ModelHead, judge: Judge, confidence: float | None = None) -> None:
        super().__init__(head, judge, confidence)
        self._model = head

    @property
    def num_bytes(self) -> int:
        return self._model.num_bytes

    def prefill(self, token_ids: Tensor, view: BatchView) -> None:
        self._model.prefill(token_ids, view)

    def move(self, batch: RoundBatch, sources: Tensor, targets: Tensor) -> None:
        self._model.move(batch, sources, targets)
