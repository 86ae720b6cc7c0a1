"""benchmarks/threads_cpu.py on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import threads_cpu


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [5, 6, 7 + i]}) + "\n" for i in range(4)))
    return path


def run(model: Path, prompts: Path, *options: str) -> int:
    return threads_cpu.main([str(model), "--prompts", str(prompts), "--max-tokens", "4", *options])


@pytest.mark.slow
def test_both_ways_are_measured_and_told(
    tiny_path: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    options = ("--workers", "2", "--batch-size", "4", "--repeats", "2", "--json", str(target))
    assert run(tiny_path, prompts, *options) == 0
    result = json.loads(target.read_text())
    runs = result["tokens_per_s"]
    assert list(runs) == ["one process", "2 workers"] and result["prompts"] == 4
    assert all(len(each) == 2 and min(each) > 0 for each in runs.values())
    assert len(result["memory"]["of_processes"]) == 4 and result["memory"]["weights_bytes"] > 0
    assert "load" in result["environment"] and "others" not in result["environment"], "workers are none"
    printed = capsys.readouterr().out
    assert "| one process | " in printed and "| 2 workers | " in printed and "| 1.00 |" in printed


def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, prompts, "--workers", "2", "--batch-size", "1") == 2
    assert "4 prompts and --batch-size=1: there must be two workers or more" in capsys.readouterr().err
    assert run(tmp_path, prompts, "--workers", "2", "--limit", "1") == 2
    assert "1 prompts and --batch-size=64" in capsys.readouterr().err
    assert run(tmp_path, prompts, "--workers", "1") == 2
    assert "two workers or more" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "none.jsonl") == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_a_model_that_cannot_be_opened_is_told(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "no model", prompts, "--workers", "2", "--batch-size", "4") == 2
    assert "no model" in capsys.readouterr().err
