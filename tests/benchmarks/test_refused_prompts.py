"""Benchmarks that compare speeds say which prompts the model cannot serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import job_speed, serve_speed, threads_cpu


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (job_speed, []),
        (serve_speed, []),
        pytest.param(threads_cpu, ["--workers", "2"], marks=pytest.mark.slow),
    ],
)
def test_a_prompt_that_is_too_long_is_told(
    command: Any, options: list[str], tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [5] * 100_000}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(tiny_path), "--prompts", str(prompts), "--max-tokens", "4", *options]
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    name = command.__name__.partition(".")[2]
    assert f"{name}: prompt 1: " in error and "prompt 0" not in error
