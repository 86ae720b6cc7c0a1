"""A job with workers writes what it writes without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hispec.errors import build
from hispec.jobs.runner import run_job
from hispec.jobs.schema import Job
from tests.workers.support import SMALL


def test_a_job_writes_the_same_rows(tiny_path: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": f"row {number}", "sampling": {"max_tokens": 4 + number % 7}} for number in range(20)]
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": ""}]))

    def run(name: str, **more: Any) -> tuple[bytes, Any]:
        target = tmp_path / name
        values = {
            "model": str(tiny_path),
            "engine": SMALL,
            "sampling": {"temperature": 1.0, "ignore_eos": True},
            "speculative": {"draft": {"layer": 3}, "num_draft_tokens": 2},
            "input": {"path": str(source)},
            "output": {"path": str(target), "token_ids": True, "compare_plain": True},
        }
        report = run_job(build(Job, {**values, **more}), progress=False)
        return target.read_bytes(), report

    (alone, one), (together, two) = run("one.jsonl"), run("two.jsonl", workers=2)
    assert alone == together and alone.count(b"\n") == 21
    assert two.comparison.num_identical == two.comparison.num_compared == 20
    assert two.rates.accept_len_histogram == one.rates.accept_len_histogram
    assert len(two.stats["workers"]) == 2
