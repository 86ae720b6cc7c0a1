"""`hispec train` goes on: stages that are done are not done again, whatever ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import ee_models.training.hidden_states as states_module
import hispec.training.recipes as recipes_module
from ee_models.checkpoint.exit_files import INFO, TENSORS
from ee_models.checkpoint.loader import load_tokenizer, open_checkpoint
from ee_models.training.adapters import AdaptersTask
from ee_models.training.loop import CHECKPOINT
from hispec import LLM
from hispec.training.data import make_examples
from hispec.training.schema import load_training
from tests.helpers.tiny import tiny_checkpoint
from tests.helpers.training_command import (
    exits_of,
    same,
    train,
    write_config,
)


def test_resuming_what_is_finished_trains_nothing_and_writes_the_same(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, model)
    assert train(config) == 0
    first, about = exits_of(tmp_path / "out"), (tmp_path / "out" / INFO).read_bytes()
    (tmp_path / "out" / TENSORS).unlink()
    monkeypatch.setattr(AdaptersTask, "batch", None)
    monkeypatch.setattr("hispec.llm.LLM.__init__", None)
    monkeypatch.setattr(states_module, "trunk_states", None)
    assert train(config, "--set", "output.resume=true") == 0
    assert "0 steps in " in capsys.readouterr().out
    assert same(exits_of(tmp_path / "out"), first) and (tmp_path / "out" / INFO).read_bytes() == about


class Killed(BaseException):
    """As a kill: nothing catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """The `call`-th call of owner.name ends the process, as far as that goes in a test."""
    function, count = getattr(owner, name), [0]

    def dying(*arguments: Any, **others: Any) -> Any:
        count[0] += 1
        if count[0] == call:
            raise Killed
        return function(*arguments, **others)

    monkeypatch.setattr(owner, name, dying)


