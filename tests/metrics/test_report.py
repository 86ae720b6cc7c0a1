"""Latencies in the summary of a job."""

from __future__ import annotations

from hispec.jobs.report import _latency
from hispec.metrics.latencies import Latencies


def test_the_summary_of_a_job_has_medians_of_what_was_timed() -> None:
    latencies = Latencies()
    assert _latency({}) == _latency(latencies.as_dict()) == ""
    latencies.first_tokens(1, 0.0, 0.0, 0.25)
    latencies.finished(2.0, None)
    assert _latency(latencies.as_dict()) == "0.175 s to the first token (median; p99 0.248 s)"
    latencies.finished(2.0, 0.1)
    assert _latency(latencies.as_dict()).endswith(", 0.075 s per token after it (median; p99 0.0995 s)")
