"""benchmarks/command.py and arguments.py, and what the commands make of them: what the user can mend is told
in a line, before anything is measured."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    control,
    cpu,
    drafters,
    gpu_report,
    host_cost,
    kernel_counts,
    prompts,
    serve_soak,
    simulator,
)
from benchmarks.command import USER_ERROR, check_results, exit_code
from hispec.errors import ConfigError


def test_a_result_is_written_over_nothing_that_is_read(tmp_path: Path) -> None:
    source, target = tmp_path / "a.jsonl", tmp_path / "new" / "result.json"
    source.write_text("{}")
    options = argparse.Namespace(files=[tmp_path / "b.jsonl", source], model="x", json=target, out_file=None)
    check_results(options, ("--json", "--out-file"))
    assert target.parent.is_dir()
    options.json = source
    with pytest.raises(ConfigError, match=r"--json: .* is read by this command"):
        check_results(options)
    options.files = []
    with pytest.raises(ConfigError, match=r"--json: .* is read by this command"):
        check_results(options, read=[source])
    options.out_file = source
    with pytest.raises(ConfigError, match="--json and --out-file both name"):
        check_results(options, ("--json", "--out-file"))


def test_what_the_user_can_mend_is_a_line_and_all_else_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(error: Exception) -> int:
        raise error

    assert exit_code("name", lambda: None) == 0 and exit_code("name", lambda: 1) == 1
    for error in (ConfigError("mend it"), FileNotFoundError("mend it")):
        assert exit_code("name", partial(fail, error)) == USER_ERROR
        assert capsys.readouterr().err == "name: mend it\n"
    with pytest.raises(ValueError, match="a fault"):
        exit_code("name", lambda: fail(ValueError("a fault")))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (control, ["--batch-sizes", "-1", "4"]),
        (control, ["--batch-sizes", "0", "4"]),
        (control, ["--repeats", "0"]),
        (control, ["--limit", "0"]),
        (control, ["--max-tokens", "0"]),
        (control, ["--least-requests", "0"]),
        (control, ["--warm-up", "-1"]),
        (control, ["--warm-up", "inf"]),
        (simulator, ["--requests", "0"]),
        (simulator, ["--rate", "0.5", "0"]),
        (simulator, ["--rate", "nan"]),
        (simulator, ["--rows", "0"]),
        (simulator, ["--max-tokens", "0"]),
        (cpu, ["--repeats", "0"]),
        (host_cost, ["--rounds", "0"]),
        (host_cost, ["--rows", "0"]),
        (drafters, ["job.yaml", "--limit", "0"]),
        (drafters, ["job.yaml", "--max-tokens", "0"]),
        (prompts, ["folder", "prompts.jsonl", "--per-task", "0"]),
        (prompts, ["folder", "prompts.jsonl", "--skip", "-1"]),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    command: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == USER_ERROR and "must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (control, ["--prompts", "nosuch.jsonl"], "nosuch.jsonl"),
        (control, ["--model", "nosuch", "--fixed-only"], "nosuch"),
        (simulator, ["--prompts", "nosuch.jsonl"], "nosuch.jsonl"),
        (cpu, ["--model", "nosuch"], "nosuch"),
        (drafters, ["nosuch.yaml"], "nosuch.yaml"),
        (prompts, ["nosuch", "prompts.jsonl"], "nosuch"),
    ],
)
def test_what_is_not_there_is_told(
    command: Any,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith(command.__name__.partition(".")[2] + ": ") and words in error


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (control, ["--prompts", "{}", "--json", "{}"]),
        (simulator, ["--prompts", "{}", "--json", "{}"]),
        (cpu, ["--json", "{}/.."]),
        (host_cost, ["--out", "{}/.."]),
        (kernel_counts, ["--json", "{}/.."]),
        (serve_soak, ["--json", "{}/.."]),
        (serve_soak, ["--markdown", "{}/.."]),
        (serve_soak, ["--json", "{}.new", "--markdown", "{}.new"]),
    ],
)
def test_a_place_where_no_result_can_be_is_told_before_anything_is_measured(
    command: Any,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve_soak, "measure", lambda _: pytest.fail("minutes of work were begun"))
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "hello"}\n')
    assert command.main([argument.format(source) for argument in arguments]) == USER_ERROR
    error = capsys.readouterr().err
    assert any(
        words in error for words in ("is read by this", "not a regular file", "not a folder", "both name")
    )
    assert source.read_text() == '{"prompt": "hello"}\n'


def test_a_page_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{gpu_report.BEGIN}\nold\n{gpu_report.END}\n")

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(gpu_report, "read_result", lambda path: {})
    monkeypatch.setattr(gpu_report, "lines_of", lambda result, source: ["new"])
    assert gpu_report.main(["result.json", "--docs", str(page)]) == USER_ERROR
    assert "no space left" in capsys.readouterr().err and "old" in page.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
