"""The two ways of acceptance, as one interface for the round: choose tokens, judge a row of proposals."""
from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..sampling import confidence, noise, sampler
from . import accept
from .batch import RoundBatch, Span
from .draft_tree import DraftTree
from .stages import Stages, Tier


@dataclass(frozen=True)
class Proposals:
    """The drafts of a cycle: nodes 1 to `counts` [rows] of `tree`, whose node 0 stands in column `first` [rows] of the window."""

    tree: DraftTree
    first: Tensor
    counts: Tensor

    def columns(self) -> Tensor:
        """[rows, drafts]: where in the window the tokens are."""
        return self.first.unsqueeze(-1) + self.tree.on(self.first.device).nodes[1:]


@dataclass(frozen=True)
class Verdict:
    """[rows] each: accepted drafts, the last node of their path, and the tier's own token after it."""

    num_accepted: Tensor
    last: Tensor
    token: Tensor


class Judge(Protocol):
    def choose(self, logits: Tensor, batch: RoundBatch, span: Span, num: int = 1) -> Tensor:
        """Tokens for each place [tokens, num], likeliest first, from logits [tokens, vocab]: drafts, and all of plain decoding."""

    def propose(self, batch: RoundBatch, proposals: Proposals) -> None:
        """Takes note of drafts that were not chosen from logits."""

    def judge(self, tier: Tier | None, logits: Tensor, batch: RoundBatch, span: Span, proposals: Proposals) -> Verdict:
        """Judges proposals by logits [tokens, vocab] at their nodes' places. `tier` is the judging tier: check, or None for verify,
        which has the last word."""


def proposed_tokens(batch: RoundBatch, proposals: Proposals) -> Tensor:
    """[rows, drafts]: the tokens of nodes 1, 2, ..."""
    columns = proposals.columns().clamp(max=batch.tokens.shape[1] - 1)
    return batch.tokens.gather(1, columns)


class CoupledJudge:
    """Every tier chooses by the same noise, so that a proposal is right or wrong: the output is plain decoding's.

    check_confidence: a check overrules a draft only where it gives its own token at least this probability; None = always. Verify
    keeps only what it would have chosen.
    """

    def __init__(self, check_confidence: float | None = None) -> None:
        self._check_confidence = check_confidence

    def choose(self, logits: Tensor, batch: RoundBatch, span: Span, num: int = 1) -> Tensor:
        return batch.sampler.choose_top(logits, Stages.places(batch, span), num)

    def propose(self, batch: RoundBatch, proposals: Proposals) -> None:
        pass

    def judge(self, tier: Tier | None, logits: Tensor, batch: RoundBatch, span: Span, proposals: Proposals) -> Verdict:
        own, unsure = self.choose(logits, batch, span), None
        if tier is Tier.CHECK and self._check_confidence is not None:
            unsure = span.spread(confidence.of(logits, own).squeeze(-1) < self._check_confidence)
        return Verdict(*accept.coupled(span.spread(own.squeeze(-1)), proposed_tokens(batch, proposals), proposals.counts, proposals.tree, unsure))


class RejectionJudge:
    """Speculative sampling at both levels, of chains. What each tier proposed from is kept until the next tier has judged it.

    After a check the tentative tokens are distributed as p_check, the last one included: so verify judges that one too,
    where `coupled` would simply take its own choice. Leaving it out would bias the output, as it would keep accepted
    tokens but drop corrected ones.
    """

    def __init__(self, num_rows: int, window: int, vocab_size: int, device: torch.device, has_check: bool) -> None:
        # One place more than the window has, as its last: what is kept at place -1 is kept nowhere.
        self._kept = torch.zeros(len(Tier), num_rows * window + 1, vocab_size, device=device)
        self._has_check = has_check

    def of_plan(self, has_check: bool) -> RejectionJudge:
        """For rounds of another plan, in the same scratch."""
        other = copy(self)
        other._has_check = has_check
        return other

    @property
    def num_bytes(self) -> int:
        return self._kept.nbytes

    def choose(self, logits: Tensor, batch: RoundBatch, span: Span, num: int = 1) -> Tensor:
        assert num == 1, "drafts by rank are not drawn from the drafter's distribution"
        q = batch.sampler.probabilities(logits, Stages.places(batch, span))
        self._kept[Tier.DRAFT][span.flat] = q
        return sampler.draw(q.log(), batch.sampler.keys(span.rows, span.view.positions + 1, noise.Stream.CHOICE)).unsqueeze(-1)

    def propose(self, batch: RoundBatch, proposals: Proposals) -> None:
        """A draft that was looked up had probability 1."""
        columns = proposals.columns()
        looked_up = proposals.tree.on(columns.device).nodes[1:] <= proposals.counts.unsqueeze(-1)
        rows = torch.arange(columns.shape[0], device=columns.device).unsqueeze(-1) * batch.window
        before = torch.where(looked_up, rows + columns - 1, -1)
        kept = self._kept[Tier.DRAFT]
        kept[before] = kept.new_zeros(())  # a tensor, since a number would be copied from the host
        kept[before, proposed_tokens(batch, proposals)] = kept.new_ones(())

    def judge(self, tier: Tier | None, logits: Tensor, batch: RoundBatch, span: Span, proposals: Proposals) -> Verdict:
        assert proposals.tree.is_chain
        p = batch.sampler.probabilities(logits, Stages.places(batch, span))
        proposer = Tier.DRAFT
        if tier is Tier.CHECK:
            self._kept[Tier.CHECK][span.flat] = p
        elif self._has_check:
            proposer = Tier.CHECK
        q = self._kept[proposer][span.flat]
        rows = torch.arange(batch.tokens.shape[0], device=p.device).unsqueeze(-1)
        columns = proposals.first.unsqueeze(-1) + torch.arange(span.shape[1], device=p.device)
        positions = batch.starts.unsqueeze(-1) + columns + 1
        accept_stream, token_stream = (
            (noise.Stream.CHECK_ACCEPT, noise.Stream.CHECK_TOKEN) if tier is Tier.CHECK else (noise.Stream.VERIFY_ACCEPT, noise.Stream.VERIFY_TOKEN)
        )
        uniform = noise.uniform(batch.sampler.keys(rows, positions, accept_stream))
        token_keys = batch.sampler.keys(rows, positions, token_stream)
        proposed = batch.tokens.gather(1, (columns + 1).clamp(max=batch.tokens.shape[1] - 1))
        num_accepted, token = accept.rejection(span.spread(p), span.spread(q), proposed, proposals.counts, uniform, token_keys)
        return Verdict(num_accepted, num_accepted, token)
