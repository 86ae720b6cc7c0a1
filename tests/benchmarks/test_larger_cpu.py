"""`benchmarks/larger_cpu.py` on a tiny shape: each kind of numbers is timed beside what it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import larger_cpu


def test_passes_of_each_kind_of_numbers_stand_beside_their_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(larger_cpu, "read_speed", lambda: 1e9)
    monkeypatch.setattr(larger_cpu, "PROMPT", 32)
    path = tmp_path / "larger.json"
    assert larger_cpu.main(["--shape", "tiny", "--repeats", "1", "--json", str(path)]) == 0
    numbers = json.loads(path.read_text())["numbers"]
    assert list(numbers) == ["bfloat16", "int8", "int4"]
    kinds = numbers.values()
    read = [each["bytes_read"] for each in kinds]
    assert read == sorted(read, reverse=True), "fewer bits are fewer bytes"
    for each in kinds:
        assert each["floor_ms"] == pytest.approx(each["bytes_read"] / 1e6)
        assert len(each["pass_ms"]) == 7 and min(each["pass_ms"].values()) > 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| int4 |")]
    assert [line.count("|") for line in lines] == [11]


def test_memory_is_read_at_some_speed() -> None:
    assert larger_cpu.read_speed(1 << 22) > 0
