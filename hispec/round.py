"""One round of hierarchical speculative decoding [HiSpec, arXiv 2510.01336]: draft -> check (R times) -> verify -> commit.

One early-exit model acts as three. Columns j of a round's window are positions n + j, where n is the position of x_n, the
last committed token; tokens[:, 0] = x_n and tokens[:, j + 1] is what the highest tier so far put after column j.

    draft    layers [0, D)   K tokens, one shallow pass each, and one more pass for the last of them
    check    layers [D, C)   resumes from the draft's hidden states, keeps the leading tokens that it agrees with and adds one
                             of its own: these are tentative
    verify   layers [C, L)   resumes from the check's hidden states over all tentative tokens, and has the last word

Every tier's last token is its own (corrected or bonus), so "all accepted" is no special case. No layer runs twice for a
position that survives; rollback is the setting of a length. Two-tier decoding (LayerSkip, Kangaroo) is the same round
without a check tier, plain decoding the same without a draft tier. A tier that resumes at layer 0 begins at the embedding.

Entry invariant, for every row: KV is valid at every layer for positions 0..n-1, and x_n is not processed yet.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Plan
from .judges import Judge
from .outputs import TokenLogprobs
from .stages import RoundBatch, Span, Stages, Tier


@dataclass(frozen=True)
class RoundResult:
    """What a round committed. All [rows] int64.

    counts: tokens to commit, of tokens[:, 1:]; accepted: of the tentative ones, those that verify kept;
    logits [tokens, vocab] of verify at the places of `span`.
    """

    tokens: Tensor
    counts: Tensor
    drafted: Tensor
    draft_accepted: Tensor
    tentative: Tensor
    accepted: Tensor
    logits: Tensor
    span: Span

    def logprobs(self, row: int, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """Of the tokens that `row` committed, by the full model's unprocessed logits; with the `num_top` likeliest at each."""
        first = int(self.span.view.cu_q_lens[row])
        out = []
        for place, token in enumerate(token_ids, start=first):
            values = self.logits[place].float().log_softmax(-1)
            top = values.topk(num_top) if num_top else None
            best = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else {}
            out.append(TokenLogprobs(token, float(values[token]), best))
        return out


def run_round(stages: Stages, plan: Plan, judge: Judge, batch: RoundBatch, draft_confidence: float | None = None) -> RoundResult:
    """Runs one round of `plan` over the rows of `batch`. Every row with limit > 0 commits at least one token."""
    offset = torch.zeros_like(batch.limits)  # columns that hold x_n and tentative tokens already passed on to verify
    drafted, draft_accepted = torch.zeros_like(offset), torch.zeros_like(offset)
    if plan.is_plain:
        return verify(stages, plan, judge, batch, batch.limits.clamp(max=1), drafted, draft_accepted)
    for _ in range(plan.num_checks):
        num_drafted = draft(stages, plan, judge, batch, offset, draft_confidence)
        drafted += num_drafted
        if plan.check_layer is None:
            offset = torch.minimum(num_drafted + 1, batch.limits)
        else:
            num_kept, advance = check(stages, plan, plan.check_layer, judge, batch, offset, num_drafted)
            draft_accepted += num_kept
            offset = offset + advance
            if not bool((offset < batch.limits).any()):
                break
    return verify(stages, plan, judge, batch, offset, drafted, draft_accepted)


def draft(stages: Stages, plan: Plan, judge: Judge, batch: RoundBatch, offset: Tensor, confidence: float | None) -> Tensor:
    """Drafts up to K tokens after column `offset` [rows] -> [rows], how many of them can be judged.

    With `confidence`, drafting stops once no row's last token was likelier than it [Kangaroo §3.2]: that token is kept, and
    the first is never tested.
    """
    num_steps = plan.num_draft_tokens
    for step in range(plan.num_draft_tokens + 1):
        index = (offset + step).unsqueeze(-1)
        span = stages.select(batch, index, index < batch.limits.unsqueeze(-1))
        if span.num_tokens == 0:
            break
        hidden = stages.run(stages.embed(batch, span), 0, plan.draft_layer, span)
        stages.leave(Tier.DRAFT, span, hidden)
        if step == num_steps:
            stages.fill(hidden, plan.draft_layer, span.view)
            break
        logits = stages.logits(hidden, plan.draft_layer, span)
        batch.tokens[span.rows, span.index + 1] = judge.choose(logits, batch, span)
        if confidence is not None and step > 0 and not bool((logits.float().softmax(-1).amax(-1) >= confidence).any()):
            num_steps = step + 1
    return (batch.limits - offset - 1).clamp(min=0, max=num_steps)


def check(stages: Stages, plan: Plan, check_layer: int, judge: Judge, batch: RoundBatch, offset: Tensor, num_drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Filters the drafts after column `offset` [rows] -> (drafts kept [rows], columns advanced [rows]).

    The check tier's own token follows the kept ones, so a row advances by one more than it kept, if it was live at all.
    """
    steps = torch.arange(int(num_drafted.max()) + 1, device=offset.device)
    index = offset.unsqueeze(-1) + steps
    is_live = offset < batch.limits
    span = stages.select(batch, index, (steps <= num_drafted.unsqueeze(-1)) & is_live.unsqueeze(-1))
    hidden = stages.run(stages.resume(Tier.DRAFT, span), plan.draft_layer, check_layer, span)
    stages.leave(Tier.CHECK, span, hidden)
    num_kept, own = judge.judge(Tier.CHECK, stages.logits(hidden, check_layer, span), batch, span, index, num_drafted)
    _put(batch.tokens, offset + num_kept + 1, own, is_live)
    return num_kept, (num_kept + 1) * is_live


def verify(stages: Stages, plan: Plan, judge: Judge, batch: RoundBatch, offset: Tensor, drafted: Tensor, draft_accepted: Tensor) -> RoundResult:
    """Runs the remaining layers over columns 0..offset-1 and decides what is committed.

    After a check the token after the last column is tentative too, but was not fed to any tier: the row ends with it if
    verify accepts it, so a row commits at most `offset` tokens.
    """
    index = batch.columns[: 1 if plan.is_plain else int(offset.max())].unsqueeze(0)
    span = stages.select(batch, index, index < offset.unsqueeze(-1))
    hidden = stages.embed(batch, span) if plan.is_plain else stages.resume(Tier.DRAFT if plan.check_layer is None else Tier.CHECK, span)
    logits = stages.logits(stages.run(hidden, plan.top_layer, stages.num_layers, span), stages.num_layers, span)
    if plan.is_plain:
        tentative = accepted = torch.zeros_like(offset)
        batch.tokens[:, 1:] = span.spread(judge.choose(logits, batch, span))
    else:
        tentative = offset if plan.check_layer is not None else (offset - 1).clamp(min=0)
        accepted, own = judge.judge(None, logits, batch, span, index, tentative)
        _put(batch.tokens, accepted + 1, own, accepted < offset)
    return RoundResult(
        tokens=batch.tokens,
        counts=torch.minimum(accepted + 1, offset),
        drafted=drafted,
        draft_accepted=accepted if plan.check_layer is None else draft_accepted,
        tentative=tentative,
        accepted=accepted,
        logits=logits,
        span=span,
    )


def _put(tokens: Tensor, column: Tensor, values: Tensor, where: Tensor) -> None:
    """tokens[row, column[row]] = values[row] for rows where `where` holds."""
    column = column.clamp(max=tokens.shape[1] - 1).unsqueeze(-1)
    tokens.scatter_(1, column, torch.where(where.unsqueeze(-1), values.unsqueeze(-1), tokens.gather(1, column)))
