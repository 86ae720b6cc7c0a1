"""A dry run finds what a job would find, and writes nothing."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hispec.cli import main
from hispec.config.ray_cluster import RayConfig
from hispec.errors import ConfigError
from hispec.jobs import drive
from hispec.jobs import dry_run as module
from hispec.jobs.dry_run import dry_run, print_dry_run
from hispec.jobs.runner import run_job
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import install_fake_llm, make_job, prompts, run


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)
    monkeypatch.setattr(FakeLLM, "wake", lambda self: None, raising=False)


def printed(found: module.DryRun) -> str:
    text = io.StringIO()
    print_dry_run(found, text)
    return " ".join(text.getvalue().split())


def test_rows_tokens_time_and_memory_are_told_and_nothing_is_written(tmp_path: Path) -> None:
    lines = [*prompts(20), b"{broken\n", {"prompt": ""}, {"id": "x", "prompt": "a", "sampling": {"n": 2}}]
    job = make_job(tmp_path, lines)
    found = dry_run(job, progress=False)
    good = [*(line["prompt"] for line in prompts(20)), "a"]
    assert (found.num_rows, found.num_good, found.num_done) == (23, 21, 0)
    assert found.prompt_tokens == sum(map(len, good)) and found.max_tokens == 22 * 40
    broken, empty = found.reasons.lines(5)
    assert found.reasons.total == 2 and "not valid JSON" in broken and broken.endswith("(line 21)")
    assert empty == "1 × the prompt is empty: give at least one token (line 22)"
    assert found.sample.num_results == 4  # as many as run together
    assert found.seconds is not None and found.output_bytes is not None
    assert found.seconds == pytest.approx(found.sample.seconds / 4 * 21)
    assert list(tmp_path.iterdir()) == [job.input.path]
    text = printed(found)
    assert "23: 21 to do, 2 that cannot be served, 0 done before" in text and "at most 880 new" in text


def test_what_is_done_is_counted_and_left_alone(tmp_path: Path) -> None:
    run(make_job(tmp_path, prompts(6)))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    found = dry_run(make_job(tmp_path, prompts(6)), progress=False)
    assert found.num_done == 6 and len(FakeLLM.instances) == 1  # that of the run
    job = make_job(tmp_path, prompts(9))
    found = dry_run(job, progress=False)
    assert (found.num_done, found.num_good) == (6, 3)
    assert {path: path.read_bytes() for path in before if path != job.input.path} == {
        path: content for path, content in before.items() if path != job.input.path
    }


def test_a_model_that_made_other_rows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run finds it, though the file is the same."""
    run(make_job(tmp_path, prompts(6)))
    monkeypatch.setattr(FakeLLM, "weights", "others")
    for each in (dry_run, run_job):
        with pytest.raises(ConfigError, match=r"fingerprint\.model was 'some' and is 'others'"):
            each(make_job(tmp_path, prompts(7)), progress=False)


def test_rows_that_take_too_long_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_S", -1.0)
    found = dry_run(make_job(tmp_path, prompts(20)), progress=False)
    assert found.sample.num_results == 0 and found.num_good == 20 and found.seconds is None
    assert "not known" in printed(found) and not FakeLLM.instances[0].requests


def test_a_sample_of_which_some_rows_end_in_time_says_what_that_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s = [0.0]

    def wait(number: int) -> None:
        llm = FakeLLM.instances[0]
        if len(llm.requests) < llm.most_unfinished == 12:
            waited_s[0] = module.SAMPLE_S

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + waited_s[0])
    monkeypatch.setattr(drive, "time", clock)
    monkeypatch.setattr(FakeLLM, "on_step", wait)
    monkeypatch.setattr(FakeLLM, "num_workers", 3)
    job = make_job(tmp_path, prompts(20), engine={"max_num_seqs": 4})
    found = dry_run(job, progress=False)
    assert found.num_tried == 12, "rows of all workers"
    assert 0 < (ended := found.sample.num_results) < 12
    # Those that had not ended take 20 seconds together, or longer.
    assert found.seconds == pytest.approx(max(module.SAMPLE_S, found.sample.seconds) / 12 * 20)
    assert not FakeLLM.instances[0].requests
    assert f"at least 33 s, as {ended} of 12 rows ended within 20 s" in printed(found)


