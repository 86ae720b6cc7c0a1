"""The two ways of acceptance, as one interface for the round: choose a token, judge a row of proposals."""
from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from . import accept, noise, sampling
from .stages import RoundBatch, Span, Stages, Tier


class Judge(Protocol):
    def choose(self, logits: Tensor, batch: RoundBatch, span: Span) -> Tensor:
        """One token per place [tokens], from logits [tokens, vocab]: drafts, and all of plain decoding."""

    def judge(self, tier: Tier | None, logits: Tensor, batch: RoundBatch, span: Span, index: Tensor, num_proposed: Tensor) -> tuple[Tensor, Tensor]:
        """Judges the tokens after columns index [rows, q_len] by logits [tokens, vocab] -> (num_accepted [rows], own token [rows]).
        `tier` is the judging tier: check, or None for verify, which has the last word."""


def proposed_tokens(batch: RoundBatch, index: Tensor) -> Tensor:
    """[rows, q_len]: the tokens proposed for the columns after `index` [rows, q_len]."""
    return batch.tokens.gather(1, (index + 1).clamp(max=batch.tokens.shape[1] - 1).expand(batch.tokens.shape[0], -1))


class CoupledJudge:
    """Every tier chooses by the same noise, so that a proposal is right or wrong: the output is plain decoding's."""

    def choose(self, logits: Tensor, batch: RoundBatch, span: Span) -> Tensor:
        return batch.sampler.choose(logits, Stages.places(batch, span))

    def judge(self, tier: Tier | None, logits: Tensor, batch: RoundBatch, span: Span, index: Tensor, num_proposed: Tensor) -> tuple[Tensor, Tensor]:
        own = span.spread(batch.sampler.choose(logits, Stages.places(batch, span)))
        return accept.coupled(own, proposed_tokens(batch, index), num_proposed)


class RejectionJudge:
    """Speculative sampling at both levels. What each tier proposed from is kept until the next tier has judged it.

    After a check the tentative tokens are distributed as p_check, the last one included: so verify judges that one too,
    where `coupled` would simply take its own choice. Leaving it out would bias the output, as it would keep accepted
    tokens but drop corrected ones.
    """

    def __init__(self, num_rows: int, window: int, vocab_size: int, device: torch.device, has_check: bool) -> None:
        self._kept = torch.zeros(len(Tier), num_rows * window, vocab_size, device=device)
        self._has_check = has_check

    @property
    def num_bytes(self) -> int:
        return self._kept.nbytes

    def choose(self, logits: Tensor, batch: RoundBatch, span: Span) -> Tensor:
        q = batch.sampler.probabilities(logits, Stages.places(batch, span))
        self._kept[Tier.DRAFT][span.flat] = q
        return sampling.draw(q.log(), batch.sampler.keys(span.rows, span.view.positions + 1, noise.Stream.CHOICE))

    def judge(self, tier: Tier | None, logits: Tensor, batch: RoundBatch, span: Span, index: Tensor, num_proposed: Tensor) -> tuple[Tensor, Tensor]:
        p = batch.sampler.probabilities(logits, Stages.places(batch, span))
        proposer = Tier.DRAFT
        if tier is Tier.CHECK:
            self._kept[Tier.CHECK][span.flat] = p
        elif self._has_check:
            proposer = Tier.CHECK
        q = self._kept[proposer][span.flat]
        rows = torch.arange(batch.tokens.shape[0], device=p.device).unsqueeze(-1)
        positions = batch.starts.unsqueeze(-1) + index + 1
        accept_stream, token_stream = (
            (noise.Stream.CHECK_ACCEPT, noise.Stream.CHECK_TOKEN) if tier is Tier.CHECK else (noise.Stream.VERIFY_ACCEPT, noise.Stream.VERIFY_TOKEN)
        )
        uniform = noise.uniform(batch.sampler.keys(rows, positions, accept_stream))
        token_keys = batch.sampler.keys(rows, positions, token_stream)
        return accept.rejection(span.spread(p), span.spread(q), proposed_tokens(batch, index), num_proposed, uniform, token_keys)
