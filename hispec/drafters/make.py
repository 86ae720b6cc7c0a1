"""Constructs the drafter that a configuration names; other kinds are registered here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cache.paged_kv import PagedKV

from ..config import KINDS, TRAITS, DraftConfig, DraftKindTraits, NgramConfig
from ..decoding.acceptance import Judge
from ..decoding.drafter import Drafter
from ..decoding.stages import DecoderLike, PassCounts, Stages
from ..errors import ConfigError
from .autoregressive import ComputedDrafter, ExitHead
from .hybrid import HybridDrafter
from .model import ModelDrafter, ModelHead
from .ngram import NgramDrafter
from .ngram_table import NgramTable

# Makes a drafter from (its configuration, the plan's stages, its judge, max_num_seqs, max_model_len).
DrafterMaker = Callable[[DraftConfig, Stages, Judge, int, int], Drafter]
_REGISTERED: dict[str, DrafterMaker] = {}


def register_drafter(kind: str, make: DrafterMaker, traits: DraftKindTraits | None = None) -> None:
    """Adds a kind of drafter: from now on `speculative.draft.kind` may name it.

    make     called once for each plan
    traits   None: it stands outside the model's layers, takes no settings and cannot be chosen by
             control='goodput'

    Raises ConfigError if there is such a kind already.
    """
    if kind in TRAITS:
        raise ConfigError(f"draft.kind={kind!r} exists already; register the drafter under another name")
    TRAITS[kind] = traits or DraftKindTraits(frozenset(), looks_up=True, computes=False, has_costs=False)
    _REGISTERED[kind] = make
    KINDS.append(kind)


class DrafterFactory:
    """Makes the drafters of plans that share their buffers. What keeps state of each request (prompt lookup,
    a draft model's KV) is made once and shared between plans."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        draft_model: DecoderLike | None,
        draft_kv: PagedKV | None,
        draft_counts: PassCounts,
        tables: Sequence[NgramTable] = (),
    ) -> None:
        """draft_kv: of the draft model; draft_counts: where its passes are counted; tables: those that
        guesses are made from."""
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._draft_model, self._draft_kv, self._draft_counts = draft_model, draft_kv, draft_counts
        self._tables = tables
        self._ngrams: dict[NgramConfig, NgramDrafter] = {}
        self._model: ModelDrafter | None = None
        self._registered: list[Drafter] = []

    @property
    def shared(self) -> tuple[Drafter, ...]:
        """The drafters made so far that keep state of requests, of those that share it one."""
        models = () if self._model is None else (self._model,)
        return *self._ngrams.values(), *models, *self._registered

    def make(
        self, draft: DraftConfig, draft_layer: int, confidence: float | None, stages: Stages, judge: Judge
    ) -> Drafter:
        """The drafter of `draft`, whose exit, if it has one, is at draft_layer; confidence: as
        SpeculativeConfig.draft_confidence."""
        match draft.kind:
            case "ngram":
                return self._ngram(draft, stages.device)
            case "exit" | "adapter":
                return ComputedDrafter(ExitHead(stages, draft_layer), judge, confidence)
            case "hybrid":
                head = ExitHead(stages, draft_layer)
                computed = ComputedDrafter(head, judge, confidence)
                ngram = self._ngram(draft, stages.device)
                return HybridDrafter(ngram, computed, head, draft.num_exit_tokens)
            case "model":
                made = ModelDrafter(self._model_head(stages.vocab_size), judge, confidence)
                self._model = self._model or made
                return made
            case kind:
                sizes = self._max_num_seqs, self._max_model_len
                self._registered.append(_REGISTERED[kind](draft, stages, judge, *sizes))
                return self._registered[-1]

    def _model_head(self, vocab_size: int) -> ModelHead:
        if self._model is not None:
            return self._model.head
        assert self._draft_model is not None and self._draft_kv is not None
        return ModelHead(self._draft_model, self._draft_kv, vocab_size, self._draft_counts)

    def _ngram(self, draft: DraftConfig, device: torch.device) -> NgramDrafter:
        sizes = draft.lookup
        assert sizes is not None
        if sizes not in self._ngrams:
            limits = self._max_num_seqs, self._max_model_len
            self._ngrams[sizes] = NgramDrafter(sizes, *limits, device, self._tables)
        return self._ngrams[sizes]
