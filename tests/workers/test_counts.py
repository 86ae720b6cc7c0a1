"""How many workers `auto` takes: what was measured for a model on this machine, within what there is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hispec import LLM
from hispec.cli import main
from hispec.config import EngineConfig
from hispec.errors import ConfigError, RequestError, build
from hispec.jobs.schema import Job
from hispec.profile import worker_speed
from hispec.profile.worker_speed import keep_worker_speeds, measure_workers, print_workers, worker_numbers
from hispec.workers import counts, shares
from hispec.workers.counts import WorkerCounts, best_count, keep, subject_of
from hispec.workers.shares import make_shares
from tests.workers.support import SMALL

CPU = EngineConfig(device="cpu")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))


def counts_of(speeds: dict[int, float], model: str = "m", **engine: Any) -> WorkerCounts:
    config = build(EngineConfig, {"device": "cpu", **engine})
    return WorkerCounts(subject=subject_of(model, config), tokens_per_s=speeds)


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({1: 100.0, 2: 150.0, 4: 290.0, 8: 280.0}, 4),
        ({1: 100.0, 2: 101.0}, 1),  # not worth another process
        ({1: 100.0, 2: 103.0}, 2),
        ({1: 100.0, 2: 90.0, 4: 130.0}, 4),
        ({1: 5.0}, 1),
    ],
)
def test_the_fewest_workers_that_are_about_as_fast_as_any(speeds: dict[int, float], best: int) -> None:
    assert counts_of(speeds).best == best


def test_auto_takes_what_was_measured_of_this_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_cores", lambda: (list(range(8)), 8))
    monkeypatch.setattr(shares, "free_memory_bytes", lambda: 100 << 30)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert len(make_shares("auto", CPU, "m")) == 8
    keep(counts_of({1: 10.0, 2: 30.0, 4: 50.0, 8: 40.0}))
    assert len(make_shares("auto", CPU, "m")) == 4
    assert [share.threads for share in make_shares("auto", CPU, "m")] == [2] * 4
    assert len(make_shares("auto", CPU, "another")) == 8 and len(make_shares("auto", CPU)) == 8
    assert len(make_shares("auto", CPU.model_copy(update={"quantization": "int8"}), "m")) == 8
    assert len(make_shares(3, CPU, "m")) == 3
    monkeypatch.setattr(shares, "free_memory_bytes", lambda: 5 << 30)
    assert len(make_shares("auto", CPU, "m")) == 2  # there is less memory now


def test_another_machine_or_a_damaged_file_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = keep(counts_of({1: 10.0, 2: 30.0}))
    assert best_count("m", CPU) == 2
    with monkeypatch.context() as patch:
        patch.setattr(counts, "environment", lambda: {"cpu": "another", "cores": 2})
        assert best_count("m", CPU) is None
    for content in (
        "",
        "{}",
        '{"subject": {}, "tokens_per_s": {}}',
        '{"subject": {}, "tokens_per_s": {"x": 1}}',
    ):
        path.write_text(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert best_count("m", CPU) is None
        assert "is passed over" in caplog.text


def job_of(model: Path) -> Job:
    values = {
        "model": str(model),
        "engine": SMALL,
        "input": {"path": "in.jsonl"},
        "output": {"path": "o.jsonl"},
    }
    return build(Job, values)


def test_numbers_are_powers_of_two_and_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, numbers in ((1, []), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])):
        monkeypatch.setattr(worker_speed, "most_workers", lambda _, cores=cores: cores)
        assert worker_numbers(CPU) == numbers


def test_speeds_are_measured_and_kept(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_speed, "most_workers", lambda _: 2)
    monkeypatch.setattr(worker_speed, "_ROUNDS", 1)
    job = job_of(tiny_path)
    found = keep_worker_speeds(job, progress=False)
    assert found is not None and set(found.tokens_per_s) == {1, 2} and min(found.tokens_per_s.values()) > 0
    assert best_count(str(tiny_path), job.engine) == found.best
    print_workers(found)
    assert "(auto)" in capsys.readouterr().out


@pytest.mark.parametrize("limits", [{"max_model_len": 40}, {"num_kv_blocks": 2}, {}], ids=str)
def test_what_a_job_has_no_room_for_is_not_measured_of_it(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """Prompts are as long as there is room for; KV is the measurement's own."""
    monkeypatch.setattr(worker_speed, "worker_numbers", lambda _: [1])
    monkeypatch.setattr(worker_speed, "_ROUNDS", 1)
    seen: list[tuple[int, int]] = []
    generate = LLM.generate

    def noted(self: LLM, prompts: Any, params: Any, **options: Any) -> Any:
        outputs = generate(self, prompts, params, **options)
        seen.extend((len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in outputs)
        return outputs

    monkeypatch.setattr(LLM, "generate", noted)
    job = job_of(tiny_path)
    job = job.model_copy(update={"engine": job.engine.model_copy(update=limits)})
    found = measure_workers(job, progress=False)
    assert found is not None and found.tokens_per_s[1] > 0
    assert set(seen) == {(27, 13) if "max_model_len" in limits else (64, 32)}


def test_prompts_that_are_refused_are_no_speed(tiny_path: Path) -> None:
    with (
        LLM(str(tiny_path), **SMALL | {"num_kv_blocks": 2}) as llm,
        pytest.raises(RequestError, match="num_kv_blocks"),
    ):
        worker_speed._tokens_per_s(llm, 1)


def test_nothing_is_measured_where_there_is_no_choice(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_speed, "most_workers", lambda _: 1)
    assert measure_workers(job_of(tiny_path), progress=False) is None


def test_a_place_that_cannot_be_written_is_named(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(worker_speed, "measure_workers", lambda *_, **__: counts_of({1: 1.0}))
    with pytest.raises(ConfigError, match="HISPEC_CACHE"):
        keep_worker_speeds(job_of(tiny_path), progress=False)


def test_the_command_measures_workers_only_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    path = tmp_path / "job.yaml"
    path.write_text("model: m\ninput: {path: in.jsonl}\noutput: {path: out.jsonl}\n")
    measured = []
    monkeypatch.setattr("hispec.profile.stage_latency.profile_latency", lambda *_, **__: (None, None))
    monkeypatch.setattr("hispec.profile.stage_latency.print_latency", lambda *_: None)
    monkeypatch.setattr(worker_speed, "keep_worker_speeds", lambda job, **_: measured.append(job.model))
    assert main(["profile", str(path), "--latency", str(tmp_path / "profile.json")]) == 0 and not measured
    assert main(["profile", str(path), "--latency"]) == 0 and measured == ["m"]
