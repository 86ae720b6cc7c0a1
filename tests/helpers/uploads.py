"""Jobs whose output is kept elsewhere, too: in a folder that is named by a URI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hispec.jobs.runner import JobInterrupted
from hispec.jobs.schema import Job
from hispec.jobs.upload import Ledger
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import interrupt_at, make_job, prompts, run

NUM_ROWS = 30


def job_to(tmp_path: Path, name: str = "out.jsonl", lines: Any = None, **output: Any) -> Job:
    there = f"file://{tmp_path}/there/{name}"
    more = {"upload": there, "upload_s": 0.1, "path": str(tmp_path / "here" / name)} | output
    return make_job(tmp_path, prompts(NUM_ROWS) if lines is None else lines, output=more)


def there(tmp_path: Path, name: str = "out.jsonl") -> Path:
    return tmp_path / "there" / name


def ledger(tmp_path: Path) -> Ledger:
    return Ledger.model_validate_json(there(tmp_path, "out.jsonl.upload.json").read_bytes())


def uploaded(tmp_path: Path) -> bytes:
    """The rows that count."""
    parts = [there(tmp_path, part.name).read_bytes()[: part.size] for part in ledger(tmp_path).parts]
    return b"".join(parts)


def interrupted(job: Job, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(step, monkeypatch)
    with pytest.raises(JobInterrupted):
        run(job)
    monkeypatch.setattr(FakeLLM, "on_step", None)
