"""`hispec run`: its summary, its exit codes, and how it ends early."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hispec.cli import main
from hispec.errors import ConfigError
from tests.helpers.command import ENVIRONMENT, SLOW_RUN, SPECULATIVE
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import interrupt_at


def test_run_prints_a_summary_and_writes_rows(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(job), "--set", *SPECULATIVE, "--set", "output.compare_plain=true"]) == 0
    out, err = capsys.readouterr()
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 6
    for part in (
        "fake",
        "draft [0, 2) → check [2, 5) → verify [5, 10)",
        "6: 5 with outputs, 1 with errors",
        "5/5 rows",
        "50.0% of drafted tokens kept by check, 50.0% of tentative tokens kept by verify",
        "× plain",
        str(tmp_path / "out.jsonl"),
    ):
        assert part in out
    assert "tokens/s" in err and "rows" in err


def test_acceptance_at_its_floor_is_said_plainly(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = FakeLLM.stats
    monkeypatch.setattr(FakeLLM, "stats", lambda self: stats(self) | {"draft_kept": 1})
    assert main(["run", str(job), "--set", *SPECULATIVE]) == 0
    assert "docs/jobs.md" in capsys.readouterr().out


def test_a_resumed_complete_job_says_so_without_the_model(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(job)]) == 0
    FakeLLM.instances.clear()
    assert main(["run", str(job), "--set", "output.resume=true"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "6: all done before, 1 of them with errors, which --retry-failed does again; --new" in said
    assert not FakeLLM.instances


def test_a_job_whose_rows_all_fail_exits_with_1_and_says_why(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["{", *['{"prompt": ""}'] * 2, *["{}"] * 3, '{"prompt": 1}', '{"prompt": 2}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert main(["run", str(job), "--set", *SPECULATIVE, "output.compare_plain=true"]) == 1
    out = capsys.readouterr().out
    assert re.findall(r"\d × .*?(?= *$)", out, re.MULTILINE) == [
        "3 × a row needs exactly one of prompt, prompt_token_ids and messages, got none (first in line 4)",
        "2 × the prompt is empty: give at least one token (first in line 2)",
        "1 × not valid JSON: Expecting property name enclosed in double quotes, at character 2 (line 1)",
        "2 × other reasons",
    ]
    assert not any(word in out for word in ("nan", "tokens/s", "× plain"))


def test_the_exit_code_is_of_all_rows_of_the_job(job: Path, tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": ""}\n{}\n')
    assert [main(["run", str(job)]) for _ in range(2)] == [1, 1]
    rows.write_text('{"prompt": ""}\n{}\n{"prompt": "a"}\n')
    assert main(["run", str(job)]) == 0
    rows.write_text('{"prompt": ""}\n{}\n{"prompt": "a"}\n{"id": 1}\n')
    assert [main(["run", str(job), *more]) for more in (["--dry-run"], [])] == [0, 0]
    # Rows that the input no longer has count neither way.
    rows.write_text('{"prompt": "a"}\n{"id": 2}\n')
    assert [main(["run", str(job), *more]) for more in (["--dry-run"], [], ["--dry-run"])] == [0, 0, 0]
    rows.write_text('{"id": 2}\n{}\n')
    assert [main(["run", str(job), *more]) for more in (["--dry-run"], [], ["--dry-run"])] == [1, 1, 1]


@pytest.mark.parametrize(
    ("first", "way_on"),
    [
        ([], ""),
        (["output.resume=false"], "output.resume=true"),
        (["output.overwrite=true"], "output.resume=true output.overwrite=false"),
        (["output.resume=true"], ""),
    ],
)
def test_an_interrupted_job_says_how_to_go_on_and_that_works(
    job: Path,
    first: list[str],
    way_on: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(5, patch)
        assert main(["run", str(job), "--set", *first, "output.token_ids=true"]) == 130
    flags = f" with --set {way_on}" if way_on else ""
    assert f"; the same command{flags} goes on from there" in capsys.readouterr().err
    assert main(["run", str(job), "--set", *first, "output.token_ids=true", *way_on.split()]) == 0
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 6


def test_a_real_sigint_leaves_whole_lines_and_exit_code_130(job: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(10_000))
    )
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_RUN, "run", str(job)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size > 10_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    found = re.search(r"Interrupted\. (\d+) of 10000 rows are done", err)
    lines = out.read_bytes().splitlines(keepends=True)
    assert found is not None and len(lines) == int(found[1]) > 10
    assert all(
        line.endswith(b"\n") and json.loads(line)["index"] == index for index, line in enumerate(lines)
    )


def test_the_flag_for_ray_says_where_workers_are_in_place_of_the_file(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def no_run(job: Any, **_: Any) -> None:
        seen.append((job.workers, job.ray.address, job.ray.num_cpus))
        raise ConfigError("enough")

    monkeypatch.setattr("hispec.jobs.runner.run_job", no_run)
    with job.open("a", encoding="utf-8") as file:
        file.write("\nworkers: 4\nray: {num_cpus: 3}\n")
    for flags in (["--ray"], ["--ray", "head:6379"], ["--ray", "--set", "ray.num_cpus=2"]):
        assert main(["run", str(job), *flags]) == 2
    assert seen == [(1, "auto", 3), (1, "head:6379", 3), (1, "auto", 2)]


def test_what_a_run_has_loaded_is_kept_from_the_garbage_collector(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr("hispec.utils.memory.gc.freeze", lambda: kept.append(1))
    assert main(["run", str(job)]) == 0
    assert kept == [1]
