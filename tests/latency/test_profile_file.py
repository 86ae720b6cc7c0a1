"""A profile is kept and found again; the command that measures it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from hispec.cli import main
from hispec.errors import ConfigError
from hispec.latency.profile_file import LatencyProfile, kept_path, load, save
from hispec.measure import latency as measuring
from hispec.measure.latency import latency_for, subject_of
from tests.helpers.latency import SIZES

CPU = torch.device("cpu")


# ---- what is kept ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def num_measured(measured: LatencyProfile, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The sizes of each measurement that is asked for; it takes no time, and workers are not measured."""
    asked: list[dict[str, Any]] = []

    def measure(
        decoder: Decoder, layers: list[int], exits: Sequence[AdapterExit] = (), **sizes: Any
    ) -> LatencyProfile:
        asked.append(sizes)
        return measured.model_copy(update={"max_num_seqs": sizes["max_num_seqs"]})

    monkeypatch.setattr(measuring, "measure_latency", measure)
    monkeypatch.setattr("hispec.profile.worker_speed.keep_worker_speeds", lambda job, **_: None)
    return asked


def test_a_profile_is_measured_once_and_kept(
    tiny_decoder: Decoder,
    exits: list[AdapterExit],
    measured: LatencyProfile,
    cache: Path,
    num_measured: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ask(**changes: Any) -> LatencyProfile:
        return latency_for(
            tiny_decoder, [2, 5, 7], exits, **{**SIZES, "draft_model": tiny_decoder, **changes}
        )

    kept = kept_path(measured.subject)
    assert (
        ask() == measured
        and len(num_measured) == 1
        and load(kept) == measured
        and kept.parent == cache / "latency"
    )
    assert str(kept) in capsys.readouterr().err
    assert ask() == measured and len(num_measured) == 1
    ask(max_num_seqs=4)
    assert len(num_measured) == 2, "it must cover all rows"
    assert ask().max_num_seqs == 4 and len(num_measured) == 2
    values = json.loads(kept.read_text())
    values["subject"]["versions"]["torch"] = "1.0"
    kept.write_text(json.dumps(values))
    ask()
    assert len(num_measured) == 3, "a stale one is measured again"
    kept.write_text("{")
    ask()
    assert len(num_measured) == 4, "and so is a damaged one"
    ask(max_window=1)
    assert len(num_measured) == 4, "it may be of wider rounds"
    ask(max_window=2 * SIZES["max_window"])
    assert len(num_measured) == 5, "and not of narrower ones"


def test_what_one_job_needs_does_not_throw_out_what_another_has_measured(
    tiny_decoder: Decoder, exits: list[AdapterExit], cache: Path, num_measured: list[Any]
) -> None:
    """Many rows of short rounds, then one row of long ones: both are measured the second time."""
    many, wide = {"max_num_seqs": 4, "max_window": 1}, {"max_num_seqs": 1, "max_window": 40}
    for sizes in (many, wide):
        latency_for(tiny_decoder, [2, 5, 7], exits, **sizes, draft_model=tiny_decoder, progress=False)
    last = num_measured[-1]
    assert len(num_measured) == 2 and (last["max_num_seqs"], last["max_window"]) == (4, 40)


def test_before_a_measurement_it_is_said_what_how_long_and_where_it_is_kept(
    tiny_decoder: Decoder,
    measured: LatencyProfile,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = []

    def measure(*args: Any, **sizes: Any) -> LatencyProfile:
        said.append(capsys.readouterr().err)
        return measured

    monkeypatch.setattr(measuring, "measure_latency", measure)
    latency_for(tiny_decoder, [], **SIZES)
    (line,) = said[0].splitlines()
    kept = kept_path(subject_of(tiny_decoder, [], [], None))
    for part in ("each stage of a round costs", "about a minute", str(kept), "speculative.goodput.latency"):
        assert part in line
    latency_for(tiny_decoder, [], **SIZES | {"max_num_seqs": 64}, progress=False)
    assert said[1] == "", "nothing where no progress is to be shown"


def test_a_profile_that_is_named_must_fit(
    tiny_decoder: Decoder,
    exits: list[AdapterExit],
    measured: LatencyProfile,
    tmp_path: Path,
    num_measured: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(measured, tmp_path / "mine.json")
    assert latency_for(tiny_decoder, [2, 5], exits, **SIZES, path=tmp_path / "mine.json") == measured
    assert not caplog.records
    wider = SIZES | {"max_window": 4 * measured.widest}
    assert latency_for(tiny_decoder, [2, 5], exits, **wider, path=tmp_path / "mine.json") == measured
    assert f"is of rounds of {measured.widest} positions a row, and plans may have" in caplog.text
    with pytest.raises(ConfigError, match=r"has exits at layers \[2, 5, 7\], but not at \[3\]"):
        latency_for(tiny_decoder, [2, 3, 5], exits, **SIZES, path=tmp_path / "mine.json")
    with pytest.raises(ConfigError, match="at layer 2 of a trained one there, of the model's own head here"):
        latency_for(tiny_decoder, [2, 5], [], **SIZES, path=tmp_path / "mine.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        latency_for(tiny_decoder, [2, 5], exits, **SIZES, path=tmp_path / "other.json")
    assert not num_measured


@pytest.mark.parametrize("name", ["cores", "threads"])
def test_a_profile_of_all_cores_is_not_that_of_a_worker_and_says_so(
    tiny_decoder: Decoder, measured: LatencyProfile, tmp_path: Path, name: str
) -> None:
    """Measured again, as of another model, it would be the same."""
    subject = measured.subject.model_copy(update={"machine": measured.subject.machine | {name: 99}})
    save(measured.model_copy(update={"subject": subject, "fingerprint": subject.fingerprint}), tmp_path / "f")
    with pytest.raises(ConfigError, match=f"another machine: {name} is 99 there.*of several workers"):
        latency_for(tiny_decoder, [7], [], **SIZES, path=tmp_path / "f")


def test_a_profile_of_short_contexts_is_not_that_of_long_ones(
    tiny_decoder: Decoder,
    exits: list[AdapterExit],
    measured: LatencyProfile,
    cache: Path,
    num_measured: list[Any],
) -> None:
    """What it says of them would be a guess."""
    sizes: dict[str, Any] = SIZES | {"draft_model": tiny_decoder, "progress": False}
    for _ in range(2):
        latency_for(tiny_decoder, [2, 5, 7], exits, **sizes)
    assert len(num_measured) == 1
    kept = kept_path(measured.subject)
    values, longest = json.loads(kept.read_text()), load(kept).longest
    for point in values["points"]:
        point["context_tokens"] = min(point["context_tokens"], point["rows"] * (longest - 1))
    kept.write_text(json.dumps(values))
    latency_for(tiny_decoder, [2, 5, 7], exits, **sizes)
    assert len(num_measured) == 2 and longest > 40


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(
    tiny_decoder: Decoder,
    measured: LatencyProfile,
    tmp_path: Path,
    num_measured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "file"))
    assert latency_for(tiny_decoder, [], **SIZES, progress=False) == measured
    assert "it will be measured again the next time" in caplog.text


def test_the_subject_tells_models_apart(
    tiny_path: Path, tiny_decoder: Decoder, exits: list[AdapterExit]
) -> None:
    mine = subject_of(tiny_decoder, [2, 5], exits, None)
    assert (
        mine.model["num_layers"] == 9
        and mine.model["dtype"] == "float32"
        and mine.exits["2"]["num_kv_layers"] == 1
    )
    sdpa = subject_of(
        Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, "sdpa"), [2, 5], exits, None
    )
    others = [
        sdpa,
        subject_of(tiny_decoder, [2, 5], [], None),
        subject_of(tiny_decoder, [2, 5], exits, tiny_decoder),
    ]
    assert len({each.fingerprint for each in (mine, *others)}) == 4


# ---- the command ----


def write_job(folder: Path, model: Path, **fields: Any) -> Path:
    (folder / "in.jsonl").write_text('{"prompt": "hello"}\n')
    values = {
        "model": str(model),
        "engine": {"max_num_seqs": 2, "max_model_len": 128, "dtype": "float32"},
        "speculative": {"draft": {"layer": 2}, "check": {"layer": 5}, "num_draft_tokens": 1, "num_checks": 1},
        "input": {"path": "in.jsonl"},
        "output": {"path": str(folder / "out.jsonl")},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values | fields))
    return folder / "job.yaml"


def test_the_command_measures_writes_and_prints(
    tiny_path: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, path = write_job(tmp_path, tiny_path), tmp_path / "new" / "latency.json"
    assert main(["profile", str(job), "--latency", str(path), "--no-progress"]) == 0
    out = capsys.readouterr().out
    profile = load(path)
    assert profile.subject.layers == (2, 5) and profile.subject.exits == {} and profile.max_num_seqs == 2
    assert max(point.tokens for point in profile.points if point.stage == "verify/0") == 4, (
        "2 rows of K + 1 places"
    )
    rows = [
        line.split()[0] for line in out.splitlines() if line.split() and line.split()[0] in profile.stages
    ]
    assert rows == list(profile.stages) and "R²" in out and str(path) in out
    assert not cache.exists()


def test_the_command_keeps_it_where_it_is_looked_for(
    tiny_path: Path, tmp_path: Path, cache: Path, num_measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hispec.profile.stage_latency.measure_latency", measuring.measure_latency)
    job = write_job(tmp_path, tiny_path, speculative=None)
    assert main(["profile", str(job), "--latency", "--max-window", "7", "--no-progress"]) == 0
    (kept,) = (cache / "latency").iterdir()
    assert kept.suffix == ".json" and [
        (each["max_num_seqs"], each["max_window"]) for each in num_measured
    ] == [(2, 7)]


def test_the_command_measures_rounds_as_wide_as_a_controller_may_choose(
    tiny_path: Path, tmp_path: Path, cache: Path, num_measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a check, though the plan that it starts from has none: else the job would measure again."""
    monkeypatch.setattr("hispec.profile.stage_latency.measure_latency", measuring.measure_latency)
    plan = {"draft": {"kind": "ngram"}, "num_draft_tokens": 3, "num_checks": 2}
    for control, widest in (("fixed", 4), ("goodput", 8)):
        job = write_job(tmp_path, tiny_path, speculative=plan | {"control": control})
        assert main(["profile", str(job), "--latency", "--no-progress"]) == 0
        assert num_measured[-1]["max_window"] == widest


def test_the_command_refuses_what_means_nothing(
    tiny_path: Path, tmp_path: Path, num_measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, tiny_path)
    assert main(["profile", str(job), "--latency", "--json", "x.json", "--top", "2"]) == 2
    assert "--json, --top: means nothing with --latency" in capsys.readouterr().err
    assert main(["profile", str(job), "--latency", str(tmp_path)]) == 2
    assert "--latency" in capsys.readouterr().err and not num_measured
