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

from torch import Tensor

from ..config import Plan
from ..sampling.logits import Logits
from .acceptance import Judge, Proposals, Verdict
from .batch import RoundBatch, RoundResult, Span
from .draft_tree import DraftTree
from .drafter import Drafter, guarded
from .row_steps import Notes, end_check, end_verify, nothing_noted, take_drafts, zeros
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
        device = batch.limits.device
        num_put = zeros(batch.num_rows, device)  # [rows]: columns that hold x_n and tentative tokens
        notes = Notes.none(batch.num_rows, plan.num_checks, device)
        for cycle in range(plan.num_checks):
            proposals, num_live = self.draft(num_put, notes, cycle)
            if plan.check_layer is None or (
                plan.num_checks == 1 and not batch.sync_any_above(proposals.counts, 0)
            ):
                # Without drafts a check has nothing to judge: verify resumes where the draft tier stopped.
                two_tier = self
                if plan.check_layer is not None:
                    two_tier = replace(self, plan=replace(plan, check_layer=None, num_checks=1))
                result = two_tier._run_stage("verify", two_tier.verify, proposals, num_live)
                notes = replace(notes, kept=result.accepted.unsqueeze(-1))
                return _noted(result, notes)
            verdict = self._run_stage("check", self.check, proposals, num_live)
            num_put = end_check(batch, num_put, verdict, notes, cycle)
            if not batch.sync_any_above(batch.limits, num_put):
                break
        most = batch.sync_max(num_put, plan.num_checks * (plan.num_draft_tokens + 1))
        tentative = Proposals(DraftTree.chain(most), zeros(batch.num_rows, device), num_put)
        return _noted(self._run_stage("verify", self.verify, tentative, num_put), notes)

    def decode(self) -> RoundResult:
        """Plain decoding: all layers over x_n of each row, and the token after it."""
        batch, stages, tree = self.batch, self.stages, DraftTree.chain(0)
        nothing = zeros(batch.num_rows, batch.limits.device)
        nodes = tree.on(nothing.device).nodes
        span = stages.select(batch, tree, nothing, nodes, batch.limits)
        logits = stages.compute(batch, span, Pass(0, stages.num_layers))
        own = self.judge.choose(logits, batch, span).view(-1)
        own = own if span.live is not None else span.spread(own).view(-1)
        return self._commit(logits, span, Verdict(nothing, nothing, own), batch.limits, tree, nothing)

    def draft(self, first: Tensor, notes: Notes, cycle: int) -> tuple[Proposals, Tensor]:
        """Up to K drafts of each row after column first [rows]: what the drafter proposes, cut to what the
        row may take, and to tokens that the model has; and how many nodes are live [rows], node 0
        included."""
        assert self.drafter is not None
        batch, tree = self.batch, DraftTree.of(self.plan)
        with guarded(self.drafter):
            # A copy, since this is read on, and may be a tensor of all rounds: drafters come from outside.
            draft = self.drafter.propose(batch, first.clone(), tree)
            draft.check(batch.num_rows)
        found = replace(draft.proposals, tree=tree, first=first)
        counts, num_live = take_drafts(batch, found, draft.source, notes, cycle, self.stages.vocab_size)
        proposals = replace(found, counts=counts)
        self.judge.record_lookups(batch, proposals, draft.source)
        if batch.watch is not None:
            batch.watch.record_drafts(batch.tokens, proposals.columns(), counts)
        return proposals, num_live

    def check(self, proposals: Proposals, num_live: Tensor) -> Verdict:
        """Layers [D, C) over the first num_live [rows] nodes of a cycle: its drafts and the token before
        them. The tier's own token follows the kept ones, so a row advances by one more than it kept, if it
        was live at all."""
        plan, batch, stages = self.plan, self.batch, self.stages
        assert plan.check_layer is not None
        proposals = proposals.trimmed(batch)
        tree, first = proposals.tree, proposals.first
        span = stages.select(batch, tree, first, tree.on(first.device).nodes, num_live)
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
        return verdict

    def verify(self, proposals: Proposals, num_live: Tensor) -> RoundResult:
        """The remaining layers over the first num_live [rows] nodes of the proposals; decides what is
        committed.

        After a check the token after the last column is tentative too, but was not fed to any tier: the row
        ends with it if verify accepts it, so a row commits at most `num_live` tokens.
        """
        plan, batch, stages = self.plan, self.batch, self.stages
        proposals = proposals.trimmed(batch)
        tree, nodes = proposals.tree, proposals.tree.on(num_live.device).nodes
        has_check = plan.check_layer is not None
        nodes = nodes[: max(1, tree.num_drafts)] if has_check else nodes
        span = stages.select(batch, tree, proposals.first, nodes, num_live)
        below = Tier.CHECK if has_check else Tier.DRAFT
        logits = stages.compute(batch, span, Pass(plan.top_layer, stages.num_layers, resume=below))
        verdict = self.judge.judge(None, logits, batch, span, proposals)
        self._keep_path(proposals, verdict, stages.num_layers)
        return self._commit(logits, span, verdict, num_live, tree, proposals.counts)

    def _commit(
        self,
        logits: Logits,
        span: Span,
        verdict: Verdict,
        num_live: Tensor,
        tree: DraftTree,
        tentative: Tensor,
    ) -> RoundResult:
        """Verify's result: what it accepted of num_live [rows] nodes of the tree, and its own token."""
        batch, shape = self.batch, tree.on(num_live.device)
        path = shape.nodes.expand(batch.num_rows, -1) if tree.is_chain else shape.paths[verdict.last]
        counts, evidence = end_verify(logits, batch, span, verdict, num_live, path, tree.is_chain)
        none = nothing_noted(batch.num_rows, num_live.device)
        return RoundResult(
            tokens=batch.tokens,
            counts=counts,
            drafted=none,
            kept=none,
            source=none,
            tentative=tentative,
            accepted=verdict.num_accepted,
            evidence=evidence,
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


def _noted(result: RoundResult, notes: Notes) -> RoundResult:
    return replace(result, drafted=notes.drafted, kept=notes.kept, source=notes.source)
