"""benchmarks/drafters.py: a profile is read before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drafters
from tests.helpers.profile_job import write_job

COSTS = {"is_static": False, "row_buckets": [], "context_len": 8}
STAGE = dict.fromkeys(("constant_ms", "row_ms", "token_ms", "context_ms", "pair_ms"), 1.0)
STAGE |= {"knots": [], "num_points": 3, "r2": None, "mean_error": None}
CALIBRATION = {"calibration": {"host_ms": 0.5}}


def test_costs_and_host_time_are_those_of_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"costs": COSTS | {"stages": {"plain": STAGE}}, **CALIBRATION}))
    times, calibration = drafters.read_profile(path)
    assert times.of_pass(["plain"], 1) == pytest.approx(1 + 1 + 1 + 8 + 8) and calibration.host_ms == 0.5


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (None, "cannot read"),
        ("{", "JSONDecodeError"),
        (json.dumps([]), "make it anew"),
        (json.dumps({"costs": COSTS, **CALIBRATION}), "KeyError: 'stages'"),
        (json.dumps({"costs": COSTS | {"stages": {"plain": STAGE}}}), "KeyError: 'calibration'"),
        (json.dumps({"costs": COSTS | {"stages": {"plain": {}}}, **CALIBRATION}), "costs.stages.plain.knots"),
        (json.dumps({"costs": COSTS | {"stages": {}}, **CALIBRATION}), "no stage 'plain'"),
    ],
)
def test_a_profile_that_is_none_is_told_before_a_model_is_loaded(
    profile: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, job = tmp_path / "profile.json", write_job(tmp_path, tmp_path / "nowhere")
    if profile is not None:
        path.write_text(profile)
    assert drafters.main([str(job), "--profile", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("drafters: --profile: ") and words in error


@pytest.mark.parametrize("read", ["in.jsonl", "job.yaml"])
def test_no_file_of_the_job_is_written_over(
    read: str, tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    job = write_job(tmp_path, tmp_path / "nowhere")
    assert drafters.main([str(job), "--json", str(tmp_path / read)]) == 2
    assert "is read by this command" in capsys.readouterr().err
