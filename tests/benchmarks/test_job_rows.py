"""benchmarks/job_rows.py runs as a whole, over few rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import hispec.llm  # noqa: F401 - it is replaced, and must be there to come back
from benchmarks import job_rows


def test_rows_and_a_resume_are_measured_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hispec.llm", sys.modules["hispec.llm"])  # which it replaces
    target = tmp_path / "rows.json"
    assert job_rows.main(["--rows", "3000", "--resume", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert result["rows"] == 3000 and list(result["memory_bytes"]) == ["300", "1500", "3000"]
    assert 1900 <= result["resumed_rows"] <= 2100 and result["rows_per_s"] > 0.0
    printed = capsys.readouterr().out
    assert "| rows | 3,000 |" in printed and "seconds to go on after" in printed
