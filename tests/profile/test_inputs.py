"""`hispec profile`: what it is given, and refuses before anything is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hispec.cli import main
from hispec.errors import ConfigError
from hispec.jobs.load import load_job
from hispec.profile import run as profile_run
from hispec.profile.options import ProfileOptions, Targets
from hispec.profile.run import run_profile
from tests.helpers.profile_job import SMALL, write_job


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--write-preset", "{folder}/taken.yaml"], ["--write-preset", "taken.yaml exists", "--overwrite"]),
        (["--write-preset", "{folder}"], ["--write-preset", "not a regular file"]),
        (["--json", "{folder}"], ["--json", "not a regular file", "choose another path"]),
        (["--json", "{folder}/taken.yaml/x.json"], ["--json", "cannot write to", "taken.yaml"]),
        (["--json", "{folder}/a", "--write-preset", "{folder}/a"], ["--json and --write-preset both name"]),
        (["--json", "{folder}/job.yaml"], ["--json", "job.yaml is read by this command"]),
        (["--write-preset", "{folder}/in.jsonl", "--overwrite"], ["--write-preset", "is read by this"]),
        (["--plots", "{folder}/taken.yaml"], ["--plots", "cannot write to"]),
        (["--exits", "{folder}"], ["--exits", "holds no exits"]),
        (["--max-drafts", "6"], ["max_drafts=6", "max_window=6", "to 5"]),
        (["--max-drafts", "0"], ["max_drafts", "at least 1", "got 0"]),
        (["--batch-size", "0"], ["batch_size", "got 0"]),
        (["--top", "0"], ["top", "got 0"]),
        (["--drafters", "exit", "exits"], ["drafters", "exits"]),
        (["--drafters", "model"], ["drafters: 'model' needs a draft model", "speculative.draft.path"]),
        (
            ["--set", "speculative.draft.kind=model", "speculative.draft.path={folder}/none"],
            ["speculative.draft.path", "none"],
        ),
        (["--limit", "0"], ["input.limit", "got 0"]),
        (["--repeats", "0"], ["repeats", "must be at least 1", "got 0"]),
        (["--max-tokens", "0"], ["max_tokens", "must be at least 1", "got 0"]),
        (["--set", "input.path={folder}/empty.jsonl"], ["empty.jsonl has no rows"]),
        (["--max-window", "2", "--max-drafts", "1", "--drafters", "tree"], ["no plan of tree fits", "=2"]),
        (["--set", "speculative.draft.layer=99"], ["draft.layer=99", "9"]),
        (
            ["--set", "speculative.draft.layer=2", "speculative.check.layer=99"],
            ["check.layer=99", "9"],
        ),
        (["--max-window", "128"], ["max_window=128", "max_model_len=128", "engine.max_model_len"]),
        (["--set", "speculative.draft.kind=adapter", "speculative.draft.layer=2"], ["hispec train", "path"]),
        (
            ["--set", "input.path={folder}/bad.jsonl"],
            ["a measurement needs input without errors", "line 2", "line 3"],
        ),
        (
            ["--set", "input.path={folder}/long.jsonl"],
            ["prompt 1: the prompt has 200 tokens", "prompt 2: the prompt is empty"],
        ),
    ],
)
def test_bad_input_is_one_message_before_anything_is_measured(
    tiny_path: Path,
    tmp_path: Path,
    arguments: list[str],
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HISPEC_DEBUG", raising=False)
    monkeypatch.setattr(profile_run, "warm_up", lambda *args: pytest.fail("the model was run"))
    job = write_job(tmp_path, tiny_path)
    (tmp_path / "taken.yaml").write_text("mine")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{\n{}\n')
    (tmp_path / "long.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "a" * length}) for length in (3, 200, 0))
    )
    before = sorted(tmp_path.iterdir())
    assert (
        main(["profile", str(job), *SMALL, *(argument.format(folder=tmp_path) for argument in arguments)])
        == 2
    )
    out, err = capsys.readouterr()
    assert err.startswith("hispec: ") and "Traceback" not in err and out == ""
    assert all(part in err for part in parts), err
    assert (tmp_path / "taken.yaml").read_text() == "mine" and sorted(tmp_path.iterdir()) == before


def test_plots_without_matplotlib_say_what_to_install(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["profile", str(write_job(tmp_path, tiny_path)), "--plots", str(tmp_path / "plots")]) == 2
    assert "pip install '.[plots]' in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "of_job", "taken"), [(None, 24, 24), (5, 24, 5), (None, None, 124)])
def test_answers_are_as_long_as_the_jobs_unless_told_otherwise(
    tiny_path: Path,
    tmp_path: Path,
    given: int | None,
    of_job: int | None,
    taken: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile_run.Session, "profile", lambda self, *args, **fields: {})
    job = load_job(write_job(tmp_path, tiny_path, sampling={"max_tokens": of_job}))
    result = run_profile(job, ProfileOptions(max_tokens=given), progress=False)
    assert result["options"]["max_tokens"] == taken


def test_answers_without_a_number_take_what_kv_blocks_leave(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run of the job does."""
    monkeypatch.setattr(profile_run.Session, "profile", lambda self, *args, **fields: {})
    engine = {"max_num_seqs": 2, "max_model_len": 128, "block_size": 16, "num_kv_blocks": 3}
    path = write_job(tmp_path, tiny_path, engine=engine, sampling={"max_tokens": None})
    shortest = len("1+1=")
    result = run_profile(load_job(path), ProfileOptions(), progress=False)
    assert result["options"]["max_tokens"] == 3 * 16 + 1 - shortest


@pytest.mark.parametrize("window", ["0", "-3"])
def test_a_latency_profile_of_no_places_is_refused_before_the_model_is_loaded(
    window: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, tmp_path / "no model")
    line = ["profile", str(job), "--latency", str(tmp_path / "latency.json"), "--max-window", window]
    assert main(line) == 2
    assert f"--max-window {window}: a round has one place at least" in capsys.readouterr().err


def test_a_latency_profile_does_not_replace_the_job(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, tiny_path)
    before = job.read_text()
    for mode in (["--latency", str(job)], ["--numbers", "float32", "int8", "--json", str(job)]):
        assert main(["profile", str(job), *mode]) == 2
        assert "job.yaml is read by this command" in capsys.readouterr().err
    assert job.read_text() == before


def test_a_latency_profile_needs_no_input(tiny_path: Path, tmp_path: Path) -> None:
    """Nor does it look at it: standard input would be waited for."""
    job = load_job(write_job(tmp_path, tiny_path, input={"path": "-"}))
    Targets(latency=tmp_path / "latency.json").check(job)
    patterns = load_job(write_job(tmp_path, tiny_path, input={"path": str(tmp_path / "*.none")}))
    (tmp_path / "latency.none").touch()
    with pytest.raises(ConfigError, match="is read by this command"):
        Targets(latency=tmp_path / "latency.none").check(patterns)
    Targets(latency=tmp_path / "latency.json").check(patterns)
