"""The job and plans of benchmarks/table are those that README's table was measured with."""

from __future__ import annotations

import json
from pathlib import Path

from hispec.config import SpeculativeConfig
from hispec.jobs.load import load_job, load_preset

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_job_and_plans_are_those_of_the_raw_result() -> None:
    raw = json.loads((BENCHMARKS / "results" / "bench-table-batch1.json").read_text(encoding="utf-8"))
    job = load_job(BENCHMARKS / "table" / "bench.yaml")
    own = raw["speculative"]
    assert job.speculative == (None if own is None else SpeculativeConfig.model_validate(own))
    assert (job.model, job.sampling.max_tokens) == (raw["model"], raw["options"]["max_tokens"])
    for name, plan in raw["options"]["plans"].items():
        preset = load_preset(BENCHMARKS / "table" / f"{name}.yaml")
        assert preset.speculative == SpeculativeConfig.model_validate(plan), name
        assert preset.model == raw["model"], name
