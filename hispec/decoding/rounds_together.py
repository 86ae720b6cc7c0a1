"""A round of a plan, or several one after the other, without the host between their passes.

What the host does around the passes of a round is no small part of it, for a small model on a CPU. Where
nothing is to be decided between two rounds, they are one call: passes that run linked, between which
`rounds_numba` does what `round.Round` does, or at least one step of the engine.

All rows end with the first that does, by a stop token, its room, or its KV blocks: so all have as many
rounds, and no pass is computed for nothing. What may end by its text has one round at a time.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from ee_models.kernels import runs_numba

from ..config import PLAIN, Plan
from .acceptance import CoupledJudge, Judge
from .batch import RoundBatch, RoundResult, Together
from .drafter import CompiledDrafter, Drafter, DrafterError, guarded
from .round import run_round
from .stages import Stages

_log = logging.getLogger(__name__)
_failed: set[type[Drafter]] = set()  # said once of each


def run_together(
    stages: Stages,
    plan: Plan,
    judge: Judge,
    drafter: Drafter | None,
    batch: RoundBatch,
    continue_confidence: float | None,
    together: Together,
) -> RoundResult:
    """Up to together.num_rounds rounds of the plan, as one call, of which the caller knows that they are one
    (`can_link`), unless they are plain decoding's: those run one by one where they are none. The result has
    the tokens and the evidence of all, and `by_round` what each of them did. As `round.run_round` else."""
    if plan.is_plain and not (batch.sampler.takes_likeliest and can_link(stages, plan, judge, None)):
        return _one_by_one(stages, judge, batch, together)
    from . import rounds_linked  # here, since a machine with a GPU need not have numba

    compiled = _compiled_of(drafter)
    if compiled is None:
        raise DrafterError(f"{type(drafter).__name__}: its compiled form is no longer known")
    assert batch.sampler.takes_likeliest and isinstance(judge, CoupledJudge)
    return rounds_linked.run(stages, plan, judge, compiled, batch, continue_confidence, together)


def prepare(device: torch.device) -> None:
    """Has what runs as one call compiled now, where it never was, not in the middle of an answer."""
    if runs_numba(device):
        from . import rounds_linked  # noqa: F401


def _compiled_of(drafter: Drafter | None) -> CompiledDrafter | None:
    """What `Drafter.compiled` says; None, too, if it fails: then the drafter runs stage by stage, where a
    failure of its own is its own."""
    if drafter is None:
        return CompiledDrafter()
    try:
        with guarded(drafter):
            return drafter.compiled()
    except DrafterError as error:
        if type(drafter) not in _failed:
            _failed.add(type(drafter))
            _log.warning("its compiled form is not known, so its rounds run stage by stage: %s", error)
        return None


def can_link(stages: Stages, plan: Plan, judge: Judge, drafter: Drafter | None) -> bool:
    """Whether rounds of the plan are one call, if their rows take the likeliest token and no exit is
    watched."""
    if type(judge) is not CoupledJudge or plan.num_branches != 1 or not runs_numba(stages.device):
        return False
    compiled = _compiled_of(drafter)
    if compiled is None:
        return False
    from . import rounds_linked

    return stages.can_link(rounds_linked.passes_of(plan, stages.num_layers, compiled))


def _one_by_one(stages: Stages, judge: Judge, batch: RoundBatch, together: Together) -> RoundResult:
    """Rounds of plain decoding: what is sampled, or runs where passes are no single call."""
    evidence, live = torch.zeros(batch.num_rows, dtype=torch.float32), batch.limits > 0
    room = int((together.ends - batch.starts).min())
    most = min(together.num_rounds, room, int(together.rooms.min()))
    tokens = batch.tokens.new_zeros(batch.num_rows, most + 1)
    tokens[:, 0] = batch.tokens[:, 0]
    for number in range(most):
        window = tokens[:, number : number + 2].contiguous()
        one = replace(batch, tokens=window, starts=batch.starts + number)
        result = run_round(stages, PLAIN, judge, None, one)
        tokens[:, number + 1] = result.tokens[:, 1]
        evidence += result.evidence
        if _is_over(together, live, result.tokens[:, 1], evidence):
            break
    counts = torch.where(live, number + 1, 0)
    return replace(result, tokens=tokens, counts=counts, evidence=evidence, num_rounds=number + 1)


def _is_over(together: Together, live: Tensor, chosen: Tensor, evidence: Tensor) -> bool:
    if not bool(evidence[live].isfinite().all()):
        return True
    rows = zip(live.tolist(), chosen.tolist(), together.stop_ids, strict=True)
    return any(is_live and token in stops for is_live, token, stops in rows)
