"""Constructs the drafter that a configuration names."""

from __future__ import annotations

import torch

from cache.paged_kv import PagedKV

from ..config import DraftConfig, NgramConfig
from ..decoding.acceptance import Judge
from ..decoding.drafter import Drafter
from ..decoding.stages import DecoderLike, PassCounts, Stages
from .computed import ComputedDrafter, ExitHead
from .hybrid import HybridDrafter
from .model import ModelDrafter, ModelHead
from .ngram import NgramDrafter


class DrafterFactory:
    """Makes the drafters of plans that share their buffers. Drafters that keep state of each request (prompt
    lookup, a draft model) are made once and shared between plans."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        draft_model: DecoderLike | None,
        draft_kv: PagedKV | None,
        draft_counts: PassCounts,
    ) -> None:
        """draft_kv: of the draft model; draft_counts: where its passes are counted."""
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._draft_model, self._draft_kv, self._draft_counts = draft_model, draft_kv, draft_counts
        self._ngrams: dict[NgramConfig, NgramDrafter] = {}
        self._model: ModelDrafter | None = None

    @property
    def shared(self) -> tuple[Drafter, ...]:
        """The drafters made so far that keep state of requests."""
        return *self._ngrams.values(), *(() if self._model is None else (self._model,))

    def make(
        self, draft: DraftConfig, draft_layer: int, confidence: float | None, stages: Stages, judge: Judge
    ) -> Drafter:
        """The drafter of `draft`, whose exit, if it has one, is at draft_layer; confidence: as
        SpeculativeConfig.draft_confidence."""
        match draft.kind:
            case "ngram":
                return self._ngram(draft, stages.device, judge)
            case "exit" | "adapter":
                return ComputedDrafter(ExitHead(stages, draft_layer), judge, confidence)
            case "hybrid":
                head = ExitHead(stages, draft_layer)
                computed = ComputedDrafter(head, judge, confidence)
                ngram = self._ngram(draft, stages.device, judge)
                return HybridDrafter(ngram, computed, head, draft.num_exit_tokens)
            case "model":
                if self._model is None:
                    assert self._draft_model is not None and self._draft_kv is not None
                    model = ModelHead(
                        self._draft_model, self._draft_kv, stages.vocab_size, self._draft_counts
                    )
                    self._model = ModelDrafter(model, judge, confidence)
                return self._model

    def _ngram(self, draft: DraftConfig, device: torch.device, judge: Judge) -> NgramDrafter:
        sizes = draft.lookup
        assert sizes is not None
        if sizes not in self._ngrams:
            self._ngrams[sizes] = NgramDrafter(sizes, judge, self._max_num_seqs, self._max_model_len, device)
        return self._ngrams[sizes]
