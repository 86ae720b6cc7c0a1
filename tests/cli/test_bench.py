"""`hispec bench`: its table and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hispec.cli import main
from tests.helpers.command import SPECULATIVE
from tests.helpers.fake_llm import FakeLLM


def test_bench_prints_a_table_and_writes_json(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    arguments = [
        "bench",
        str(job),
        "--json",
        str(path),
        "--no-transformers",
        "--limit",
        "5",
        "--repeats",
        "2",
        "--batch-size",
        "2",
        "--by-batch",
        "--max-tokens",
        "6",
    ]
    assert main([*arguments, "--set", *SPECULATIVE]) == 0
    result = json.loads(path.read_text())
    assert len(result["groups"]) == 3, "two prompts, two, and one"
    assert result["options"] == {
        "repeats": 2,
        "batch_size": 2,
        "max_tokens": 6,
        "context": None,
        "temperature": 0.0,
        "transformers": False,
        "plans": {},
        "by_batch": True,
    }
    assert result["exact_match"] == {"two_tier": [5, 5], "three_tier": [5, 5]}
    assert "three-tier" in capsys.readouterr().out


def test_bench_finds_an_unwritable_json_file_before_the_work(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", str(job), "--json", str(tmp_path / "file" / "bench.json")]) == 2
    assert "--json: cannot write" in capsys.readouterr().err and not FakeLLM.instances


def test_figures_do_not_replace_what_a_bench_reads(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = next(tmp_path.glob("*.jsonl"))
    preset, profile = tmp_path / "fast.yaml", tmp_path / "profile.json"
    preset.write_text("model: m\nspeculative:\n  draft: {kind: ngram}\n")
    profile.write_text('{"best_of_kind": {}}')
    kept = {path: path.read_bytes() for path in (job, rows, preset, profile)}
    for path in kept:
        given = ["--plan", str(preset), "--profile", str(profile), "--json", str(path)]
        assert main(["bench", str(job), *given]) == 2
        assert f"--json: {path} is read by this command" in capsys.readouterr().err
    assert main(["bench", str(job), "--preset", str(preset), "--json", str(preset)]) == 2
    assert not FakeLLM.instances and all(path.read_bytes() == content for path, content in kept.items())


def test_a_bench_that_is_interrupted_leaves_the_json_file_as_it_was(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "on_step", interrupt)
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{\n}")
    for path in (new, old):
        assert main(["bench", str(job), "--limit", "5", "--json", str(path)]) == 130
        assert "Interrupted. Nothing was written; the same command starts again" in capsys.readouterr().err
    assert not new.exists() and old.read_text() == "{\n}"


def test_bench_measures_the_best_plans_of_a_profile(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "ngram_two_tier": {"draft": {"kind": "ngram"}, "num_draft_tokens": 4},
        "exit_three_tier": {"draft": {"layer": 2}, "check": {"layer": 5}},
    }
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(
            {
                "best_of_kind": {
                    name: {"speculative": plan, "tokens_per_s": 1.0} for name, plan in found.items()
                }
            }
        )
    )
    arguments = [
        "bench",
        str(job),
        "--profile",
        str(profile),
        "--no-transformers",
        "--repeats",
        "1",
        "--limit",
        "5",
        "--json",
        str(tmp_path / "bench.json"),
    ]
    assert main(arguments) == 0
    engines = json.loads((tmp_path / "bench.json").read_text())["engines"]
    assert found.keys() <= engines.keys() and engines["ngram_two_tier"]["plan"].startswith(
        "n-grams of 4 to 1"
    )
    taken = tmp_path / "ngram_two_tier.yaml"
    taken.write_text("{model: fake, speculative: {draft: {kind: ngram}}}")
    assert main([*arguments, "--plan", str(taken)]) == 2
    assert "'ngram_two_tier' is also a name in" in capsys.readouterr().err
    for content, words in (
        ("{}", "is not what `hispec profile --json` writes"),
        ('{"best_of_kind": {"a": {"speculative": {"draft": {}}}}}', "best_of_kind.a"),
        (
            '{"best_of_kind": {"a": {"speculative": {"draft": {"kind": "ngram"}, "former": 1}}}}',
            "if another version of HiSpec wrote the file, make it anew with `hispec profile --json`",
        ),
    ):
        profile.write_text(content)
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_bench_refuses_two_plans_of_one_name(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / folder / "ngram.yaml" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("{model: fake, speculative: {draft: {kind: ngram}}}")
    assert main(["bench", str(job), "--plan", str(paths[0]), "--plan", str(paths[1])]) == 2
    assert f"--plan: {paths[0]} and {paths[1]} are both named 'ngram'" in capsys.readouterr().err
    assert not FakeLLM.instances
