"""benchmarks/prompts.py: what it takes of the files of data sets, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prompts

CUTS = "one\u2028two\u2029three\x85four"  # where str.splitlines() cuts, and no line of JSON ends


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    turns = [("summarization", "shorten"), ("math_reasoning", "add"), ("writing", "write"), ("qa", "ask")]
    turns += [("rag", "look"), ("translation", "translate")]
    write(tmp_path / "gsm8k_test.jsonl", [{"question": CUTS}, {"question": "second"}])
    write(tmp_path / "humaneval.jsonl", [{"prompt": "def f():"}, {"prompt": "def g():"}])
    rows = [{"category": category, "turns": [text, "then"]} for category, text in turns for _ in range(2)]
    write(tmp_path / "spec_bench.jsonl", rows)
    return tmp_path


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def test_prompts_of_each_task_are_written_whole(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "prompts.jsonl"
    assert prompts.main([str(folder), str(target), "--skip", "0", "--per-task", "1"]) == 0
    rows = [json.loads(line) for line in target.read_bytes().splitlines()]
    found = {row["metadata"]["task"]: row["messages"][0]["content"] for row in rows}
    tasks = ["maths", "code", "summarisation", "chat", "qa", "rag", "translation"]
    assert list(found) == tasks and found["maths"] == CUTS and found["chat"] == "write"
    assert found["code"].endswith("\n\ndef f():")


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        ({}, ["--per-task", "3"], "maths: 2 prompts, which is not enough to skip 0 and take 3"),
        ({}, ["--task", "poetry"], "--task: poetry: there are maths, code"),
        ({"humaneval": None}, [], "cannot read"),
        ({"humaneval": [{"text": "x"}]}, [], "line 1: has no field 'prompt'"),
        ({"gsm8k_test": [{"question": 1}]}, [], "line 1: 'question' must be a non-empty string"),
        ({"spec_bench": [{"category": "qa", "turns": []}]}, [], "line 1: 'turns' must be a list of texts"),
        ({"spec_bench": []}, [], "has no rows"),
    ],
)
def test_what_cannot_be_taken_is_told_and_nothing_is_written(
    folder: Path,
    changed: dict[str, Any],
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, rows in changed.items():
        (folder / f"{name}.jsonl").unlink() if rows is None else write(folder / f"{name}.jsonl", rows)
    target = folder / "prompts.jsonl"
    arguments = [str(folder), str(target), "--skip", "0", "--per-task", "1", *options]
    assert prompts.main(arguments) == 2 and not target.exists()
    error = capsys.readouterr().err
    assert error.startswith("prompts: ") and words in error


def test_no_file_of_a_data_set_is_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder / "humaneval.jsonl"
    before = source.read_bytes()
    assert prompts.main([str(folder), str(source), "--skip", "0", "--per-task", "1"]) == 2
    assert "is read by this command" in capsys.readouterr().err and source.read_bytes() == before
