"""One round of hierarchical speculative decoding [HiSpec, arXiv 2510.01336]: draft -> check (R times) ->
verify -> commit.

One early-exit model of L layers acts as three:

    draft    layers [0, D)   K tokens, one shallow pass each and one more for the last of them; with D = 0,
                             tokens from a drafter outside of the model (hispec.drafters)
    check    layers [D, C)   resumes from the draft's hidden states, keeps the leading tokens that it agrees
                             with and adds one of its own: these are tentative
    verify   layers [C, L)   resumes from the check's hidden states over all tentative tokens, once per round,
                             and has the last word

Every tier's last token is its own (corrected after a rejected draft, bonus after an accepted one), so "all
accepted" is no special case. No layer runs twice for a position that survives, and rollback is the setting of
a length: nothing is undone. Two-tier decoding (LayerSkip, Kangaroo) is the same round without a check tier,
plain decoding the same without a draft tier.

Columns j of a round's window are positions n + j, where n is the position of x_n, the last committed token:
tokens[:, 0] = x_n, and tokens[:, j + 1] is what the highest tier so far put after column j. The drafts of a
cycle are a tree, of which a chain is the simplest. A tier takes a tree in one pass and accepts one path of
it, which is then moved to the columns of a chain, so that nothing above a cycle knows of trees.

Entry invariant, for every row: KV is valid at every layer for positions 0..n-1, and x_n is not processed yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import Plan
from ..sampling.logits import Logits
from .acceptance import Judge, Proposals, Verdict
from .batch import RoundBatch, RoundResult, Span
from .draft_tree import DraftTree
from .drafter import Draft, Drafter, count_allowed, guarded
from .stages import Pass, Stages, Tier


def run_round(
    stages: Stages,
    plan: Plan,
    judge: Judge,
    drafter: Drafter | None,
    batch: RoundBatch,
    continue_confidence: float | None = None,
) -> RoundResult:
    """Runs one round of `plan` over the rows of `batch`; every row with limit > 0 commits at least one token.
    `drafter`: None if the plan is plain; continue_confidence: as CheckConfig has it. Raises DrafterError,
    with nothing committed, if the drafter fails."""
    return Round(stages, plan, judge, drafter, batch, continue_confidence).run()


@dataclass(frozen=True)
class Round:
    """What computes (stages), how much is drafted and checked (plan: D, C, K, R), who accepts (judge), who
    proposes (drafter), over which rows (batch), and how sure a check must be of its own token for another
    cycle to follow (continue_confidence; None = always R)."""

    stages: Stages
    plan: Plan
    judge: Judge
    drafter: Drafter | None
    batch: RoundBatch
    continue_confidence: float | None = None

    def run(self) -> RoundResult:
        """The whole round: R cycles of a draft and a check, then one verify."""
        plan, batch = self.plan, self.batch
        if plan.is_plain:
            return self.decode()
        num_put = torch.zeros_like(batch.limits)  # [rows]: columns that hold x_n and tentative tokens
        drafted = num_put.new_full((len(num_put), plan.num_checks), -1)
        kept, source = torch.zeros_like(drafted), torch.zeros_like(drafted)
        for cycle in range(plan.num_checks):
            draft = self.draft(num_put)
            proposals = draft.proposals
            drafted[:, cycle] = torch.where(num_put < batch.limits, proposals.counts, -1)
            source[:, cycle] = draft.source
            if plan.check_layer is None or (plan.num_checks == 1 and not batch.sync_any(proposals.counts)):
                # Without drafts a check has nothing to judge: verify resumes where the draft tier stopped.
                two_tier = self
                if plan.check_layer is not None:
                    two_tier = replace(self, plan=replace(plan, check_layer=None, num_checks=1))
                num_live = torch.minimum(proposals.counts + 1, batch.limits)
                result = two_tier._run_stage("verify", two_tier.verify, proposals, num_live)
                kept[:, cycle] = result.accepted
                return replace(result, drafted=drafted, kept=kept, source=source)
            verdict = self._run_stage("check", self.check, proposals)
            kept[:, cycle] = verdict.num_accepted
            num_put = num_put + (verdict.num_accepted + 1) * (num_put < batch.limits)
            if verdict.goes_on is not None:
                batch.stop(~verdict.goes_on, num_put)
            if not batch.sync_any(num_put < batch.limits):
                break
        most = batch.sync_max(num_put, plan.num_checks * (plan.num_draft_tokens + 1))
        tentative = Proposals(DraftTree.chain(most), torch.zeros_like(num_put), num_put)
        result = self._run_stage("verify", self.verify, tentative, num_put)
        return replace(result, drafted=drafted, kept=kept, source=source)

    def decode(self) -> RoundResult:
        """Plain decoding: all layers over x_n of each row, and the token after it."""
        batch, stages, tree = self.batch, self.stages, DraftTree.chain(0)
        counts, first = batch.limits.clamp(max=1), torch.zeros_like(batch.limits)
        nodes, live = tree.on(first.device).nodes, counts.bool().unsqueeze(-1)
        span = stages.select(batch, tree, first, nodes, live)
        logits = stages.compute(batch, span, Pass(0, stages.num_layers))
        batch.tokens[:, 1:2] = span.spread(self.judge.choose(logits, batch, span)).view(-1, 1)
        none = torch.full_like(live, -1, dtype=torch.int64)
        wide, nodes = logits.wide() if batch.keeps_logits else None, first.unsqueeze(-1)
        evidence = sum_of_chosen(logits, span, batch.tokens, counts, nodes)
        return RoundResult(batch.tokens, counts, none, none, none, first, first, evidence, wide, span, nodes)

    def draft(self, first: Tensor) -> Draft:
        """Up to K drafts of each row after column first [rows]: what the drafter proposes, cut to what the
        row may take, and to tokens that the model has."""
        assert self.drafter is not None
        batch, tree = self.batch, DraftTree.of(self.plan)
        with guarded(self.drafter):
            draft = self.drafter.propose(batch, first, tree)
        batch.tokens.clamp_(0, self.stages.vocab_size - 1)
        counts = torch.minimum(draft.proposals.counts, count_allowed(batch, first, tree)).clamp(min=0)
        proposals = Proposals(tree, first, counts)
        if batch.watch is not None:
            batch.watch.record_drafts(batch.tokens, proposals.columns(), counts)
        return replace(draft, proposals=proposals)

    def check(self, proposals: Proposals) -> Verdict:
        """Layers [D, C) over a cycle's drafts and the token before them. The tier's own token follows the
        kept ones, so a row advances by one more than it kept, if it was live at all."""
        plan, batch, stages = self.plan, self.batch, self.stages
        assert plan.check_layer is not None
        proposals = proposals.trimmed(batch)
        tree, first = proposals.tree, proposals.first
        nodes = tree.on(first.device).nodes
        is_live = first < batch.limits
        live = (nodes <= proposals.counts.unsqueeze(-1)) & is_live.unsqueeze(-1)
        span = stages.select(batch, tree, first, nodes, live)
        over = Pass(
            plan.draft_layer,
            plan.check_layer,
            resume=Tier.DRAFT,
            leave=Tier.CHECK,
            asks_probability=self.judge.asks_probability or self.continue_confidence is not None,
        )
        logits = stages.compute(batch, span, over)
        verdict = self.judge.judge(Tier.CHECK, logits, batch, span, proposals)
        if self.continue_confidence is not None:
            own = logits.max_probability(span.index_of(verdict.last))
            verdict = replace(verdict, goes_on=own >= self.continue_confidence)
        self._keep_path(proposals, verdict, plan.check_layer)
        batch.put_tokens(first + verdict.num_accepted + 1, verdict.token, is_live)
        return verdict

    def verify(self, proposals: Proposals, num_live: Tensor) -> RoundResult:
        """The remaining layers over the first num_live [rows] nodes of the proposals; decides what is
        committed.

        After a check the token after the last column is tentative too, but was not fed to any tier: the row
        ends with it if verify accepts it, so a row commits at most `num_live` tokens.
        """
        plan, batch, stages = self.plan, self.batch, self.stages
        proposals = proposals.trimmed(batch)
        tree, shape = proposals.tree, proposals.tree.on(num_live.device)
        has_check = plan.check_layer is not None
        nodes = shape.nodes[: max(1, tree.num_drafts)] if has_check else shape.nodes
        span = stages.select(batch, tree, proposals.first, nodes, nodes < num_live.unsqueeze(-1))
        below = Tier.CHECK if has_check else Tier.DRAFT
        logits = stages.compute(batch, span, Pass(plan.top_layer, stages.num_layers, resume=below))
        verdict = self.judge.judge(None, logits, batch, span, proposals)
        accepted = verdict.num_accepted
        self._keep_path(proposals, verdict, stages.num_layers)
        batch.put_tokens(accepted + 1, verdict.token, accepted < num_live)
        none = num_live.new_full((len(num_live), plan.num_checks), -1)
        counts, path = torch.minimum(accepted + 1, num_live), shape.paths[verdict.last]
        return RoundResult(
            tokens=batch.tokens,
            counts=counts,
            drafted=none,
            kept=none,
            source=none,
            tentative=proposals.counts,
            accepted=accepted,
            evidence=sum_of_chosen(logits, span, batch.tokens, counts, path),
            logits=logits.wide() if batch.keeps_logits else None,
            span=span,
            nodes=path,
        )

    def _run_stage(self, name: str, run: Callable[..., Any], proposals: Proposals, *inputs: Tensor) -> Any:
        """run(proposals, *inputs) as a stage of its own, which a GPU may replay from a graph."""
        tree = proposals.tree

        def of_tensors(first: Tensor, counts: Tensor, *inputs: Tensor) -> Any:
            return run(Proposals(tree, first, counts), *inputs)

        return self.batch.run_stage((name, self.plan), of_tensors, proposals.first, proposals.counts, *inputs)

    def _keep_path(self, proposals: Proposals, verdict: Verdict, layer: int) -> None:
        """Moves the accepted path of a tree to the columns of a chain: its tokens, and its KV and hidden
        states as far as `layer` layers have computed them."""
        if proposals.tree.is_chain:
            return
        assert self.drafter is not None
        tokens, (sources, targets) = self.batch.tokens, proposals.path_columns(verdict)
        tokens.scatter_(1, targets.clamp(min=0), tokens.gather(1, sources))
        self.stages.move(self.batch, layer, sources, targets)
        with guarded(self.drafter):
            self.drafter.move(self.batch, sources, targets)


def sum_of_chosen(logits: Logits, span: Span, tokens: Tensor, counts: Tensor, path: Tensor) -> Tensor:
    """[rows] float32: the sum of the logits of the first counts [rows] of tokens [rows, window + 1] after the
    first, each read at its node of path [rows, depth + 1].

    One number tells the host whether all of them were numbers, for a few reads of a vocabulary's logits and
    no wait for the device. Looking at the chosen ones is enough: where a hidden state is not finite, neither
    is any logit, nor is the largest where one of them is infinite.
    """
    width = min(path.shape[1], tokens.shape[1] - 1)
    places = (span.view.cu_q_lens[:-1, None] + path[:, :width]).clamp(max=span.num_tokens - 1)
    chosen = logits.values[places, tokens[:, 1 : width + 1]].float()
    is_committed = torch.arange(width, device=counts.device) < counts.unsqueeze(-1)
    return torch.where(is_committed, chosen, 0.0).sum(-1)
