"""Figures of runs: latencies, throughput, slowdowns, plans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..jobs.confidence_interval import students_t
from .batch_state import Counts
from .cluster import Outcomes
from .config import SimulationConfig, SystemSettings
from .distributions import Floats
from .row_state import T_DRAFTED, T_KEPT, T_ROUNDS, T_ROWS, T_STEP_S, T_TOKENS


@dataclass(frozen=True)
class Run:
    """One system at one load with one seed. alone_s [requests]: seconds that each takes on an engine of its
    own; num_urgent: requests that aging made urgent, None = no aging."""

    outcomes: Outcomes
    counts: Sequence[Counts]
    output_tokens: int
    alone_s: Floats
    num_urgent: int | None

    @property
    def totals(self) -> Floats:
        return np.sum([each.totals for each in self.counts], axis=0)

    @property
    def span_s(self) -> float:
        return float(self.outcomes.finished_s.max() - self.outcomes.arrival_s.min())


def figures(config: SimulationConfig, system: SystemSettings, runs: Sequence[Run]) -> dict[str, Any]:
    """The figures of a system at a load over `runs`, one per seed. Latencies are of requests after the
    warm-up, in seconds."""
    first = int(config.requests.num * config.requests.warm_up)
    latencies = [run.outcomes.finished_s[first:] - run.outcomes.arrival_s[first:] for run in runs]
    latency = np.concatenate(latencies)
    slowdown = latency / np.concatenate([run.alone_s[first:] for run in runs])
    to_first = np.concatenate(
        [run.outcomes.first_token_s[first:] - run.outcomes.arrival_s[first:] for run in runs]
    )
    totals, span_s = np.sum([run.totals for run in runs], axis=0), sum(run.span_s for run in runs)
    counts = [each for run in runs for each in run.counts]
    busy_s = float(totals[T_STEP_S]) + sum(each.stall_s for each in counts)
    bound = system.scheduling.max_slowdown
    return {
        "mean_s": float(latency.mean()),
        "mean_error_s": half_width([float(each.mean()) for each in latencies]),
        **{f"p{share}_s": float(np.percentile(latency, share)) for share in (50, 90, 99)},
        "max_s": float(latency.max()),
        "first_token_mean_s": float(to_first.mean()),
        "first_token_p99_s": float(np.percentile(to_first, 99)),
        "goodput_tokens_per_s": sum(run.output_tokens for run in runs) / span_s,
        "throughput_per_s": sum(len(run.outcomes.finished_s) for run in runs) / span_s,
        "utilisation": busy_s / (span_s * config.replicas),
        "mean_rows": float(totals[T_ROWS] / max(totals[T_ROUNDS], 1.0)),
        "tokens_per_row_round": float(totals[T_TOKENS] / max(totals[T_ROWS], 1.0)),
        "draft_kept": float(totals[T_KEPT] / totals[T_DRAFTED]) if totals[T_DRAFTED] else None,
        "preemptions": sum(each.preemptions for each in counts),
        "swaps": sum(each.swaps for each in counts),
        "recomputed_positions": sum(each.recomputed for each in counts),
        "slowdown_mean": float(slowdown.mean()),
        "slowdown_p99": float(np.percentile(slowdown, 99)),
        "slowdown_max": float(slowdown.max()),
        "num_beyond_max_slowdown": int((slowdown > bound).sum()) if bound is not None else None,
        "num_aged": (
            sum(run.num_urgent for run in runs if run.num_urgent is not None)
            if runs[0].num_urgent is not None
            else None
        ),
        "num_counted": len(latency),
        "plans": plan_shares(config, counts),
    }


def plan_shares(config: SimulationConfig, counts: Sequence[Counts]) -> dict[str, float]:
    """Shares of rounds by plan, the most frequent first."""
    names = list(config.routes)
    shares: dict[str, float] = {}
    for each in counts:
        for (route, num_drafts, num_checks), rounds in each.rounds.items():
            name = "plain"
            if route >= 0 and num_drafts:
                name = f"{names[route]} K={num_drafts}" + (
                    f" R={num_checks}" if config.routes[names[route]].check_layer is not None else ""
                )
            shares[name] = shares.get(name, 0.0) + rounds
    total = sum(shares.values()) or 1.0
    return {name: rounds / total for name, rounds in sorted(shares.items(), key=lambda item: -item[1])}


def compare(config: SimulationConfig, policies: Mapping[str, dict[str, Any]]) -> None:
    """Adds to each system's figures its mean latency over the best of the other systems; oracles are nobody's
    other."""
    for name, own in policies.items():
        others = [
            figures["mean_s"]
            for other, figures in policies.items()
            if other != name and not config.systems[other].is_oracle
        ]
        own["mean_over_best_other"] = own["mean_s"] / min(others) if others else None


def half_width(means: Sequence[float]) -> float | None:
    """Half-width of the 95 % confidence interval of the mean of `means`; None for a single one."""
    if len(means) < 2:
        return None
    return students_t(len(means) - 1) * float(np.std(means, ddof=1)) / math.sqrt(len(means))
