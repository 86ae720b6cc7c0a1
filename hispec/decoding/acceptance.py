"""How a tier accepts proposals: `coupled` and `rejection` as pure functions of tensors, and a judge for each,
which takes what the function needs from a round."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from ee_models.kernels import runs_numba, runs_triton

from ..config import ACCEPTANCES, CheckConfig
from ..errors import ConfigError
from ..sampling import noise
from ..sampling.logits import Logits
from ..sampling.sampler import draw
from .batch import RoundBatch, Span, make_sampling_input
from .draft_tree import DraftTree
from .stages import Tier


class Source(IntEnum):
    """How drafts were made: computed (by an exit or a model), or looked up in a text."""

    COMPUTED = 0
    LOOKED_UP = 1

    @staticmethod
    def of(looked_up: Tensor) -> Tensor:
        """Of rows that were looked up where looked_up [rows] bool holds, and computed elsewhere: [rows]
        int64."""
        return looked_up.long()


@dataclass(frozen=True)
class Proposals:
    """What a tier is given to judge, the drafts of a cycle or tentative tokens: nodes 1 to counts [rows] of
    `tree`, whose node 0 is the token in column first [rows] of the window."""

    tree: DraftTree
    first: Tensor
    counts: Tensor

    def columns(self) -> Tensor:
        """[rows, drafts]: the window's columns of nodes 1, 2, ..."""
        return self.first.unsqueeze(-1) + self.tree.on(self.first.device).nodes[1:]

    def tokens(self, batch: RoundBatch) -> Tensor:
        """[rows, drafts]: the tokens of nodes 1, 2, ..."""
        return batch.tokens.gather(1, self.columns().clamp(max=batch.window))

    def trimmed(self, batch: RoundBatch) -> Proposals:
        """The same without the nodes that no row has, where shapes may depend on values."""
        return replace(self, tree=self.tree.prefix(batch.sync_max(self.counts, self.tree.num_drafts)))

    def path_columns(self, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """Columns of the accepted path's drafts, and those that they would have in a chain: [rows, depth]
        each; 0 and -1 past the path's end."""
        shape, first = self.tree.on(self.first.device), self.first.unsqueeze(-1)
        steps = shape.nodes[1 : self.tree.depth + 1]
        accepted = steps <= verdict.num_accepted.unsqueeze(-1)
        sources = torch.where(accepted, first + shape.paths[verdict.last][:, 1:], 0)
        return sources, torch.where(accepted, first + steps, -1)


@dataclass(frozen=True)
class Verdict:
    """[rows] each: accepted drafts, the last node of their path, the tier's own token after it, and whether a
    check is sure enough of that for another cycle (None: nobody asks)."""

    num_accepted: Tensor
    last: Tensor
    token: Tensor
    goes_on: Tensor | None = None


def coupled(
    own: Tensor, proposed: Tensor, num_proposed: Tensor, tree: DraftTree, unsure: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Coupled acceptance: keeps the drafts that the tier would have chosen itself, along one path of the
    tree.

    own [rows, q_len]: the tier's choice after each node; proposed [rows, drafts]: the tokens of nodes 1, 2,
    ...; num_proposed [rows]: how many of these there are; unsure [rows, q_len] bool: where any proposal is
    accepted -> (num_accepted [rows], the last accepted node [rows], token [rows]). Of several paths the
    longest is taken, and of these the first.
    """
    if tree.num_drafts == 0:  # prompt lookup found nothing: such a round is to cost no more than a plain one
        nothing = torch.zeros_like(num_proposed)
        return nothing, nothing, own[:, 0]
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
    steps = torch.arange(proposed.shape[1], device=p.device)
    is_proposed = steps < num_proposed.unsqueeze(-1)
    p_of, q_of = (x.gather(-1, proposed.unsqueeze(-1)).squeeze(-1) for x in (p, q))
    accepted = (uniform * q_of < p_of) & is_proposed
    num_accepted = accepted.long().cumprod(-1).sum(-1)
    rows, last = torch.arange(p.shape[0], device=p.device), num_accepted.clamp(max=p.shape[1] - 1)
    target = p[rows, last]
    rejected = (num_accepted < num_proposed).unsqueeze(-1)
    residual = (target - q[rows, last]).clamp_(min=0.0)
    # p == q up to rounding leaves no residual; then a rejection has probability 0, and p itself is as good.
    usable = rejected & (residual.sum(-1, keepdim=True) > 0)
    return num_accepted, draw(torch.where(usable, residual, target).log(), _at(token_keys, num_accepted))


def _at(values: Tensor, column: Tensor) -> Tensor:
    """values [rows, n] in column [rows]; the last one where column is n."""
    return values.gather(1, column.clamp(max=values.shape[1] - 1).unsqueeze(-1)).squeeze(-1)


class Judge(Protocol):
    """An acceptance rule, bound to a plan: how tiers choose tokens, and which proposals they keep.

    asks_probability: whether a check asks how likely its likeliest tokens are.
    """

    asks_probability: bool

    def choose(self, logits: Logits, batch: RoundBatch, span: Span, num: int = 1) -> Tensor:
        """The `num` likeliest tokens [tokens, num] after each token of the span: drafts, and all of plain
        decoding."""

    def record_lookups(self, batch: RoundBatch, proposals: Proposals, source: Tensor | int) -> None:
        """Takes note of drafts that were not chosen from logits: of rows whose source [rows], or that of all,
        is Source.LOOKED_UP."""

    def judge(
        self, tier: Tier | None, logits: Logits, batch: RoundBatch, span: Span, proposals: Proposals
    ) -> Verdict:
        """Judges proposals by the logits at their nodes. `tier` is the judging tier: Tier.CHECK,
        or None for verify, which has the last word."""


class CoupledJudge:
    """Coupled acceptance: every tier chooses by the same noise, so that a proposal is right or wrong, and the
    output is plain decoding's.

    check_confidence: a check overrules a draft only where it gives its own token at least this probability;
    None = always. Verify keeps only what it would have chosen.
    """

    asks_probability = False  # for rules from outside that begin in another way
    check_confidence: float | None = None

    def __init__(self, check_confidence: float | None = None) -> None:
        self.check_confidence = check_confidence
        self.asks_probability = check_confidence is not None

    def choose(self, logits: Logits, batch: RoundBatch, span: Span, num: int = 1) -> Tensor:
        if num == 1 and batch.sampler.takes_likeliest:
            return logits.likeliest().unsqueeze(-1)
        return batch.sampler.choose_top(logits.wide(), make_sampling_input(batch, span), num)

    def record_lookups(self, batch: RoundBatch, proposals: Proposals, source: Tensor | int) -> None:
        """Nothing: who made a draft does not matter."""

    def find_unsure(self, logits: Logits, own: Tensor) -> Tensor | None:
        """Where the check keeps a draft whatever it is: [tokens] bool by its logits and its own choices
        [tokens]; None = nowhere. Another check rule is another method here: the output does not depend on it,
        since verify keeps only its own choices."""
        if self.check_confidence is None:
            return None
        return logits.probability_of(own) < self.check_confidence

    def judge(
        self, tier: Tier | None, logits: Logits, batch: RoundBatch, span: Span, proposals: Proposals
    ) -> Verdict:
        own = self.choose(logits, batch, span).squeeze(-1)
        unsure = self.find_unsure(logits, own) if tier is Tier.CHECK else None
        return self.accept(own, unsure, batch, span, proposals)

    @staticmethod
    def accept(
        own: Tensor, unsure: Tensor | None, batch: RoundBatch, span: Span, proposals: Proposals
    ) -> Verdict:
        """`coupled` of the tier's choices own [tokens], and where any proposal passes, unsure [tokens]."""
        if proposals.tree.is_chain and span.live is None and runs_numba(own.device):
            from . import accept_numba

            num_accepted, token = accept_numba.coupled_chain(
                own, span.view.cu_q_lens, batch.tokens, proposals.first, proposals.counts, unsure
            )
            return Verdict(num_accepted, num_accepted, token)
        if proposals.tree.is_chain and span.live is not None and runs_triton(own.device):
            from . import accept_triton

            num_accepted, token = accept_triton.coupled_chain(
                own,
                span.live,
                batch.tokens,
                proposals.first,
                proposals.counts,
                proposals.tree.num_drafts,
                unsure,
            )
            return Verdict(num_accepted, num_accepted, token)
        return Verdict(
            *coupled(
                span.spread(own),
                proposals.tokens(batch),
                proposals.counts,
                proposals.tree,
                None if unsure is None else span.spread(unsure),
            )
        )


class RejectionJudge:
    """Speculative sampling at both levels, of chains. The distributions that each tier proposed from are kept
    until the next tier has judged the proposals.

    After a check the tentative tokens are distributed as p_check, the last one included: so verify judges
    that one too, where `coupled` would simply take its own choice. Leaving it out would bias the output, as
    it would keep accepted tokens but drop corrected ones.
    """

    asks_probability = False

    def __init__(
        self, num_rows: int, window: int, vocab_size: int, device: torch.device, has_check: bool
    ) -> None:
        size = self._shape(num_rows, window, vocab_size)
        self._kept = torch.zeros(size, dtype=torch.float32, device=device)
        self._has_check = has_check

    @staticmethod
    def _shape(num_rows: int, window: int, vocab_size: int) -> tuple[int, int, int]:
        # One row of probabilities more than the windows have columns: index -1 keeps what is kept nowhere.
        return len(Tier), num_rows * window + 1, vocab_size

    @classmethod
    def num_bytes_of(cls, num_rows: int, window: int, vocab_size: int) -> int:
        """Of the scratch memory of such a judge."""
        return math.prod(cls._shape(num_rows, window, vocab_size)) * torch.float32.itemsize

    def of_plan(self, has_check: bool) -> RejectionJudge:
        """The judge for rounds of another plan, in the same scratch memory."""
        other = copy(self)
        other._has_check = has_check
        return other

    @property
    def num_bytes(self) -> int:
        return self._kept.nbytes

    def choose(self, logits: Logits, batch: RoundBatch, span: Span, num: int = 1) -> Tensor:
        assert num == 1, "drafts by rank are not drawn from the drafter's distribution"
        q = batch.sampler.probabilities(logits.wide(), make_sampling_input(batch, span))
        self._kept[Tier.DRAFT][span.flat] = q
        return draw(
            q.log(), batch.sampler.keys(span.rows, span.view.positions + 1, noise.Stream.CHOICE)
        ).unsqueeze(-1)

    def record_lookups(self, batch: RoundBatch, proposals: Proposals, source: Tensor | int) -> None:
        """Notes that a draft that was looked up had probability 1."""
        if not isinstance(source, Tensor) and source != Source.LOOKED_UP:
            return
        columns = proposals.columns()
        looked_up = proposals.tree.on(columns.device).nodes[1:] <= proposals.counts.unsqueeze(-1)
        if isinstance(source, Tensor):
            looked_up &= (source == Source.LOOKED_UP).unsqueeze(-1)
        rows = torch.arange(columns.shape[0], device=columns.device).unsqueeze(-1) * batch.window
        before = torch.where(looked_up, rows + columns - 1, -1)
        kept = self._kept[Tier.DRAFT]
        kept[before] = kept.new_zeros(())  # a tensor, since a number would be copied from the host
        kept[before, proposals.tokens(batch)] = kept.new_ones(())

    def judge(
        self, tier: Tier | None, logits: Logits, batch: RoundBatch, span: Span, proposals: Proposals
    ) -> Verdict:
        assert proposals.tree.is_chain
        p = batch.sampler.probabilities(logits.wide(), make_sampling_input(batch, span))
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


# Makes the judge of a plan whose check tier is configured so (None: no check tier). A RejectionJudge is made
# by hispec.runner.plan_runtime, which has the sizes of its memory.
JudgeMaker = Callable[[CheckConfig | None], Judge]
JUDGES: dict[str, JudgeMaker] = {"coupled": lambda check: CoupledJudge(check.confidence if check else None)}


def register_judge(name: str, make: JudgeMaker) -> None:
    """Adds an acceptance rule: from now on `speculative.acceptance` may name it. Raises ConfigError if there
    is such a rule already."""
    if name in ACCEPTANCES:
        raise ConfigError(f"acceptance={name!r} exists already; register the judge under another name")
    JUDGES[name] = make
    ACCEPTANCES.append(name)
