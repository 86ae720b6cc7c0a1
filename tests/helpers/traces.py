"""Traces of engines that never ran."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hispec.config import PLAIN, Plan
from hispec.control.choice import Choice, Observation
from hispec.outputs import RequestMetrics
from hispec.trace.writer import TraceWriter

ROUTES = ["ngram", "hybrid D=4 C=15"]
NGRAM, HYBRID = Choice(0, Plan(0, None, 4)), Choice(1, Plan(4, 15, 3, 2))
PLAIN_CHOICE = Choice(None, PLAIN)


class Clock:
    """Says what it is told, from 100 s on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def writer(
    path: Path, clock: Clock, routes: Sequence[str] = ROUTES, environment: Mapping[str, Any] | None = None
) -> TraceWriter:
    return TraceWriter(
        path,
        model="tiny",
        policy="laps",
        max_num_seqs=4,
        routes=routes,
        environment=environment or {"cpu": "none"},
        clock=clock,
    )


def observation(choice: Choice, rows: int = 2, seconds: float = 0.01, **fields: Any) -> Observation:
    """One round in which each row drafts 4 and keeps 2, and puts 3 before verify, which keeps 1."""

    def each(value: int) -> Any:
        return np.full(rows, value, np.int64)

    counts = (
        {"drafted": each(4), "kept": each(2), "tentative": each(3), "accepted": each(1)}
        if choice.route is not None
        else {}
    )
    return Observation(choice, rows, 100.0 * rows, seconds, 2 * rows, **{**counts, **fields})


def decision(choice: Choice, **fields: Any) -> dict[str, Any]:
    name = "plain" if choice.route is None else f"{ROUTES[choice.route]} K={choice.plan.num_draft_tokens}"
    values = {
        "round": 1,
        "route": choice.route,
        "plan": name,
        "num_drafts": choice.plan.num_draft_tokens,
        "num_checks": choice.plan.num_checks,
    }
    values |= {
        "rows": 2,
        "context_tokens": 200,
        "predicted": 110.0,
        "measured": 100.0,
        "previous": "plain",
        "reason": "best",
        "is_probe": False,
    }
    values |= {
        "alternatives": [[name, 110.0], ["plain", math.nan]],
        "acceptance": {ROUTES[1]: {"draft_kept": np.float64(0.5), "tentative_accepted": 0.75}},
    }
    return values | fields


def metrics(arrival_s: float, finished_s: float, preemptions: int = 0) -> RequestMetrics:
    counts = 40, 16, 8, 5, 20, 15, 10, preemptions
    return RequestMetrics(arrival_s, arrival_s + 0.5, finished_s, *counts, arrival_s + 0.25, finished_s)


def goodput_trace(path: Path) -> Path:
    """Ten seconds: rounds of plain decoding, prompt lookup, a probe of three tiers, one round without a time;
    four requests."""
    clock = Clock()
    trace = writer(path, clock)

    def run(choice: Choice, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            clock.now += seconds
            trace.write_rounds(observation(choice, seconds=seconds), (0.02, 0.0, 0.06))

    trace.write_decision(decision(PLAIN_CHOICE, reason="start", measured=None, previous=None, predicted=40.0))
    run(PLAIN_CHOICE, 20, 0.1)
    trace.write_decision(decision(NGRAM, measured=40.0))
    run(NGRAM, 40, 0.1)
    trace.write_decision(decision(HYBRID, is_probe=True, reason="probe"))
    run(Choice(1, HYBRID.plan, is_probe=True), 10, 0.1)
    trace.write_decision(decision(NGRAM, reason="kept: within margin", measured=55.0))
    run(NGRAM, 30, 0.1)
    trace.write_rounds(observation(NGRAM, seconds=math.nan))
    for number in range(4):
        trace.write_request(
            number,
            metrics(100.0 + number, 104.0 + 2 * number, number // 2),
            8,
            "abort" if number == 3 else "length",
            [(0, 2, [4], [2])],
        )
    trace.close()
    return path


def fixed_trace(path: Path) -> Path:
    clock = Clock()
    trace = writer(path, clock, ["hybrid D=4 C=15"])
    for _ in range(30):
        clock.now += 0.1
        trace.write_rounds(observation(Choice(0, HYBRID.plan), seconds=0.1))
    trace.close()
    return path
