"""Prompt lookup where it matches, an early exit where it does not: for each row, in each draft cycle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..decoding.acceptance import Proposals
from ..decoding.batch import RoundBatch
from ..decoding.draft_tree import DraftTree
from ..decoding.drafter import Draft, Source, Stateless
from ..decoding.stages import Stages
from .computed import ComputedDrafter, Speaker
from .ngram import NgramDrafter


class HybridDrafter(Stateless):
    """The exit's layers run once over what was looked up too, so that the next tier resumes from the same
    place in all rows."""

    def __init__(
        self,
        ngram: NgramDrafter,
        computed: ComputedDrafter,
        speaker: Speaker,
        num_computed: int | None = None,
    ) -> None:
        """num_computed: tokens that the exit drafts at most; None = as many as prompt lookup would."""
        self._ngram, self._computed, self._speaker, self._num_computed = (
            ngram,
            computed,
            speaker,
            num_computed,
        )

    @property
    def num_bytes(self) -> int:
        return self._ngram.num_bytes

    def follow(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._ngram.follow(rows)

    def finish(self, number: int, output_token_ids: Sequence[int]) -> None:
        self._ngram.finish(number, output_token_ids)

    def advance(self, batch: RoundBatch, counts: Tensor) -> None:
        self._ngram.advance(batch, counts)

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        counts = batch.stage(
            ("look up", tree), lambda first: self._ngram.propose(batch, first, tree).proposals.counts, first
        )
        counts = counts.clone()  # other stages' graphs may use the memory that it lies in
        found = counts > 0
        if batch.any(found):
            batch.stage(
                ("feed", tree), lambda first, counts: self._feed(batch, tree, first, counts), first, counts
            )
        shorter = (
            tree if self._num_computed is None else DraftTree.chain(min(self._num_computed, tree.num_drafts))
        )
        computed = self._computed.propose_among(batch, first, shorter, ~found).proposals
        proposals = Proposals(tree, first, torch.where(found, counts, computed.counts))
        return Draft(proposals, torch.where(found, Source.LOOKED_UP, Source.COMPUTED))

    def _feed(self, batch: RoundBatch, tree: DraftTree, first: Tensor, counts: Tensor) -> None:
        """Runs the exit's layers over the drafts that were looked up, counts [rows] of them, and the token
        before."""
        nodes = tree.on(first.device).nodes
        span = Stages.select(
            batch, tree, first, nodes, (counts > 0).unsqueeze(-1) & (nodes <= counts.unsqueeze(-1))
        )
        if span.num_tokens:
            self._speaker.fill(self._speaker.feed(batch, span), span)
