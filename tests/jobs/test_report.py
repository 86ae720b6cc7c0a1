"""What the summary of a job says of latencies and of rows without outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hispec.jobs.drive import Timed
from hispec.jobs.output import RowError
from hispec.jobs.reasons import Reasons
from hispec.jobs.report import _latency
from hispec.jobs.rows import Row
from hispec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tests.helpers.job_support import parse


def row(where: str = "line 7") -> Row:
    found = parse({"prompt": "a"})
    assert isinstance(found, Row)
    return replace(found, where=where)


def output(*times: tuple[float | None, float | None, int]) -> RequestOutput:
    """A request that arrived at 1 s; for each output when its first and its last token came, and their
    number."""
    outputs: list[Any] = []
    for first_s, last_s, num in times:
        metrics = RequestMetrics(1.0, first_s, last_s, 5, 0, num, 1, 0, 0, 0, 0, last_token_s=last_s)
        outputs.append(CompletionOutput(0, "", [1] * num, None, "length", None, metrics))
    return RequestOutput("row-3", "a", [1], outputs)


def test_latencies_are_those_of_all_outputs_exactly() -> None:
    timed = Timed()
    assert _latency(timed) == ""
    timed.count(row(), output((1.3, 1.3, 1)), 1.0)
    assert _latency(timed) == "0.3 s to the first token (median; p99 0.3 s)"  # a single row has one latency
    timed.count(row(), output((1.5, 2.5, 11), (1.7, 3.7, 11), (None, None, 0)), 2.0)
    timed.count(row(), RowError("refused", "no"), 2.0)
    assert _latency(timed) == (
        "0.5 s to the first token (median; p99 0.696 s), 0.15 s per token after it (median; p99 0.199 s)"
    )


def test_reasons_say_how_often_and_where_first(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = Reasons()
    assert reasons.lines(3) == []
    for where, reason in (("line 4", "too\n long"), ("line 2", "empty"), ("b.jsonl, line 9", "too long")):
        reasons.add(row(where), reason)
    assert reasons.lines(3) == ["2 × too long (first in line 4)", "1 × empty (line 2)"]
    assert reasons.lines(1) == ["2 × too long (first in line 4)", "1 × other reasons"]
    monkeypatch.setattr("hispec.jobs.reasons._MOST", 2)
    reasons.add(row(), "x" * 1000)
    assert reasons.total == 4 and reasons.lines(5)[-1] == "1 × other reasons"


def test_a_long_reason_is_cut() -> None:
    reasons = Reasons()
    reasons.add(row(), "x" * 1000)
    assert len(reasons.lines(1)[0]) < 250
