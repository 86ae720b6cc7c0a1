"""Jobs over a few lines and the stand-in for the model; shared by the tests of jobs."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hispec.errors import build
from hispec.jobs.inputs import Record
from hispec.jobs.manifest import manifest_path
from hispec.jobs.rows import BadRow, Row, parse_row
from hispec.jobs.runner import JobReport, run_job
from hispec.jobs.schema import InputConfig, Job, RunConfig
from tests.helpers.fake_llm import FakeLLM

THREE_TIER = {"draft": {"layer": 2}, "check": {"layer": 5}, "num_draft_tokens": 3, "num_checks": 2}


def install_fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts FakeLLM, as new, in the place of `hispec.llm.LLM`."""
    module = types.ModuleType("hispec.llm")
    module.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "hispec.llm", module)
    for name, value in (
        ("instances", []),
        ("on_step", None),
        ("row_invariant", True),
        ("wrong_when_speculative", False),
        ("weights", "some"),
    ):
        monkeypatch.setattr(FakeLLM, name, value)


def make_job(folder: Path, lines: list[Any], **fields: Any) -> Job:
    """A job over `lines` (objects, or bytes as they are); `output` fields are merged."""
    source = folder / "in.jsonl"
    source.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    output = {"path": str(folder / "out.jsonl")} | fields.pop("output", {})
    inputs = {"path": str(source)} | fields.pop("input", {})
    values = {
        "model": "fake",
        "engine": {"max_num_seqs": 4},
        "sampling": {"max_tokens": 40, "temperature": 0.0},
    } | fields
    return build(Job, values | {"input": inputs, "output": output})


def prompts(num: int) -> list[dict[str, Any]]:
    return [{"id": f"p{number}", "prompt": f"prompt {number * 7919 % 101}"} for number in range(num)]


def run(job: Job) -> JobReport:
    return run_job(job, progress=False)


def rows_of(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in job.output.path.read_bytes().splitlines()]


def manifest_of(job: Job) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(manifest_path(job.output.path).read_bytes())
    return values


def texts_of(job: Job) -> list[str]:
    return [row["outputs"][0]["text"] for row in rows_of(job)]


def parse(raw: bytes | dict[str, Any], **sampling: Any) -> Row | BadRow:
    """Line 7 of an input, as row 3."""
    config = build(RunConfig, {"model": "fake", "sampling": sampling})
    line = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    return parse_row(config, InputConfig(path=Path("in.jsonl")), 3, Record(None, 7, line))


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before this step of the engine."""

    def on_step(number: int) -> None:
        if number == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "on_step", on_step)
