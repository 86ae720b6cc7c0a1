"""The job and plan files of benchmarks/table are those that the published results were measured with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hispec.config import SpeculativeConfig
from hispec.jobs.load import load_job, load_preset

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("result", "prefix"), [("bench-table-batch1.json", ""), ("bench-maths-batch1.json", "maths_")]
)
def test_jobs_and_plans_are_those_of_the_raw_results(result: str, prefix: str) -> None:
    raw = json.loads((BENCHMARKS / "results" / result).read_text(encoding="utf-8"))
    job = load_job(BENCHMARKS / "table" / f"{prefix}bench.yaml")
    own = raw["speculative"]
    assert job.speculative == (None if own is None else SpeculativeConfig.model_validate(own))
    assert (job.model, job.sampling.max_tokens) == (raw["model"], raw["options"]["max_tokens"])
    for name, plan in raw["options"]["plans"].items():
        preset = load_preset(BENCHMARKS / "table" / f"{name}.yaml")
        assert preset.speculative == SpeculativeConfig.model_validate(plan), name
        assert preset.model == raw["model"], name