STAGES: dict[str, tuple[Any, str, int]] = {
    "prompts": (LLM, "step", 5),
    "answers": (LLM, "step", 25),
    "states": (states_module, "save_file", 2),
    "training": (AdaptersTask, "batch", 4),
    "the last evaluation": (AdaptersTask, "evaluate", 2),
    "exits": (recipes_module, "save_exits", 1),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_is_killed_in_any_stage_ends_with_the_same_exits(
    tmp_path: Path, model: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    config = write_config(tmp_path, model)
    with monkeypatch.context() as patch:
        kill_at(patch, *STAGES[stage])
        with pytest.raises(Killed):
            train(config)
    assert not (tmp_path / "out" / TENSORS).exists()
    assert train(config, "--set", "output.resume=true") == 0
    assert same(exits_of(tmp_path / "out"), exits_of(trained))
    assert (tmp_path / "out" / INFO).read_text() == (trained / INFO).read_text()


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hispec.training.run.make_examples", interrupt)
    config = write_config(tmp_path, model)
    assert train(config) == 130
    way_on = "the same command with --set output.resume=true goes on from there"
    assert capsys.readouterr().err == f"\nInterrupted. What is done is in {tmp_path / 'out'}; {way_on}\n"
    assert train(config, "--set", "output.resume=true") == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    # What is to be replaced is there still: to resume would go on with that.
    assert train(config, "--set", "output.overwrite=true") == 130
    err = capsys.readouterr().err
    assert "the same command goes on from there" in err and "output.resume" not in err


def test_an_interrupt_before_what_is_replaced_is_gone_does_not_go_on_with_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    config, anew = write_config(tmp_path, model), ["--set", "output.overwrite=true"]
    assert train(config) == 0
    for owner, name, words in (
        (
            states_module,
            "trunk_states",
            f"What is done is in {tmp_path / 'out' / 'work'}; the same command goes",
        ),
        (AdaptersTask, "batch", "output.resume=true output.overwrite=false goes on from there"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            assert train(config, *anew, "data.held_out=3") == 130
        assert words in capsys.readouterr().err


def test_other_processes_read_what_the_first_has_written(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two may not hold one file of answers."""
    path = write_config(tmp_path, model)
    assert train(path, "--only-data") == 0
    config = load_training(path, [])
    tokenizer = load_tokenizer(open_checkpoint(model))
    assert tokenizer is not None
    work = tmp_path / "out" / "work"
    written = make_examples(config, work, tokenizer, progress=False)
    monkeypatch.setattr("hispec.training.data.run_job", None)
    assert make_examples(config, work, tokenizer, progress=False, only_reads=True) == written


def test_data_alone_and_then_the_rest(tmp_path: Path, model: Path, trained: Path) -> None:
    config = write_config(tmp_path, model)
    assert train(config, "--only-data") == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["work"]
    assert train(config) == 0  # of `work` all is gone on with, and nothing else is there
    assert same(exits_of(tmp_path / "out"), exits_of(trained))


def test_starting_anew_keeps_old_exits_until_the_new_ones_are_there(
    tmp_path: Path, model: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, model)
    assert train(config) == 0
    old = exits_of(tmp_path / "out")
    anew = ["--set", "output.overwrite=true", "loop.learning_rate=0.01"]
    with monkeypatch.context() as patch:
        kill_at(patch, AdaptersTask, "batch", 3)
        with pytest.raises(Killed):
            train(config, *anew)
    assert same(exits_of(tmp_path / "out"), old)
    assert train(config, *anew) == 0
    assert not same(exits_of(tmp_path / "out"), old)


def test_other_settings_do_not_go_on_from_a_checkpoint_but_other_intervals_do(
    tmp_path: Path,
    model: Path,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = write_config(tmp_path, model)
    with monkeypatch.context() as patch:
        kill_at(patch, AdaptersTask, "batch", 4)
        with pytest.raises(Killed):
            train(config)
    resume = ["--set", "output.resume=true"]
    for change in (
        "loop.learning_rate=0.01",
        "adapters.init=random",
        "loop.num_steps=8",
        "loop.batch_size=3",
    ):
        assert train(config, *resume, change) == 2
        assert "belongs to another run (other data, model or settings)" in capsys.readouterr().err, change
    assert train(config, *resume, "data.temperatures=[0.5]") == 2
    assert "answers.jsonl holds what other prompts or settings gave" in capsys.readouterr().err
    assert train(config, *resume, "loop.eval_every=1", "adapters.max_states_gb=49") == 0
    assert same(exits_of(tmp_path / "out"), exits_of(trained))


def test_answers_of_other_weights_of_the_same_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_checkpoint(tmp_path / "model", num_layers=6, tokenizer=True)
    config = write_config(tmp_path, model)
    assert train(config) == 0
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert train(config, "--set", "output.overwrite=true") == 2
    assert "was written by other weights than those of" in capsys.readouterr().err


def test_outputs_of_another_model_are_refused_where_its_own_are_learnt(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_checkpoint(tmp_path / "other", num_layers=6, tokenizer=True, seed=7)
    assert train(write_config(tmp_path / "a", other), "--only-data") == 0
    work = tmp_path / "a" / "out" / "work"
    given = {"path": str(work / "prompts.jsonl"), "outputs": str(work / "answers.jsonl")}
    changes: dict[str, Any] = {"data": {"prompts": [given], "max_length": 100, "held_out": 1}}
    words = "answers.jsonl were written by another model than"
    assert train(write_config(tmp_path / "b", model, **changes)) == 2
    err = capsys.readouterr().err
    assert words in err and "whose own answers are learnt here; give outputs of it" in err
    changes |= {"recipe": "layerskip", "adapters": "left out"}  # labels are learnt whoever wrote them
    config = write_config(tmp_path / "c", model, **changes)
    assert train(config) == 0 and f"{words} {model}; they are learnt as they are" in capsys.readouterr().err
    work.joinpath("answers.jsonl.manifest.json").write_text("{")
    assert train(config, "--set", "output.overwrite=true") == 2
    assert (
        "is not a manifest that HiSpec" in (err := capsys.readouterr().err) and "delete the manifest" in err
    )


def test_what_is_refused_costs_no_checkpoint(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, checkpoint = write_config(tmp_path, model), tmp_path / "out" / CHECKPOINT
    assert train(config) == 0
    assert train(config, "--set", "output.overwrite=true", "adapters.max_states_gb=1e-6") == 2
    assert "over adapters.max_states_gb" in capsys.readouterr().err and checkpoint.exists()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("ee_models.training.compiling.shutil.which", lambda name: None)
    assert train(config, "--set", "output.overwrite=true", "loop.compile=true") == 2
    assert "loop.compile needs a C++ compiler" in capsys.readouterr().err and checkpoint.exists()


def test_only_export_asks_for_a_checkpoint_first_and_for_nothing_else(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model)
    assert train(config, "--only-export") == 2
    assert f"--only-export: there is no {tmp_path / 'out' / CHECKPOINT}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert train(config) == 0
    exits = exits_of(tmp_path / "out")
    (tmp_path / "out" / TENSORS).unlink()
    assert train(config, "--only-export") == 0 and same(exits_of(tmp_path / "out"), exits)
    counted = write_config(tmp_path, model, recipe="ngrams", adapters="left out", loop="left out")
    assert train(counted, "--only-export") == 2
    assert "--only-export: recipe ngrams has no checkpoints" in capsys.readouterr().err


def test_half_a_checkpoint_of_a_killed_process_is_removed(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model)
    (tmp_path / "out" / "work").mkdir(parents=True)
    assert train(config, "--only-data") == 0
    stale = tmp_path / "out" / f".{CHECKPOINT}.1"
    stale.touch()
    assert train(config, "--set", "output.resume=true") == 0 and not stale.exists()


def test_another_number_of_held_out_examples_is_another_run(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model)
    assert train(config) == 0
    assert train(config, "--set", "output.resume=true", "data.held_out=4") == 2
    assert "belongs to another run" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["states", "checkpoint", "exits"])
def test_a_full_disk_ends_the_run_with_a_line_and_the_next_one_goes_on(
    tmp_path: Path,
    model: Path,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    modules = {
        "states": "ee_models.training.hidden_states",
        "checkpoint": "ee_models.training.loop",
        "exits": "ee_models.checkpoint.exit_files",
    }
    config, count = write_config(tmp_path, model), [0]

    def full(tensors: dict[str, Tensor], draft: Path, *about: Any) -> None:
        count[0] += 1
        if count[0] == (1 if place == "exits" else 2):
            raise OSError(28, "No space left on device")
        save_file(tensors, draft, *about)

    with monkeypatch.context() as patch:
        patch.setattr(f"{modules[place]}.save_file", full)
        assert train(config) == 2
    error = capsys.readouterr().err
    assert "cannot write" in error and "No space left on device" in error and "free some space" in error
    assert not any(path.name.startswith(".") for path in (tmp_path / "out").rglob("*")), (
        "half of a file was left"
    )
    assert train(config, "--set", "output.resume=true") == 0
    assert same(exits_of(tmp_path / "out"), exits_of(trained))
