"""Commands meet a model that is none, and a job of a few rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.job_support import install_fake_llm


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)
    monkeypatch.delenv("HISPEC_DEBUG", raising=False)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job file of six rows, one of them bad."""
    lines = [json.dumps({"prompt": f"prompt {number}"}) for number in range(5)] + ["{"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: fake\ninput: {{path: in.jsonl}}\noutput: {{path: {tmp_path}/out.jsonl}}\nsampling:"
        " {temperature: 0.0}\n"
    )
    return path
