"""benchmarks/threads_cpu.py on a tiny model, in processes of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import threads_cpu

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs to bind processes to cores"
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [5, 6, 7 + i]}) + "\n" for i in range(4)))
    return path


def run(model: Path, prompts: Path, *options: str) -> int:
    return threads_cpu.main([str(model), "--prompts", str(prompts), "--max-tokens", "4", *options])


def test_both_ways_are_measured_and_told(
    tiny_path: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    assert run(tiny_path, prompts, "--batch-size", "4", "--repeats", "2", "--json", str(target)) == 0
    result = json.loads(target.read_text())
    runs = result["tokens_per_s"]
    assert list(runs) == ["one engine", "an engine for each core"] and result["prompts"] == 4
    assert all(len(each) == 2 and min(each) > 0 for each in runs.values())
    printed = capsys.readouterr().out
    assert (
        "| one engine | " in printed and "| an engine for each core | " in printed and "| 1.00 |" in printed
    )


def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(threads_cpu, "Engine", None)
    assert run(tmp_path, prompts, "--batch-size", "1") == 2
    assert "4 prompts and --batch-size=1: there must be one for each of 2 cores" in capsys.readouterr().err
    assert run(tmp_path, prompts, "--limit", "1") == 2
    assert "1 prompts and --batch-size=64" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "none.jsonl") == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_an_engine_that_cannot_be_opened_says_why(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "no model", prompts, "--batch-size", "4") == 2
    assert "no model" in capsys.readouterr().err
