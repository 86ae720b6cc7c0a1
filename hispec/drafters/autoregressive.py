"""Drafters that compute: one token after the other, by an early exit of the model or by a small model of its
own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..decoding.acceptance import Judge, Proposals, Source
from ..decoding.batch import RoundBatch, Span
from ..decoding.draft_tree import DraftTree
from ..decoding.drafter import CompiledDrafter, Draft, Drafter
from ..decoding.row_steps import count_live
from ..decoding.stages import Pass, Stages, Tier
from ..sampling.logits import Logits


class DraftHead(Protocol):
    """Turns tokens of the window into logits of the next: an early exit of the model, or a draft model."""

    def logits(self, batch: RoundBatch, span: Span, asks_probability: bool) -> Logits:
        """Runs its layers over the span's tokens, and keeps what later tokens need of them (KV, hidden
        states) -> their logits. asks_probability: as Pass has it."""

    def fill(self, batch: RoundBatch, span: Span) -> None:
        """As `logits`, for tokens whose logits are not needed."""


class ExitHead:
    """An early exit: layers [0, D) of the trunk. Hidden states are left for the tier that resumes there."""

    def __init__(self, stages: Stages, layer: int) -> None:
        self._stages, self._pass = stages, Pass(0, layer, leave=Tier.DRAFT if layer else None)

    def logits(self, batch: RoundBatch, span: Span, asks_probability: bool) -> Logits:
        return self._stages.compute(batch, span, replace(self._pass, asks_probability=asks_probability))

    def fill(self, batch: RoundBatch, span: Span) -> None:
        self._stages.advance(batch, span, self._pass)


class ComputedDrafter(Drafter):
    """Drafts by a head: K passes of one token per branch, and one more over the last drafts, so that no
    position is left out.

    confidence   a row drafts no further where the head gives no token at least this probability; so a
                 round without any draft costs one shallow pass, where it is not one graph. Kangaroo stops all
                 rows by the last token's probability, keeps that token, and never tests the first [§3.2],
                 which drafts one token too many wherever drafting does not pay
    """

    def __init__(self, head: DraftHead, judge: Judge, confidence: float | None = None) -> None:
        self._head, self._judge, self._confidence = head, judge, confidence

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        return self.propose_among(batch, first, tree, count_live(batch, first, tree))

    def compiled(self) -> CompiledDrafter | None:
        if type(self) is not ComputedDrafter or type(self._head) is not ExitHead:
            return None
        return CompiledDrafter(computes=True, confidence=self._confidence)

    def propose_among(self, batch: RoundBatch, first: Tensor, tree: DraftTree, num_live: Tensor) -> Draft:
        """As `propose`, over the first num_live [rows] nodes of the tree, node 0 included; rows that have
        none get no drafts."""
        for depth in range(tree.depth + 1):
            step = partial(self._step, batch, tree, depth)
            num_live = batch.run_stage(("draft", tree, depth), step, first, num_live)
            if depth < tree.depth and not batch.sync_any_above(num_live, depth + 1):
                break
        return Draft(Proposals(tree, first, num_live - 1), Source.COMPUTED)

    def _step(
        self, batch: RoundBatch, tree: DraftTree, depth: int, first: Tensor, num_live: Tensor
    ) -> Tensor:
        """One pass over the nodes at `depth` -> nodes [rows] that are live after it: no more in rows that are
        not sure enough of what they have drafted."""
        shape = tree.on(first.device)
        span = Stages.select(batch, tree, first, shape.levels[depth], num_live)
        if span.num_tokens == 0:
            return num_live
        if depth == tree.depth:
            self._head.fill(batch, span)
            return num_live
        logits = self._head.logits(batch, span, self._confidence is not None)
        num = tree.num_children(depth)
        chosen = self._judge.choose(logits, batch, span, num)
        if tree.is_chain:
            span.put(batch.tokens, span.columns.unsqueeze(-1), chosen, shift=1)
        else:
            columns = span.first.unsqueeze(-1) + shape.children[span.node, :num]
            span.put(batch.tokens, columns, chosen)
        if self._confidence is not None:  # of a chain: trees have a fixed shape
            is_sure = span.spread(logits.max_probability() >= self._confidence).squeeze(-1)
            num_live = torch.where(is_sure, num_live, num_live.clamp(max=depth + 1))
        return num_live
