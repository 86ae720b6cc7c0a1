"""`hispec profile --numbers` on a tiny model: what is compared, what is recommended, what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hispec.cli import main
from hispec.errors import ConfigError, RequestError
from hispec.jobs.bench_runs import Group, Runs
from hispec.jobs.load import load_job
from hispec.profile import numbers
from hispec.profile.numbers import best_of, compare_numbers, engine_settings
from hispec.profile.options import NumbersOptions
from tests.helpers.profile_job import ROWS, write_job
from tests.helpers.tiny import tiny_checkpoint

NUM_ROWS = 5
SHORT = ["--max-tokens", "12", "--repeats", "2", "--batch-size", "2", "--no-progress"]


@pytest.fixture
def job(tiny_path: Path, tmp_path: Path) -> Path:
    return write_job(tmp_path, tiny_path, (ROWS * 2)[:NUM_ROWS])


def measured(name: str, ratio: float, low: float | None, kl: float) -> dict[str, Any]:
    interval = None if low is None else [low, 2 * ratio - low]
    return {"numbers": name, "ratio": ratio, "interval": interval, "kl": {"value": kl}}


def test_the_fastest_that_is_near_enough_is_chosen() -> None:
    first = {"numbers": "float32"}
    small, smaller = measured("bfloat16", 1.5, 1.4, 0.0002), measured("int8", 3.0, 2.9, 0.004)
    assert best_of([first, small, smaller], 0.005) == "int8"
    assert best_of([first, small, smaller], 0.001) == "bfloat16"
    assert best_of([first, small, smaller], 0.0) == "float32"


@pytest.mark.parametrize("low", [0.98, None], ids=["within chance", "one repeat of one batch"])
def test_what_is_not_surely_faster_is_not_chosen(low: float | None) -> None:
    assert best_of([{"numbers": "float32"}, measured("bfloat16", 1.1, low, 0.0)], 0.005) == "float32"


def test_speeds_are_of_turns_and_of_the_model_that_was_asked(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is ours: int8 takes half of the time, so that its ratio is 2 however fast this machine is."""
    turns: list[tuple[str, int]] = []
    time = Runs.time

    def timed(runs: Runs, at: int, prompts: Any, run: partial[Any]) -> None:
        time(runs, at, prompts, run)
        is_small = run.args[0].decoder.make_linear.quantization == "int8"
        turns.append(("int8" if is_small else "float32", at))
        runs.seconds[-1][at] = 0.5 if is_small else 1.0

    monkeypatch.setattr(Runs, "time", timed)
    options = NumbersOptions(numbers=("float32", "int8"), batch_size=2, max_tokens=12, repeats=2)
    result = compare_numbers(load_job(job), options, progress=False)
    first, small = result["measured"]
    num_batches = len(turns) // (2 * 2)
    assert num_batches == 3  # two of a task with four prompts, one of the other
    assert [at for _, at in turns] == 2 * [at for at in range(num_batches) for _ in range(2)]
    assert [name for name, _ in turns[0::2]] == 3 * ["float32", "int8"]  # by turns the first
    assert small["ratio"] == pytest.approx(2.0)
    assert small["tokens_per_s"] == pytest.approx(2 * first["tokens_per_s"])
    assert small["weights_bytes"] < first["weights_bytes"] / 2
    assert (first["kv_dtype"], small["kv_dtype"]) == ("float32", "bfloat16")
    assert small["tokens"] == NUM_ROWS * 12  # the job's ignore_eos counts
    assert 0 < small["kl"]["value"] < 0.5
    assert 0.5 < small["same"]["value"] < 1
    assert small["equal_outputs"][1] == NUM_ROWS


def test_the_command_prints_a_table_and_writes_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job.parent / "new" / "numbers.json"
    line = ["profile", str(job), "--numbers", "float32", "bfloat16", *SHORT, "--json", str(path)]
    assert main([*line, "--max-kl", "1"]) == 0
    result = json.loads(path.read_text())
    out = capsys.readouterr().out
    assert [each["numbers"] for each in result["measured"]] == ["float32", "bfloat16"]
    assert result["options"]["max_kl"] == 1.0
    assert result["environment"]["others"] is not None
    _, table, *_ = out.split("\n\n")
    assert len([line for line in table.splitlines() if line.startswith(("float32", "bfloat16"))]) == 2
    assert f"{result['best']} <-" in table
    if result["best"] == "bfloat16":
        assert "--set engine.dtype=bfloat16 engine.quantization=null --write-preset" in out
    else:
        assert "float32 it is" in out


def test_int8_with_keys_and_values_in_it_is_beside_int8_whatever_the_job_keeps_them_in(
    tmp_path: Path,
) -> None:
    path = write_job(tmp_path, tiny_checkpoint(tmp_path / "model", hidden=64, tokenizer=True), ROWS[:2])
    options = NumbersOptions(numbers=("int8", "int8_kv"), max_tokens=4, repeats=1)
    job = load_job(path, ["engine.kv_cache_dtype=int8", "engine.block_size=16"])
    result = compare_numbers(job, options, progress=False)
    assert [each["kv_dtype"] for each in result["measured"]] == ["bfloat16", "int8"]
    assert result["measured"][1]["kl"]["value"] > 0
    for name, kept in (("int8", "auto"), ("int8_kv", "int8")):
        assert engine_settings(name, options.numbers)["kv_cache_dtype"] == kept
    assert "kv_cache_dtype" not in engine_settings("int8", ["float32", "int8"])


