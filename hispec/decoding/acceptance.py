"""How a tier accepts: pure functions of tokens and distributions, and two judges that give them what they
need from a round."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ee_models.kernels import runs_triton

from ..sampling import confidence, noise
from ..sampling.sampler import draw
from .batch import RoundBatch, Span
from .draft_tree import DraftTree
from .stages import Stages, Tier


@dataclass(frozen=True)
class Proposals:
    """The drafts of a cycle: nodes 1 to `counts` [rows] of `tree`, whose node 0 stands in column `first`
    [rows] of the window."""

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
        """Tokens for each place [tokens, num], likeliest first, from logits [tokens, vocab]: drafts, and all
        of plain decoding."""

    def propose(self, batch: RoundBatch, proposals: Proposals) -> None:
        """Takes note of drafts that were not chosen from logits."""

    def judge(
        self, tier: Tier | None, logits: Tensor, batch: RoundBatch, span: Span, proposals: Proposals
    ) -> Verdict:
        """Judges proposals by logits [tokens, vocab] at their nodes' places. `tier` is the judging tier:
        check, or None for verify, which has the last word."""


def proposed_tokens(batch: RoundBatch, proposals: Proposals) -> Tensor:
    """[rows, drafts]: the tokens of nodes 1, 2, ..."""
    columns = proposals.columns().clamp(max=batch.tokens.shape[1] - 1)
    return batch.tokens.gather(1, columns)


class CoupledJudge:
    """Every tier chooses by the same noise, so that a proposal is right or wrong: the output is plain
    decoding's.

    check_confidence: a check overrules a draft only where it gives its own token at least this probability;
    None = always. Verify keeps only what it would have chosen.
    """

    def __init__(self, check_confidence: float | None = None) -> None:
        self._check_confidence = check_confidence

    def choose(self, logits: Tensor, batch: RoundBatch, span: Span, num: int = 1) -> Tensor:
        return batch.sampler.choose_top(logits, Stages.places(batch, span), num)

    def propose(self, batch: RoundBatch, proposals: Proposals) -> None:
        pass

    def judge(
        self, tier: Tier | None, logits: Tensor, batch: RoundBatch, span: Span, proposals: Proposals
    ) -> Verdict:
        own, unsure = self.choose(logits, batch, span), None
        if tier is Tier.CHECK and self._check_confidence is not None:
            unsure = span.spread(confidence.of(logits, own).squeeze(-1) < self._check_confidence)
        return Verdict(
            *coupled(
                span.spread(own.squeeze(-1)),
                proposed_tokens(batch, proposals),
                proposals.counts,
                proposals.tree,
                unsure,
            )
        )


class RejectionJudge:
    """Speculative sampling at both levels, of chains. What each tier proposed from is kept until the next
    tier has judged it.

    After a check the tentative tokens are distributed as p_check, the last one included: so verify judges
    that one too, where `coupled` would simply take its own choice. Leaving it out would bias the output, as
    it would keep accepted tokens but drop corrected ones.
    """

    def __init__(
        self, num_rows: int, window: int, vocab_size: int, device: torch.device, has_check: bool
    ) -> None:
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
        return draw(
            q.log(), batch.sampler.keys(span.rows, span.view.positions + 1, noise.Stream.CHOICE)
        ).unsqueeze(-1)

    def propose(self, batch: RoundBatch, proposals: Proposals) -> None:
        """A draft that was looked up had probability 1."""
        columns = proposals.columns()
        looked_up = proposals.tree.on(columns.device).nodes[1:] <= proposals.counts.unsqueeze(-1)
        rows = torch.arange(columns.shape[0], device=columns.device).unsqueeze(-1) * batch.window
        before = torch.where(looked_up, rows + columns - 1, -1)
        kept = self._kept[Tier.DRAFT]
        kept[before] = kept.new_zeros(())  # a tensor, since a number would be copied from the host
        kept[before, proposed_tokens(batch, proposals)] = kept.new_ones(())

    def judge(
        self, tier: Tier | None, logits: Tensor, batch: RoundBatch, span: Span, proposals: Proposals
    ) -> Verdict:
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
            (noise.Stream.CHECK_ACCEPT, noise.Stream.CHECK_TOKEN)
            if tier is Tier.CHECK
            else (noise.Stream.VERIFY_ACCEPT, noise.Stream.VERIFY_TOKEN)
        )
        uniform = noise.uniform(batch.sampler.keys(rows, positions, accept_stream))
        token_keys = batch.sampler.keys(rows, positions, token_stream)
        proposed = batch.tokens.gather(1, (columns + 1).clamp(max=batch.tokens.shape[1] - 1))
        num_accepted, token = rejection(
            span.spread(p), span.spread(q), proposed, proposals.counts, uniform, token_keys
        )
        return Verdict(num_accepted, num_accepted, token)


def coupled(
    own: Tensor, proposed: Tensor, num_proposed: Tensor, tree: DraftTree, unsure: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts what the tier would have chosen, along one path of the tree.

    own [rows, q_len]: the tier's choice after each node; proposed [rows, drafts]: the tokens of nodes 1, 2,
    ...; num_proposed [rows]: how many of these there are; unsure [rows, q_len] bool: where any proposal is
    accepted -> (num_accepted [rows], the last accepted node [rows], token [rows]). Of several paths the
    longest is taken, and of these the first.
    """
    if tree.num_drafts == 0:  # prompt lookup found nothing: such a round is to cost no more than a plain one
        nothing = torch.zeros_like(num_proposed)
        return nothing, nothing, own[:, 0]
    if tree.is_chain and runs_triton(own.device):
        from . import accept_triton

        num_accepted, token = accept_triton.coupled_chain(own, proposed, num_proposed, unsure)
        return num_accepted, num_accepted, token
    shape = tree.on(own.device)
    parents = shape.parents[1:]
    right = own[:, parents] == proposed
    if unsure is not None:
        right |= unsure[:, parents]
    right &= shape.nodes[1:] <= num_proposed.unsqueeze(-1)
    # A node is accepted if it and all drafts on the way to it are right. Node 0 always is.
    num_right = torch.nn.functional.pad(right.float(), (1, 0)) @ shape.ancestry.T
    score = torch.where(
        num_right == shape.depths, shape.depths * tree.num_nodes + tree.num_nodes - 1 - shape.nodes, 0
    )
    best = score.amax(-1)
    num_accepted, last = best // tree.num_nodes, tree.num_nodes - 1 - best % tree.num_nodes
    return num_accepted, last, _at(own, last)


