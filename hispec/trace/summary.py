"""What a trace says, in plain types: the JSON of `hispec report`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..stats import rate
from .records import Decision, Rounds, Trace


def summarize(trace: Trace) -> dict[str, Any]:
    """Shares are of all rounds, or of all seconds in rounds; None stands where nothing was counted."""
    header = trace.header
    return {
        "model": header.model,
        "policy": header.policy,
        "max_num_seqs": header.max_num_seqs,
        "routes": list(trace.routes),
        "environment": header.environment,
        "is_cut": trace.is_cut,
        "span_s": max((record.t for record in (*trace.rounds, *trace.decisions)), default=0.0),
        "rounds": sum(line.rounds for line in trace.rounds),
        "round_s": sum(line.seconds or 0.0 for line in trace.rounds),
        "tokens": sum(line.tokens for line in trace.rounds),
        "tokens_per_s": _tokens_per_s(trace.rounds),
        "plans": _plans(trace.rounds),
        "control": _control(trace.decisions, trace.rounds),
        "requests": _requests(trace),
    }


def _plans(rounds: Sequence[Rounds]) -> dict[str, dict[str, Any]]:
    """By plan, the one that took the most seconds first."""
    by_plan: dict[str, list[Rounds]] = {}
    for line in rounds:
        by_plan.setdefault(line.plan, []).append(line)
    all_rounds, all_seconds = sum(line.rounds for line in rounds), sum(line.seconds or 0.0 for line in rounds)
    plans = {}
    for plan, lines in sorted(
        by_plan.items(), key=lambda item: -sum(line.seconds or 0.0 for line in item[1])
    ):
        num_rounds, seconds = sum(line.rounds for line in lines), sum(line.seconds or 0.0 for line in lines)
        plans[plan] = {
            "route": None if lines[0].route is None else lines[0].name,
            "rounds": num_rounds,
            "rounds_share": rate(num_rounds, all_rounds),
            "seconds": seconds,
            "seconds_share": rate(seconds, all_seconds),
            "tokens_per_s": _tokens_per_s(lines),
            "rows": rate(sum(line.rows * line.rounds for line in lines), num_rounds),
            **acceptance(lines),
        }
    return plans


def acceptance(lines: Iterable[Rounds]) -> dict[str, float | None]:
    """Share of drafts that the tier above kept, and of tentative tokens that verify kept; None for the second
    without a check tier."""
    lines = list(lines)
    checked = [line for line in lines if line.has_check]
    return {
        "draft_accepted": rate(sum(line.kept for line in lines), sum(line.drafted for line in lines)),
        "tentative_accepted": rate(
            sum(line.accepted for line in checked), sum(line.tentative for line in checked)
        ),
    }


def _control(decisions: Sequence[Decision], rounds: Sequence[Rounds]) -> dict[str, Any] | None:
    """Of the controller; None for a fixed plan. A switch is from one chosen plan to the next, probes left
    out."""
    if not decisions:
        return None
    chosen = [decision for decision in decisions if not decision.is_probe]
    pairs = list(pairwise(chosen))
    probes = [line for line in rounds if line.is_probe]
    # What is measured at a decision is what the one before it had promised.
    promised = [(one.predicted, after.measured) for one, after in pairwise(decisions)]
    ratios = np.array(
        [predicted / measured for predicted, measured in promised if predicted is not None and measured]
    )
    return {
        "decisions": len(decisions),
        "reasons": {
            reason: sum(one.reason == reason for one in decisions)
            for reason in dict.fromkeys(one.reason for one in decisions)
        },
        "switches": sum(before.plan != after.plan for before, after in pairs),
        "route_switches": sum(before.route != after.route for before, after in pairs),
        "probes": sum(decision.is_probe for decision in decisions),
        "probes_at_start": sum(decision.is_probe and decision.reason == "start" for decision in decisions),
        "probe_rounds_share": rate(sum(line.rounds for line in probes), sum(line.rounds for line in rounds)),
        "probe_seconds_share": rate(
            sum(line.seconds or 0.0 for line in probes), sum(line.seconds or 0.0 for line in rounds)
        ),
        "predicted_to_measured": {
            "mean": float(ratios.mean()) if len(ratios) else None,
            **{
                f"p{share}": float(np.percentile(ratios, share)) if len(ratios) else None
                for share in (10, 50, 90)
            },
        },
    }


def _requests(trace: Trace) -> dict[str, Any]:
    """Of requests that ended by themselves; `others` are those aborted or failed."""
    done = [request for request in trace.requests if request.finish_reason in ("stop", "length")]
    first = [request.first_token - request.arrival for request in done if request.first_token is not None]
    return {
        "finished": len(done),
        "others": len(trace.requests) - len(done),
        "prompt_tokens": sum(request.prompt_tokens for request in done),
        "cached_tokens": sum(request.cached_tokens for request in done),
        "output_tokens": sum(request.output_tokens for request in done),
        "preemptions": sum(request.preemptions for request in trace.requests),
        "preempted": sum(request.preemptions > 0 for request in trace.requests),
        "latency_s": _percentiles([request.latency_s for request in done]),
        "first_token_s": _percentiles(first),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    shares = {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)}
    return {"mean": float(np.mean(values)), **shares, "max": max(values)}


def _tokens_per_s(lines: Iterable[Rounds]) -> float | None:
    timed = [line for line in lines if line.seconds is not None]
    return rate(sum(line.tokens for line in timed), sum(line.seconds or 0.0 for line in timed))
