"""Drafters that compute: one token after the other, by an early exit of the model or by a small model of its
own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..decoding.acceptance import Judge, Proposals
from ..decoding.batch import RoundBatch, Span
from ..decoding.draft_tree import DraftTree
from ..decoding.drafter import Draft, Drafter, Source, count_allowed
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
                 round without any draft costs one shallow pass. Kangaroo stops all rows by the last token's
                 probability, keeps that token, and never tests the first [§3.2], which drafts one token too
                 many wherever drafting does not pay
    """

    def __init__(self, head: DraftHead, judge: Judge, confidence: float | None = None) -> None:
        self._head, self._judge, self._confidence = head, judge, confidence

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        return self.propose_among(batch, first, tree, torch.ones_like(first, dtype=torch.bool))

    def propose_among(self, batch: RoundBatch, first: Tensor, tree: DraftTree, drafting: Tensor) -> Draft:
        """As `propose`, for the rows where drafting [rows] bool holds; the others get no drafts."""
        num_sure = torch.zeros_like(first)
        counts = torch.where(drafting, count_allowed(batch, first, tree), 0)
        for depth in range(tree.depth + 1):
            step = partial(self._step, batch, tree, depth)
            drafting, num_sure = batch.run_stage(("draft", tree, depth), step, first, drafting, num_sure)
            if not batch.sync_any(drafting):
                break
        if self._confidence is not None:
            counts = torch.minimum(counts, num_sure)
        return Draft(Proposals(tree, first, counts), torch.full_like(first, Source.COMPUTED))

    def _step(
        self,
        batch: RoundBatch,
        tree: DraftTree,
        depth: int,
        first: Tensor,
        drafting: Tensor,
        num_sure: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One pass over the nodes at `depth` of the rows that are still drafting [rows] bool -> which rows go
        on after it, and how many drafts each is sure of [rows]."""
        shape = tree.on(first.device)
        nodes = shape.levels[depth]
        live = (first.unsqueeze(-1) + nodes < batch.limits.unsqueeze(-1)) & (
            drafting & (depth <= batch.most_drafts)
        ).unsqueeze(-1)
        span = Stages.select(batch, tree, first, nodes, live)
        if span.num_tokens == 0:
            return torch.zeros_like(drafting), num_sure
        if depth == tree.depth:
            self._head.fill(batch, span)
            return drafting, num_sure
        logits = self._head.logits(batch, span, self._confidence is not None)
        num = tree.num_children(depth)
        span.put(
            batch.tokens,
            span.first.unsqueeze(-1) + shape.children[span.node, :num],
            self._judge.choose(logits, batch, span, num),
        )
        if self._confidence is not None:  # of a chain: trees have a fixed shape
            drafting = span.spread(logits.max_probability() >= self._confidence).squeeze(-1)
            num_sure = num_sure + drafting
        return drafting, num_sure
