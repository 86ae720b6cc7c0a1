"""A trace summed up, in plain types: the JSON of `hispec report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..stats import STAGES, rate, stage_seconds
from .records import PLAIN_NAME, Decision, Rounds, Trace

REQUEST_TIMES = ("e2e_s", "queue_time_s", "ttft_s", "tpot_s")  # as metrics.table has them


def summarize(trace: Trace) -> dict[str, Any]:
    """Shares are of all rounds, or of all seconds in rounds; None stands where nothing was counted."""
    header = trace.header
    begins = [line.t - (line.seconds or 0.0) for line in trace.rounds] + [one.t for one in trace.decisions]
    ends = [record.t for record in (*trace.rounds, *trace.decisions)]
    return {
        "model": header.model,
        "policy": header.policy,
        "max_num_seqs": header.max_num_seqs,
        "routes": list(trace.routes),
        "environment": header.environment,
        "is_cut": trace.is_cut,
        "span_s": max(ends, default=0.0) - min(begins, default=0.0),
        "rounds": _num_rounds(trace.rounds),
        "round_s": _seconds(trace.rounds),
        "tokens": sum(line.tokens for line in trace.rounds),
        "tokens_per_s": tokens_per_s(trace.rounds),
        "stages": _stages(trace.rounds),
        "plans": _plans(trace.rounds),
        "control": _control(trace.decisions, trace.rounds),
        "requests": _requests(trace),
        "accept_len_histogram": _lengths(trace),
        "accepted_by_place": _places(trace),
    }


def _stages(rounds: Sequence[Rounds]) -> dict[str, float] | None:
    """Seconds in passes of each tier, and outside of passes: lookups, acceptance, the host. None where none
    were measured."""
    timed = [line for line in rounds if line.seconds is not None and len(line.pass_s) == len(STAGES)]
    if not timed:
        return None
    return stage_seconds(np.sum([line.pass_s for line in timed], axis=0).tolist(), _seconds(timed))


def _plans(rounds: Sequence[Rounds]) -> dict[str, dict[str, Any]]:
    """By plan, the one that took the most seconds first."""
    by_plan: dict[str, list[Rounds]] = {}
    for line in rounds:
        by_plan.setdefault(line.plan, []).append(line)
    plans = {}
    for plan, lines in sorted(by_plan.items(), key=lambda item: -_seconds(item[1])):
        num_rounds, seconds = _num_rounds(lines), _seconds(lines)
        plans[plan] = {
            "route": None if lines[0].route is None else lines[0].name,
            "rounds": num_rounds,
            "rounds_share": rate(num_rounds, _num_rounds(rounds)),
            "seconds": seconds,
            "seconds_share": rate(seconds, _seconds(rounds)),
            "tokens_per_s": tokens_per_s(lines),
            "rows": rate(sum(line.rows * line.rounds for line in lines), num_rounds),
            **acceptance(lines),
        }
    return plans


def acceptance(lines: Iterable[Rounds]) -> dict[str, float | None]:
    """Share of drafts that the tier above kept, and of tentative tokens that verify kept; None for the second
    without a check tier."""
    lines = list(lines)
    checked = [line for line in lines if line.has_check]
    tentative = sum(line.tentative for line in checked)
    return {
        "draft_kept": rate(sum(line.kept for line in lines), sum(line.drafted for line in lines)),
        "tentative_accepted": rate(sum(line.accepted for line in checked), tentative),
    }


def _control(decisions: Sequence[Decision], rounds: Sequence[Rounds]) -> dict[str, Any] | None:
    """Decisions, switches and probes; None for a fixed plan. A switch is from one chosen plan to the next,
    probes left out."""
    if not decisions:
        return None
    of_workers = [
        [decision for decision in decisions if decision.worker == worker]
        for worker in sorted({decision.worker for decision in decisions})
    ]
    pairs = [pair for own in of_workers for pair in pairwise([each for each in own if not each.is_probe])]
    probes = [line for line in rounds if line.is_probe]
    # A decision's `measured` is what came of the prediction of the decision before.
    ratios = [
        one.predicted / after.measured
        for own in of_workers
        for one, after in pairwise(own)
        if one.predicted is not None and after.measured
    ]
    reasons = Counter(one.reason for one in decisions)
    return {
        "decisions": len(decisions),
        "reasons": dict(reasons),
        "switches": sum(before.plan != after.plan for before, after in pairs),
        "route_switches": sum(before.name != after.name for before, after in pairs),
        "probes": sum(decision.is_probe for decision in decisions),
        "probes_at_start": sum(decision.is_probe and decision.reason == "start" for decision in decisions),
        "probe_rounds_share": rate(_num_rounds(probes), _num_rounds(rounds)),
        "probe_seconds_share": rate(_seconds(probes), _seconds(rounds)),
        "predicted_to_measured": _percentiles(ratios, 10, 50, 90)
        or dict.fromkeys(("mean", "p10", "p50", "p90")),
    }


def _requests(trace: Trace) -> dict[str, Any]:
    """Counts and latencies of requests that finished; `others` were aborted or failed."""
    done = [request for request in trace.requests if request.has_finished]
    totals = ("prompt_tokens", "cached_tokens", "output_tokens")
    return {
        "finished": len(done),
        "others": len(trace.requests) - len(done),
        **{name: sum(getattr(request, name) for request in done) for name in totals},
        "preemptions": sum(request.preemptions for request in trace.requests),
        "preempted": sum(request.preemptions > 0 for request in trace.requests),
        **{
            name: _latencies([value for one in done if (value := getattr(one, name)) is not None])
            for name in REQUEST_TIMES
        },
    }


def _lengths(trace: Trace) -> list[int]:
    """[i] = rounds of a row that committed i tokens, of requests that ended."""
    counts = Counter(tokens for request in trace.requests for _, tokens, _, _ in request.rounds)
    return [counts[length] for length in range(max(counts, default=-1) + 1)]


def _places(trace: Trace) -> dict[str, list[dict[str, int]]]:
    """By route, for each place in a cycle's drafts: how often it was judged, its predecessors all kept; and
    how often it was kept. Of requests that ended."""
    most: dict[str, int] = {}
    for line in trace.rounds:  # a tree has more drafts than places
        most[line.name] = max(most.get(line.name, 0), line.num_drafts)
    judged: dict[str, Counter[int]] = {}
    kept: dict[str, Counter[int]] = {}
    for request in trace.requests:
        for route, _, drafted_of, kept_of in request.rounds:
            name = PLAIN_NAME if route < 0 else request.routes[route]
            for num_drafted, num_kept in zip(drafted_of, kept_of, strict=True):
                reached = min(num_drafted, num_kept + 1, most.get(name, num_drafted))
                judged.setdefault(name, Counter()).update(range(reached))
                kept.setdefault(name, Counter()).update(range(num_kept))
    return {
        name: [{"judged": counts[at], "kept": kept[name][at]} for at in range(len(counts))]
        for name, counts in judged.items()
        if counts
    }


def _latencies(values: Sequence[float]) -> dict[str, float] | None:
    found = _percentiles(values, 50, 90, 99)
    return found and found | {"max": max(values)}


def _percentiles(values: Sequence[float], *shares: int) -> dict[str, float] | None:
    """Mean and percentiles; None for no values."""
    if not values:
        return None
    return {
        "mean": float(np.mean(values)),
        **{f"p{share}": float(np.percentile(values, share)) for share in shares},
    }


def _num_rounds(lines: Iterable[Rounds]) -> int:
    return sum(line.rounds for line in lines)


def _seconds(lines: Iterable[Rounds]) -> float:
    """Sum over the lines that have a time."""
    return sum(line.seconds or 0.0 for line in lines)


def tokens_per_s(lines: Iterable[Rounds]) -> float | None:
    """Of the lines that have a time."""
    timed = [line for line in lines if line.seconds is not None]
    return rate(sum(line.tokens for line in timed), _seconds(timed))
