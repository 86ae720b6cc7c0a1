"""What a round does with single numbers of each row, before and after a pass: by torch, and by one call each
on a GPU (`row_steps_triton`) and on a CPU (`row_steps_numba`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..sampling.logits import Logits
from .acceptance import Proposals, Verdict
from .batch import RoundBatch, Span
from .draft_tree import DraftTree


@dataclass(frozen=True)
class Notes:
    """What is noted of each row and cycle [rows, cycles] int64, -1 where a row had none: as RoundResult has
    them."""

    drafted: Tensor
    kept: Tensor
    source: Tensor

    @classmethod
    def none(cls, rows: int, num_cycles: int, device: torch.device) -> Notes:
        return cls(*torch.full((3, rows, num_cycles), -1, dtype=torch.int64, device=device))


@cache  # never dropped, nor written: captured graphs read them at their addresses
def zeros(rows: int, device: torch.device) -> Tensor:
    """[rows] int64."""
    with torch.inference_mode(False):
        return torch.zeros(rows, dtype=torch.int64, device=device)


@cache
def nothing_noted(rows: int, device: torch.device) -> Tensor:
    """[rows, 1] int64: what plain decoding notes of its only cycle."""
    with torch.inference_mode(False):
        return torch.full((rows, 1), -1, dtype=torch.int64, device=device)


def _twin(batch: RoundBatch) -> ModuleType | None:
    """What does each step for this batch in one call, if anything does."""
    if batch.is_fused:
        from . import row_steps_triton

        return row_steps_triton
    if batch.is_numba:
        from . import row_steps_numba

        return row_steps_numba
    return None


def count_live(batch: RoundBatch, first: Tensor, tree: DraftTree, less: int = 0) -> Tensor:
    """[rows]: nodes of `tree` that a row may process after column first [rows], node 0 included: up to its
    limit, and of a chain no more drafts than it may have; 0 where its limit is at or before that column. All
    less `less`, where that is not below 0."""
    if (twin := _twin(batch)) is not None:
        most = batch.most_drafts if tree.is_chain else None
        counted: Tensor = twin.count_live(batch.limits, first, most, tree.num_nodes, less)
        return counted
    left = batch.limits - first
    left = torch.minimum(left, batch.most_drafts + 1) if tree.is_chain else left
    return (left.clamp(max=tree.num_nodes) - less).clamp(min=0)


def take_drafts(
    batch: RoundBatch, proposals: Proposals, source: Tensor | int, notes: Notes, cycle: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Cuts what a drafter proposed to what each row may take, and to tokens that the model has; notes how
    many there are and who made them -> counts [rows], and nodes that are live, node 0 included [rows]."""
    tree, first = proposals.tree, proposals.first
    if (twin := _twin(batch)) is not None:
        most = batch.most_drafts if tree.is_chain else None
        counts, num_live = twin.take_drafts(
            batch.tokens,
            batch.limits,
            first,
            most,
            proposals.counts,
            source,
            notes.drafted,
            notes.source,
            cycle,
            tree.num_nodes,
            vocab_size,
        )
        return counts, num_live
    batch.tokens.clamp_(0, vocab_size - 1)
    is_live = first < batch.limits
    counts = torch.minimum(proposals.counts, count_live(batch, first, tree) - 1).clamp(min=0)
    notes.drafted[:, cycle] = torch.where(is_live, counts, -1)
    noted = notes.source[:, cycle]
    noted.copy_(source) if isinstance(source, Tensor) else noted.fill_(source)
    return counts, torch.where(is_live, counts + 1, 0)


def end_check(batch: RoundBatch, first: Tensor, verdict: Verdict, notes: Notes, cycle: int) -> Tensor:
    """Puts the check's own token after the drafts that it kept, in the rows that took part; stops those that
    it is not sure enough of, and those that have had their last cycle -> columns [rows] that hold what was
    put so far."""
    if (twin := _twin(batch)) is not None:
        ended: Tensor = twin.end_check(
            batch.tokens,
            batch.limits,
            batch.most_checks,
            first,
            verdict.num_accepted,
            verdict.token,
            verdict.goes_on,
            notes.kept,
            cycle,
        )
        return ended
    notes.kept[:, cycle] = verdict.num_accepted
    is_live = first < batch.limits
    batch.put_tokens(first + verdict.num_accepted + 1, verdict.token, is_live)
    num_put = first + (verdict.num_accepted + 1) * is_live
    stops = batch.most_checks <= cycle + 1
    batch.stop(stops if verdict.goes_on is None else stops | ~verdict.goes_on, num_put)
    return num_put


def end_verify(
    logits: Logits,
    batch: RoundBatch,
    span: Span,
    verdict: Verdict,
    num_live: Tensor,
    path: Tensor,
    is_chain: bool,
) -> tuple[Tensor, Tensor]:
    """Puts verify's own token after what it accepted, of num_live [rows] nodes -> tokens to commit [rows],
    and the evidence of them, `sum_of_chosen`. path [rows, depth + 1]: the accepted nodes, from 0 on if
    is_chain."""
    accepted, token = verdict.num_accepted, verdict.token
    if (twin := _twin(batch)) is not None and (batch.is_fused or logits.values.dtype is torch.float32):
        counts, evidence = twin.end_verify(
            logits.values,
            batch.tokens,
            accepted,
            token,
            num_live,
            None if is_chain else path,
            span.view.cu_q_lens,
            path.shape[1],
        )
        return counts, evidence
    batch.put_tokens(accepted + 1, token, accepted < num_live)
    counts = torch.minimum(accepted + 1, num_live)
    return counts, sum_of_chosen(logits, span, batch.tokens, counts, path)


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
