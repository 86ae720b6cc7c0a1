"""SYNTHETIC acceptance: a judge that does all of the real one's work, then takes drafts at given rates,
whatever the model says.

For models of random weights, whose exits agree on nothing: it shows what a plan's rounds would give if its
exits were as good as a paper says. It is part of the benchmark only; no setting of HiSpec leads here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hispec.decoding.acceptance import CoupledJudge, Proposals, Verdict
from hispec.decoding.batch import RoundBatch, Span
from hispec.decoding.stages import Tier
from hispec.engine import Engine
from hispec.runner.plan_runtime import PlanRuntime
from hispec.sampling import noise
from hispec.sampling.logits import Logits

_DRAWS = 1 << 14  # per tier; a power of 2
_STRIDE = 977  # between the draws of neighbouring seeds


@dataclass(frozen=True)
class Agreement:
    """How often a tier takes the next proposal, given that it took those before: the check the drafts, and
    verify what is put before it (tentative tokens, or drafts if there is no check)."""

    check: float
    verify: float


class SyntheticJudge:
    """Whether a proposal is taken is drawn by its position and its request's seed, from a stream of the
    tier's own: the same again in any batch. The draws are made once, since hashing them in each round would
    be fifty kernels that the real judge does not have.
    """

    asks_probability = False

    def __init__(self, inner: CoupledJudge, agreement: Agreement, device: torch.device) -> None:
        self._inner = inner
        counter = torch.arange(_DRAWS, device=device)
        streams = (
            (noise.Stream.CHECK_ACCEPT, agreement.check),
            (noise.Stream.VERIFY_ACCEPT, agreement.verify),
        )
        self._taken = [
            noise.uniform(noise.keys(torch.zeros_like(counter), counter, stream)) < rate
            for stream, rate in streams
        ]

    def choose(self, logits: Logits, batch: RoundBatch, span: Span, num: int = 1) -> Tensor:
        return self._inner.choose(logits, batch, span, num)

    def record_lookups(self, batch: RoundBatch, proposals: Proposals, source: Tensor | int) -> None:
        self._inner.record_lookups(batch, proposals, source)

    def judge(
        self, tier: Tier | None, logits: Logits, batch: RoundBatch, span: Span, proposals: Proposals
    ) -> Verdict:
        tree, counts = proposals.tree, proposals.counts
        assert tree.is_chain, "synthetic acceptance is of chains"
        own = self.choose(logits, batch, span).squeeze(-1)
        self._inner.accept(own, None, batch, span, proposals)  # the real judge's work; its verdict is dropped
        own = span.spread(own)
        nodes = tree.on(own.device).nodes[1:]
        seeds = batch.sampler._seeds[: batch.num_rows]
        draws = (batch.starts + proposals.first + seeds * _STRIDE).unsqueeze(-1) + nodes
        taken = self._taken[0 if tier is Tier.CHECK else 1][draws & (_DRAWS - 1)] & (
            nodes <= counts.unsqueeze(-1)
        )
        num_accepted = taken.long().cumprod(-1).sum(-1)
        token = own.gather(1, num_accepted.clamp(max=own.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
        return Verdict(num_accepted, num_accepted, token)


def forced(engine: Engine, agreement: Agreement) -> PlanRuntime:
    """The engine's plan with tiers that agree at these rates, whatever they say; for `use`."""
    runtime = engine._runtime
    assert isinstance(runtime.judge, CoupledJudge)
    return replace(runtime, judge=SyntheticJudge(runtime.judge, agreement, runtime.stages.device))


def use(engine: Engine, runtime: PlanRuntime) -> None:
    """From now on the engine runs this; graphs are kept by it, so going back and forth costs nothing."""
    assert not engine.has_unfinished()
    engine._plans.runtime = runtime


@dataclass(frozen=True)
class Expected:
    """Of an average round: tentative tokens (drafts, without a check), the shares of drafts and of tentative
    tokens that are kept, and tokens committed."""

    tentative: float
    draft_share: float
    tentative_share: float
    tokens: float


def expected(agreement: Agreement, num_drafts: int, num_checks: int) -> Expected:
    """By reckoning; num_checks 0 = two tiers."""
    q, p = agreement.check, agreement.verify
    if num_checks == 0:
        kept = _sum_of_powers(p, num_drafts)
        return Expected(num_drafts, kept / num_drafts, kept / num_drafts, 1.0 + kept)
    in_cycle = [q**kept * (1.0 if kept == num_drafts else 1.0 - q) for kept in range(num_drafts + 1)]
    lengths = [1.0]  # [n]: how likely n tokens are tentative so far
    for _ in range(num_checks):
        grown = [0.0] * (len(lengths) + num_drafts + 1)
        for length, likely in enumerate(lengths):
            for kept, share in enumerate(in_cycle):
                grown[length + kept + 1] += likely * share
        lengths = grown
    tentative = _mean(lengths, range(len(lengths)))
    kept_of = [_sum_of_powers(p, length) for length in range(len(lengths))]
    # A round commits no more places than it processed: after the last tentative token nothing of verify's own
    # follows.
    committed = [1.0 + _sum_of_powers(p, length - 1) for length in range(len(lengths))]
    return Expected(
        tentative,
        _sum_of_powers(q, num_drafts) / num_drafts,
        _mean(lengths, kept_of) / tentative,
        _mean(lengths, committed),
    )


def agreement_of_shares(
    draft_share: float, tentative_share: float, num_drafts: int, num_checks: int
) -> Agreement:
    """The agreement at which a plan keeps these shares of what is proposed, as acceptance rates are
    counted."""
    check = _solve(lambda rate: _sum_of_powers(rate, num_drafts) / num_drafts, draft_share)
    return Agreement(
        check,
        _solve(
            lambda rate: expected(Agreement(check, rate), num_drafts, num_checks).tentative_share,
            tentative_share,
        ),
    )


def _solve(rising: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return low


def _sum_of_powers(rate: float, length: int) -> float:
    return sum(rate**step for step in range(1, length + 1))


def _mean(likely: Sequence[float], values: Sequence[float]) -> float:
    return sum(share * value for share, value in zip(likely, values, strict=True))
