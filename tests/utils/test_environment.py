"""What is measured of the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hispec.utils import environment
from hispec.utils.environment import OtherPrograms


def test_other_programs_are_what_our_cores_did_not_do_for_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(environment, "_STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)

    def at(seconds: float, own: float, busy: float) -> None:
        """The cores were there for `seconds`, each was busy for `busy`, and worked for us for `own`."""
        ticks = f"{busy * 50:.0f} 0 {busy * 50:.0f} 12345 678 0 0 0 0 0"
        stat.write_text(
            f"cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 {ticks}\ncpu1 {seconds * 100:.0f} 0 0 0 0 0 0 0 0 0\n"
            f"cpu2 {ticks}\nintr 1\n"
        )
        monkeypatch.setattr(time, "perf_counter", lambda: seconds)
        monkeypatch.setattr(time, "process_time", lambda: 2 * own)

    at(10.0, own=1.0, busy=5.0)
    others = OtherPrograms()
    at(20.0, own=8.0, busy=12.0)
    assert others.share() == pytest.approx(0.0)
    at(20.0, own=5.0, busy=12.0)
    assert others.share() == pytest.approx(0.3)
    stat.unlink()
    assert others.share() is OtherPrograms().share() is None
