"""Prompt lookup where it matches, an early exit where it does not: for each row, in each draft cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..decoding.acceptance import Proposals, Source
from ..decoding.batch import RoundBatch
from ..decoding.draft_tree import DraftTree
from ..decoding.drafter import CompiledDrafter, Draft, Drafter
from ..decoding.row_steps import count_live, zeros
from ..decoding.stages import Stages
from .autoregressive import ComputedDrafter, DraftHead
from .ngram import NgramDrafter


class HybridDrafter(Drafter):
    """The exit's layers run once over what was looked up too, so that the next tier resumes at layer D in all
    rows."""

    def __init__(
        self,
        ngram: NgramDrafter,
        computed: ComputedDrafter,
        head: DraftHead,
        num_computed: int | None = None,
    ) -> None:
        """num_computed: tokens that the exit drafts at most; None = as many as prompt lookup would."""
        self._ngram, self._computed, self._head, self._num_computed = ngram, computed, head, num_computed

    @property
    def num_bytes(self) -> int:
        return self._ngram.num_bytes

    def follow(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._ngram.follow(rows)

    def join(self, rows: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        self._ngram.join(rows)

    def finish(self, number: int, output_token_ids: Sequence[int]) -> None:
        self._ngram.finish(number, output_token_ids)

    def advance(self, batch: RoundBatch, counts: Tensor) -> None:
        self._ngram.advance(batch, counts)

    def compiled(self) -> CompiledDrafter | None:
        ngram, computed = self._ngram.compiled(), self._computed.compiled()
        if type(self) is not HybridDrafter or ngram is None or computed is None:
            return None
        return replace(computed, lookup=ngram.lookup, num_computed=self._num_computed)

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        counts = batch.run_stage(
            ("look up", tree), lambda first: self._ngram.propose(batch, first, tree).proposals.counts, first
        )
        counts = counts.clone()  # graphs of other stages may reuse its memory
        if batch.sync_any_above(counts, 0):
            batch.run_stage(
                ("feed", tree), lambda first, counts: self._feed(batch, tree, first, counts), first, counts
            )
        shorter = tree.prefix(tree.num_drafts if self._num_computed is None else self._num_computed)
        found = counts > 0
        num_live = torch.where(found, zeros(batch.num_rows, first.device), count_live(batch, first, shorter))
        computed = self._computed.propose_among(batch, first, shorter, num_live).proposals
        proposals = Proposals(tree, first, torch.where(found, counts, computed.counts))
        return Draft(proposals, Source.of(found))

    def _feed(self, batch: RoundBatch, tree: DraftTree, first: Tensor, counts: Tensor) -> None:
        """Runs the exit's layers over the drafts that were looked up, counts [rows] of them, and the token
        before."""
        num_live = torch.where(counts > 0, counts + 1, zeros(batch.num_rows, first.device))
        span = Stages.select(batch, tree, first, tree.on(first.device).nodes, num_live)
        if span.num_tokens:
            self._head.fill(batch, span)