def rejection(
    p: Tensor, q: Tensor, proposed: Tensor, num_proposed: Tensor, uniform: Tensor, token_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: accept x with min(1, p(x) / q(x)), else draw from norm(max(p - q, 0)) [Leviathan
    et al. 2023, alg. 1].

    p, q [rows, q_len, vocab]: the judging tier's and the proposing tier's distributions; proposed, uniform,
    token_keys [rows, q_len], a chain's; num_proposed [rows]. Every proposal must have been drawn from its q,
    and whether it is judged must not depend on its value: then accepted and own tokens are distributed as p.
    """
    places = torch.arange(proposed.shape[1], device=p.device)
    is_proposed = places < num_proposed.unsqueeze(-1)
    p_of, q_of = (x.gather(-1, proposed.unsqueeze(-1)).squeeze(-1) for x in (p, q))
    num_accepted = _leading((uniform * q_of < p_of) & is_proposed)
    rows, last = torch.arange(p.shape[0], device=p.device), num_accepted.clamp(max=p.shape[1] - 1)
    target = p[rows, last]
    rejected = (num_accepted < num_proposed).unsqueeze(-1)
    residual = (target - q[rows, last]).clamp_(min=0.0)
    # p == q up to rounding leaves no residual; then a rejection has probability 0, and p itself is as good.
    usable = rejected & (residual.sum(-1, keepdim=True) > 0)
    return num_accepted, draw(torch.where(usable, residual, target).log(), _at(token_keys, num_accepted))


def _leading(accepted: Tensor) -> Tensor:
    """Number of leading True per row: [rows, n] bool -> [rows] int64."""
    return accepted.long().cumprod(-1).sum(-1)


def _at(values: Tensor, place: Tensor) -> Tensor:
    """values [rows, n] at place [rows]; the last one where place is n."""
    return values.gather(1, place.clamp(max=values.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
