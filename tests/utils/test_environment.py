"""What other programs take of the machine during a measurement; none of this looks at the real machine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hispec.utils import environment
from hispec.utils.environment import busy_text, watch_others

STAT = """cpu  900 0 0 900 0 0 0 0 0 0
cpu0 100 20 30 5000 700 4 5 6 0 0
cpu1 1000 0 0 0 0 0 0 0 900 0
cpu10 50000 0 0 0 0 0 0 0 0 0
intr 12 0
"""


def test_work_is_that_of_the_given_cores_without_waiting() -> None:
    assert environment._work_of(STAT.splitlines(), {0}) == 100 + 20 + 30 + 4 + 5 + 6
    assert environment._work_of(STAT.splitlines(), {0, 1}) == 1165


@pytest.mark.parametrize(
    ("busy", "found"),
    [((100.0, 130.0), 1.2), ((100.0, 101.0), 0.0), ((None, None), None), ((100.0, None), None)],
)
def test_others_are_what_the_cores_did_besides_this_process(
    busy: tuple[float | None, float | None], found: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, process, clock = iter(busy), itertools.count(50.0, 6.0), itertools.count(1000.0, 20.0)
    monkeypatch.setattr(environment, "_busy_s", lambda: next(values))
    monkeypatch.setattr(environment.time, "process_time", lambda: next(process))
    monkeypatch.setattr(environment.time, "monotonic", lambda: next(clock))
    others = watch_others()
    assert others() == found


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"load": 0.9, "others": 0.2}, None),
        ({"load": None, "others": None}, None),
        ({"load": 0.9}, None),
        ({"load": 1.5}, "when this began (load 1.5)"),
        ({"load": 1.5, "machine_cores": 16}, None),  # this process is on two of them
        ({"load": 9.0, "machine_cores": 16}, "when this began (load 9.0)"),
        ({"load": None, "others": 1.04}, "meanwhile (1.0 of 2 cores)"),
        ({"load": 1.5, "others": 1.2}, "when this began (load 1.5) and meanwhile (1.2 of 2 cores)"),
    ],
)
def test_a_busy_machine_is_told_by_load_before_and_by_others_meanwhile(
    values: dict[str, Any], text: str | None
) -> None:
    expected = None if text is None else f"Other programs were running {text}"
    assert busy_text({"cores": 2, **values}) == expected


def test_a_gpu_is_that_of_the_device_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU of {device}")
    assert environment.environment()["gpu"] == "GPU of None"  # torch's own
    assert environment.environment(torch.device("cuda:1"))["gpu"] == "GPU of cuda:1"
    assert environment.environment(torch.device("cpu"))["gpu"] is None
