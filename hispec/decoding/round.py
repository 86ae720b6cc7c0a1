"""One round of hierarchical speculative decoding [HiSpec, arXiv 2510.01336]: draft -> check (R times) ->
verify -> commit.

One early-exit model acts as three. Columns j of a round's window are positions n + j, where n is the position
of x_n, the last committed token; tokens[:, 0] = x_n and tokens[:, j + 1] is what the highest tier so far put
after column j.

    draft    K tokens from layers [0, D), one shallow pass each and one more for the last of them; or, with D
             = 0, from a drafter outside of the model (hispec.drafters)
    check    layers [D, C)   resumes from the draft's hidden states, keeps the leading tokens that it agrees
             with and adds one
                             of its own: these are tentative
    verify   layers [C, L)   resumes from the check's hidden states over all tentative tokens, and has the
             last word

Every tier's last token is its own (corrected or bonus), so "all accepted" is no special case. No layer runs
twice for a position that survives; rollback is the setting of a length. Two-tier decoding (LayerSkip,
Kangaroo) is the same round without a check tier, plain decoding the same without a draft tier. A tier that
resumes at layer 0 begins at the embedding.

The drafts of a cycle are a tree, of which a chain is the simplest. A tier takes it in one pass and accepts
one path of it; the path is then moved to where a chain would have stood, so that nothing above a cycle knows
of trees.

Entry invariant, for every row: KV is valid at every layer for positions 0..n-1, and x_n is not processed yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import PLAIN, Plan
from ..outputs import TokenLogprobs
from .acceptance import Judge, Proposals, Verdict
from .batch import RoundBatch, Span
from .draft_tree import DraftTree
from .drafter import Draft, Drafter, guarded, room
from .stages import Stages, Tier


@dataclass(frozen=True)
class RoundResult:
    """What a round committed.

    tokens, counts             [rows, window + 1], [rows]: tokens[:, 1:] begin with the `counts` tokens to
                               commit
    drafted, kept, source      [rows, cycles]: drafts that could be judged; of them, those that the tier above
                               kept; who made them
    tentative, accepted        [rows]: tokens put before verify; of them, those that it kept
    logits, span, nodes        of verify: logits [tokens, vocab] at the places of `span`, None if the batch
                               does not keep them; nodes [rows, depth + 1] on the accepted path
    """

    tokens: Tensor
    counts: Tensor
    drafted: Tensor
    kept: Tensor
    source: Tensor
    tentative: Tensor
    accepted: Tensor
    logits: Tensor | None
    span: Span
    nodes: Tensor

    def logprobs(self, row: int, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """Of the tokens that `row` committed, by the full model's unprocessed logits; with the `num_top`
        likeliest at each."""
        assert self.logits is not None
        first = int(self.span.view.cu_q_lens[row])
        out = []
        for node, token in zip(self.nodes[row].tolist(), token_ids, strict=False):
            values = self.logits[first + node].float().log_softmax(-1)
            top = values.topk(num_top) if num_top else None
            best = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else {}
            out.append(TokenLogprobs(token, float(values[token]), best))
        return out


def run_round(
    stages: Stages, plan: Plan, judge: Judge, drafter: Drafter | None, batch: RoundBatch
) -> RoundResult:
    """Runs one round of `plan` over the rows of `batch`; every row with limit > 0 commits at least one token.
    `drafter`: None if the plan is plain. Raises DrafterError, with nothing committed, if the drafter
    fails."""
    offset = torch.zeros_like(
        batch.limits
    )  # columns that hold x_n and tentative tokens already passed on to verify
    if plan.is_plain:
        return verify(
            stages,
            PLAIN,
            judge,
            None,
            batch,
            Proposals(DraftTree.of(PLAIN), offset, offset),
            batch.limits.clamp(max=1),
        )
    assert drafter is not None
    drafted = offset.new_zeros(len(offset), plan.num_checks)
    kept, source = torch.zeros_like(drafted), torch.zeros_like(drafted)
    for cycle in range(plan.num_checks):
        draft = _propose(drafter, stages, batch, offset, DraftTree.of(plan))
        proposals = draft.proposals
        drafted[:, cycle], source[:, cycle] = proposals.counts, draft.source
        if plan.check_layer is None or (plan.num_checks == 1 and not batch.any(proposals.counts)):
            # Without drafts a check has nothing to say: verify resumes where the draft tier stopped.
            two_tier = replace(plan, check_layer=None, num_checks=1)
            result = _verify(
                stages,
                two_tier,
                judge,
                drafter,
                batch,
                proposals,
                torch.minimum(proposals.counts + 1, batch.limits),
            )
            kept[:, cycle] = result.accepted
            return replace(result, drafted=drafted, kept=kept, source=source)
        verdict = _check(stages, plan, judge, drafter, batch, proposals)
        kept[:, cycle] = verdict.num_accepted
        offset = offset + (verdict.num_accepted + 1) * (offset < batch.limits)
        if not batch.any(offset < batch.limits):
            break
    most_tentative = batch.most(offset, plan.num_checks * (plan.num_draft_tokens + 1))
    tentative = Proposals(DraftTree.chain(most_tentative), torch.zeros_like(offset), offset)
    return replace(
        _verify(stages, plan, judge, drafter, batch, tentative, offset),
        drafted=drafted,
        kept=kept,
        source=source,
    )


def check(
    stages: Stages, plan: Plan, judge: Judge, drafter: Drafter, batch: RoundBatch, proposals: Proposals
) -> Verdict:
    """Filters the drafts of a cycle. The check tier's own token follows the kept ones, so a row advances by
    one more than it kept, if it was live at all."""
    assert plan.check_layer is not None
    proposals = _trimmed(batch, proposals)
    nodes = proposals.tree.on(batch.limits.device).nodes
    is_live = proposals.first < batch.limits
    span = stages.select(
        batch,
        proposals.tree,
        proposals.first,
        nodes,
        (nodes <= proposals.counts.unsqueeze(-1)) & is_live.unsqueeze(-1),
    )
    hidden = stages.run(
        _resume(stages, Tier.DRAFT, plan.draft_layer, batch, span),
        plan.draft_layer,
        plan.check_layer,
        batch,
        span,
    )
    stages.leave(Tier.CHECK, span, hidden)
    verdict = judge.judge(Tier.CHECK, stages.logits(hidden, plan.check_layer, span), batch, span, proposals)
    _keep_path(stages, plan.check_layer, drafter, batch, proposals, verdict)
    _put(batch.tokens, proposals.first + verdict.num_accepted + 1, verdict.token, is_live)
    return verdict


def verify(
    stages: Stages,
    plan: Plan,
    judge: Judge,
    drafter: Drafter | None,
    batch: RoundBatch,
    proposals: Proposals,
    num_live: Tensor,
) -> RoundResult:
    """Runs the remaining layers over the first num_live [rows] nodes of the proposals and decides what is
    committed.

    After a check the token after the last column is tentative too, but was not fed to any tier: the row ends
    with it if verify accepts it, so a row commits at most `num_live` tokens.
    """
    proposals = _trimmed(batch, proposals)
    tree, depth = proposals.tree, plan.top_layer
    nodes = tree.on(num_live.device).nodes[
        : max(1, tree.num_drafts) if plan.check_layer is not None else None
    ]
    span = stages.select(batch, tree, proposals.first, nodes, nodes < num_live.unsqueeze(-1))
    hidden = _resume(stages, Tier.DRAFT if plan.check_layer is None else Tier.CHECK, depth, batch, span)
    logits = stages.logits(stages.run(hidden, depth, stages.num_layers, batch, span), stages.num_layers, span)
    if drafter is None:
        accepted = last = torch.zeros_like(num_live)
        batch.tokens[:, 1:2] = span.spread(judge.choose(logits, batch, span)).view(-1, 1)
    else:
        verdict = judge.judge(None, logits, batch, span, proposals)
        accepted, last = verdict.num_accepted, verdict.last
        _keep_path(stages, stages.num_layers, drafter, batch, proposals, verdict)
        _put(batch.tokens, accepted + 1, verdict.token, accepted < num_live)
    none = num_live.new_zeros(len(num_live), plan.num_checks)
    return RoundResult(
        tokens=batch.tokens,
        counts=torch.minimum(accepted + 1, num_live),
        drafted=none,
        kept=none,
        source=none,
        tentative=proposals.counts,
        accepted=accepted,
        logits=logits if batch.keeps_logits else None,
        span=span,
        nodes=tree.on(num_live.device).paths[last],
    )


def _propose(drafter: Drafter, stages: Stages, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
    """What the drafter is asked for, cut to what the row has room for, and to tokens that there are."""
    with guarded(drafter):
        draft = drafter.propose(batch, first, tree)
    batch.tokens.clamp_(0, stages.vocab_size - 1)
    proposals = Proposals(
        tree, first, torch.minimum(draft.proposals.counts, room(batch, first, tree)).clamp(min=0)
    )
    if batch.watch is not None:
        batch.watch.saw_drafts(batch.tokens, proposals.columns(), proposals.counts)
    return replace(draft, proposals=proposals)


def _check(
    stages: Stages, plan: Plan, judge: Judge, drafter: Drafter, batch: RoundBatch, proposals: Proposals
) -> Verdict:
    """`check` as a stage of its own."""

    def run(first: Tensor, counts: Tensor) -> Verdict:
        return check(stages, plan, judge, drafter, batch, Proposals(proposals.tree, first, counts))

    return batch.stage(("check", plan), run, proposals.first, proposals.counts)


def _verify(
    stages: Stages,
    plan: Plan,
    judge: Judge,
    drafter: Drafter,
    batch: RoundBatch,
    proposals: Proposals,
    num_live: Tensor,
) -> RoundResult:
    """`verify` as a stage of its own."""

    def run(first: Tensor, counts: Tensor, num_live: Tensor) -> RoundResult:
        return verify(stages, plan, judge, drafter, batch, Proposals(proposals.tree, first, counts), num_live)

    return batch.stage(("verify", plan), run, proposals.first, proposals.counts, num_live)


def _trimmed(batch: RoundBatch, proposals: Proposals) -> Proposals:
    """Without the nodes that no row has."""
    return replace(
        proposals, tree=proposals.tree.prefix(batch.most(proposals.counts, proposals.tree.num_drafts))
    )


def _resume(stages: Stages, tier: Tier, layer: int, batch: RoundBatch, span: Span) -> Tensor:
    """Hidden states after `layer` layers, as `tier` left them."""
    return stages.resume(tier, span) if layer else stages.embed(batch, span)


def _keep_path(
    stages: Stages, layer: int, drafter: Drafter, batch: RoundBatch, proposals: Proposals, verdict: Verdict
) -> None:
    """Moves the accepted path of a tree, as far as `layer` layers have computed it, to where a chain stands.
    A chain stands there."""
    tree, first = proposals.tree, proposals.first.unsqueeze(-1)
    if tree.is_chain:
        return
    shape = tree.on(first.device)
    steps = shape.nodes[1 : tree.depth + 1]
    accepted = steps <= verdict.num_accepted.unsqueeze(-1)
    sources = torch.where(accepted, first + shape.paths[verdict.last][:, 1:], 0)
    targets = torch.where(accepted, first + steps, -1)
    batch.tokens.scatter_(1, torch.where(accepted, targets, 0), batch.tokens.gather(1, sources))
    stages.move(batch, layer, sources, targets)
    with guarded(drafter):
        drafter.move(batch, sources, targets)


def _put(tokens: Tensor, column: Tensor, values: Tensor, where: Tensor) -> None:
    """tokens[row, column[row]] = values[row] for rows where `where` holds."""
    column = column.clamp(max=tokens.shape[1] - 1).unsqueeze(-1)
    tokens.scatter_(
        1, column, torch.where(where.unsqueeze(-1), values.unsqueeze(-1), tokens.gather(1, column))
    )
