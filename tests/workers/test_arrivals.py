"""When a request came, as a worker on another machine sees it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hispec.sampling_params import SamplingParams
from hispec.workers.messages import NewRequest
from hispec.workers.serve import Server


@pytest.mark.parametrize(
    ("is_far", "now", "arrival_s"), [(False, 1007.0, 50.0), (True, 1007.0, 893.0), (True, 990.0, 900.0)]
)
def test_a_far_worker_takes_the_time_of_day(
    monkeypatch: pytest.MonkeyPatch, is_far: bool, now: float, arrival_s: float
) -> None:
    """The request came at 50 s of its own machine's monotonic clock, at 1000 s by time of day; here it is 900
    s. A time of day that is behind makes no arrival in the future."""
    taken: list[Any] = []

    class Engine:
        class pretrained:
            tokenizer = None

        @staticmethod
        def add_request(*arguments: Any) -> None:
            taken.append(arguments[4])

    monkeypatch.setattr(time, "monotonic", lambda: 900.0)
    monkeypatch.setattr(time, "time", lambda: now)
    server = Server(None, Engine(), is_far)  # type: ignore[arg-type]
    server._handle(NewRequest(0, [1], SamplingParams(), False, False, False, 50.0, 1000.0))
    assert taken == [arrival_s]