def test_a_step_that_waits_for_workers_is_woken_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = threading.Event()
    monkeypatch.setattr(module, "SAMPLE_S", 0.05)
    monkeypatch.setattr(module, "warm_up", lambda llm, job: None)
    monkeypatch.setattr(FakeLLM, "wake", lambda self: woken.set())
    monkeypatch.setattr(FakeLLM, "on_step", lambda number: woken.wait(20))
    found = dry_run(make_job(tmp_path, prompts(20)), progress=False)
    assert woken.is_set() and found.seconds is None and not FakeLLM.instances[0].requests


def test_rows_without_a_limit_are_counted_by_themselves(tmp_path: Path) -> None:
    found = dry_run(make_job(tmp_path, [{"prompt": "a", "sampling": {"max_tokens": None}}]), progress=False)
    assert found.num_unlimited == 1 and found.max_tokens == 0
    assert "besides those of 1 row without max_tokens" in printed(found)


def test_problems_of_the_job_are_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have the same id"):
        dry_run(make_job(tmp_path, [*prompts(3), *prompts(1)]), progress=False)
    assert not FakeLLM.instances


def test_a_trace_that_a_run_would_refuse_is_found(tmp_path: Path) -> None:
    trace = tmp_path / "notes.txt"
    trace.write_text("mine\n")
    job = make_job(tmp_path, prompts(3))
    of_engine = job.engine.model_copy(update={"trace": str(trace)})
    with pytest.raises(ConfigError, match=r"notes.txt exists and is no trace of HiSpec"):
        dry_run(job.model_copy(update={"engine": of_engine}), progress=False)
    with pytest.raises(ConfigError, match="traces are files of the machine"):
        dry_run(job.model_copy(update={"engine": of_engine, "ray": RayConfig()}), progress=False)
    assert not FakeLLM.instances and trace.read_text() == "mine\n"


def write_job(folder: Path, lines: list[Any]) -> str:
    job = make_job(folder, lines)
    path = folder / "job.yaml"
    values = {
        "model": "fake",
        "input": {"path": str(job.input.path)},
        "output": {"path": str(job.output.path)},
    }
    path.write_text(json.dumps(values))
    return str(path)


def test_the_flags_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, [*prompts(4), {"prompt": ""}])
    assert main(["run", job, "--dry-run", "--no-progress"]) == 0
    assert "5: 4 to do, 1 that cannot be served" in capsys.readouterr().out
    assert main(["run", job, "--no-progress"]) == 0
    assert main(["run", job, "--no-progress", "--dry-run", "--new"]) == 0
    assert main(["run", write_job(tmp_path, [{"prompt": ""}]), "--no-progress", "--dry-run", "--new"]) == 1
    job = write_job(tmp_path, [*prompts(4), {"prompt": ""}])
    assert main(["run", job, "--no-progress", "--set", "sampling.max_tokens=3"]) == 2
    assert "sampling.max_tokens was not set and is 3" in capsys.readouterr().err
    assert main(["run", job, "--no-progress", "--set", "sampling.max_tokens=3", "--only-missing"]) == 0
    assert main(["run", job, "--no-progress", "--set", "sampling.max_tokens=3", "--new"]) == 0
    assert main(["run", job, "--no-progress", "--set", "sampling.max_tokens=3", "--retry-failed"]) == 0
    assert "5: 0 with outputs, 1 with errors, 4 done before" in " ".join(capsys.readouterr().out.split())
    assert main(["run", job, "--new", "--retry-failed"]) == 2
    assert "contradict each other" in capsys.readouterr().err


def test_the_schema_is_that_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["required"]) == {"model", "input", "output"} and schema["additionalProperties"] is False
    output = schema["$defs"]["OutputConfig"]["properties"]
    assert output["order"]["enum"] == ["input", "finished"] and output["sync_s"]["default"] == 1.0
