"""benchmarks/learning.py on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import learning


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [5, 6, 7 + i]}) + "\n" for i in range(8)))
    return path


def run(model: Path, prompts: Path, *options: str) -> int:
    return learning.main([str(model), "--prompts", str(prompts), "--max-tokens", "12", *options])


def test_engines_take_turns_and_say_the_same(
    tiny_path: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    options = ("--parts", "2", "--batch-size", "2", "--learn-tokens", "8192", "--json", str(target))
    assert run(tiny_path, prompts, *options) == 0
    result = json.loads(target.read_text())
    assert result["equal_outputs"] == {"plain": 8, "lookup": 8, "learnt": 8}
    assert [len(each["seconds"]) for each in result["batches"].values()] == [4, 4, 4]
    assert result["rounds"]["learnt"] <= result["rounds"]["plain"]
    assert "/" not in json.dumps(result["options"] | {"model": ""}), "no paths of this machine"
    printed = capsys.readouterr().out
    assert "| learnt | " in printed and "96 are too few to tell what it gains" in printed


def test_a_part_is_compared_with_the_same_prompts() -> None:
    batches = {
        "plain": {"tokens": [10, 10, 30, 10], "seconds": [1.0, 1.0, 1.0, 1.0]},
        "learnt": {"tokens": [10, 10, 30, 10], "seconds": [1.0, 1.0, 0.5, 0.5]},
    }
    of_all, *of_parts = learning.ratios({"batches": batches, "options": {"parts": 2}}, "learnt")
    assert of_all[0] == pytest.approx(4 / 3) and [part[0] for part in of_parts] == [1.0, 2.0]
    assert of_parts[1][1] == pytest.approx((2.0, 2.0))


def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, prompts) == 2  # enough prompts, but no model there
    assert "cannot load model" in capsys.readouterr().err
    assert run(tmp_path, prompts, "--batch-size", "2") == 2
    assert "8 are too few for 4 parts of two batches of 2" in capsys.readouterr().err
    assert run(tmp_path, prompts, "--confidence", "1.5") == 2
    assert "guess_confidence: must be below 1, got 1.5" in capsys.readouterr().err
    assert run(tmp_path, prompts, "--learn-tokens", "100") == 2
    assert "learn_tokens=100 are too few" in capsys.readouterr().err
