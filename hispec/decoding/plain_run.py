"""Rounds of plain decoding, one after the other, without the host between them.

What the host does around a pass takes a tenth of a small model's step on a CPU. Where nothing is to be
decided between two rounds, they are one call of the pass (`Stages.compute_run`), or at least one step of the
engine.

All rows end with the first that does, by a stop token or its room: so all have as many rounds, and no pass is
computed for nothing. What ends by its text does not run so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .batch import RoundBatch, RoundResult
from .draft_tree import DraftTree
from .row_steps import nothing_noted, zeros
from .stages import Pass, Stages


def run_together(
    stages: Stages, batch: RoundBatch, decode: Callable[[RoundBatch], RoundResult]
) -> RoundResult:
    """Up to batch.num_rounds rounds of plain decoding: the result has the tokens of all, and the evidence of
    all. decode: one of them."""
    if not batch.sampler.takes_likeliest:
        return _one_by_one(batch, decode)
    nothing = zeros(batch.num_rows, batch.limits.device)
    tree = DraftTree.chain(0)
    span = stages.select(batch, tree, nothing, tree.on(nothing.device).nodes, batch.limits)
    ran = stages.compute_run(batch, span, Pass(0, stages.num_layers))
    if ran is None:
        return _one_by_one(batch, decode)
    num_done = len(ran.chosen)
    batch.tokens[span.rows, 1 : num_done + 1] = ran.chosen.T
    evidence = torch.zeros(batch.num_rows).index_copy_(0, span.rows, ran.evidence)
    none = nothing_noted(batch.num_rows, nothing.device)
    return RoundResult(
        tokens=batch.tokens,
        counts=torch.where(batch.limits > 0, num_done, 0),
        drafted=none,
        kept=none,
        source=none,
        tentative=nothing,
        accepted=nothing,
        evidence=evidence,
        logits=None,
        span=span,
        nodes=none,
    )


def _one_by_one(batch: RoundBatch, decode: Callable[[RoundBatch], RoundResult]) -> RoundResult:
    """The same by rounds of one token: what is sampled, or runs where passes are no single call."""
    evidence = torch.zeros(batch.num_rows)
    live = batch.limits > 0
    for number in range(batch.num_rounds):
        window = batch.tokens[:, number : number + 2].contiguous()
        result = decode(replace(batch, tokens=window, starts=batch.starts + number, num_rounds=1))
        batch.tokens[:, number + 1] = result.tokens[:, 1]
        evidence += result.evidence
        if _is_over(batch, live, result.tokens[:, 1], evidence):
            break
    counts = torch.where(live, number + 1, 0)
    return replace(result, tokens=batch.tokens, counts=counts, evidence=evidence)


def _is_over(batch: RoundBatch, live: Tensor, chosen: Tensor, evidence: Tensor) -> bool:
    if not bool(evidence[live].isfinite().all()):
        return True
    rows = zip(live.tolist(), chosen.tolist(), batch.stop_ids, strict=True)
    return any(is_live and token in stops for is_live, token, stops in rows)