def test_the_settings_that_are_recommended_are_those_that_were_measured(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    real = numbers._open

    def noted(job: Any, name: str, options: Any) -> Any:
        llm = real(job, name, options)
        opened.append((name, llm.decoder))
        return llm

    monkeypatch.setattr(numbers, "_open", noted)
    options = NumbersOptions(numbers=("bfloat16", "int8"), max_tokens=4, repeats=1)
    result = compare_numbers(load_job(job), options, progress=False)
    assert [name for name, _ in opened] == ["bfloat16", "int8"]
    for name, decoder in opened:
        settings = [f"engine.{field}={json.dumps(value)}" for field, value in engine_settings(name).items()]
        assert load_job(job, settings).engine.model_dump().items() >= engine_settings(name).items()
        (found,) = (each for each in result["measured"] if each["numbers"] == name)
        assert found["weights_bytes"] == decoder.num_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--numbers", "float32", "int7"], "int7"),
        (["--numbers", "float32"], "numbers"),
        (["--numbers", "int8", "float32", "int8"], "names int8 more than once; name it once"),
        (["--numbers", "--top", "1", "--exits", "x"], "--exits, --top: means nothing with --numbers"),
        (["--latency", "--top", "0"], "--top: means nothing with --latency"),
        (["--numbers", "--latency"], "--numbers: means nothing with --latency"),
        (["--numbers", "float32", "int8", "--max-kl", "-1"], "max_kl"),
        (["--max-kl", "0.1"], "--max-kl: means nothing without --numbers"),
    ],
)
def test_bad_options_are_named(
    job: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(job), *options, "--no-progress"]) == 2
    assert message in capsys.readouterr().err


def test_numbers_that_cannot_be_had_are_named_and_the_others_compared(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = numbers._open

    def opened(job: Any, name: str, options: Any) -> Any:
        if name == "int4":
            raise ConfigError("int4 is for others")
        return real(job, name, options)

    monkeypatch.setattr(numbers, "_open", opened)
    line = ["profile", str(job), *SHORT, "--numbers", "float32", "int4"]
    assert main([*line, "int8"]) == 0
    assert "int4 is not to be had here: int4 is for others" in capsys.readouterr().out
    assert main(line) == 2
    error = capsys.readouterr().err
    assert "--numbers float32 int4: there is nothing to compare float32 with" in error
    assert "int4 is for others" in error


def test_numbers_that_overflow_are_named_and_the_others_compared(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = numbers._compare

    def compared(llm: Any, first: Any, name: str, *others: Any) -> Any:
        if name == "bfloat16":
            raise RequestError("prompt 0: the model's logits are nan")
        return real(llm, first, name, *others)

    monkeypatch.setattr(numbers, "_compare", compared)
    assert main(["profile", str(job), *SHORT, "--numbers", "float32", "bfloat16", "int8"]) == 0
    assert "bfloat16 is not to be had here: prompt 0" in capsys.readouterr().out


@pytest.mark.parametrize(("repeats", "is_known"), [(1, False), (2, True)])
def test_a_few_batches_tell_no_interval_by_a_single_repeat(repeats: int, is_known: bool) -> None:
    groups = [Group("task", [number]) for number in range(5)]
    runs = [Runs(groups), Runs(groups)]
    for each, second in zip(runs, (1.0, 1.1), strict=True):
        for repeat in range(repeats):
            each.begin_run()
            each.seconds[-1][:] = [second + 0.01 * (at + repeat) for at in range(5)]
            each.outputs[-1][:] = [[1, 2]] * 5
    assert (numbers._ratio(*runs)[1] is not None) == is_known


def test_repeats_of_two_batches_tell_more_than_these_of_each_other() -> None:
    """One is 1.6 times as fast in both repeats, if not alike in both batches, of which two cannot tell."""
    groups = [Group("task", [number]) for number in range(2)]
    runs = [Runs(groups), Runs(groups)]
    for each, seconds in zip(runs, ((6.0, 6.6), (10.0, 10.0)), strict=True):
        for repeat in (1.0, 1.002):
            each.begin_run()
            each.seconds[-1][:] = [second * repeat for second in seconds]
            each.outputs[-1][:] = [[1, 2]] * 2
    ratio, interval = numbers._ratio(*runs)
    assert interval is not None and 1.0 < interval[0] < ratio < interval[1]


def test_what_a_single_repeat_cannot_tell_is_said(job: Path) -> None:
    """Not that nothing is faster."""
    result = {
        "best": "float32",
        "options": {"max_kl": 0.005},
        "measured": [{"numbers": "float32"}, measured("int8", 3.0, None, 0.001)],
    }
    assert "give --repeats 3" in numbers._advice(result, job)
    result["measured"] = [{"numbers": "float32"}, measured("int8", 1.0, 0.9, 0.001)]
    assert "nothing else is faster" in numbers._advice(result, job)


def test_a_first_that_fails_is_no_fault_of_the_others(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "_compare", lambda *args: pytest.fail("compared"))

    def overflow(*_: Any) -> None:
        raise RequestError("prompt 0: the model's logits are nan")

    monkeypatch.setattr(numbers, "generate", overflow)
    assert main(["profile", str(job), *SHORT, "--numbers", "float32", "int8"]) == 2
    assert capsys.readouterr().err == "hispec: prompt 0: the model's logits are nan\n"
