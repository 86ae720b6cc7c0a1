"""What `hispec train` refuses before work begins, and what it says then."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ee_models.checkpoint.exit_files import TENSORS
from hispec import ConfigError
from hispec.training.run import _held
from hispec.utils.files import lock
from tests.helpers.tiny import tiny_checkpoint
from tests.helpers.training_command import (
    train,
    write_config,
)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown setting": (
        {"loop": {"num_step": 3}},
        "loop.num_step: unknown setting (did you mean 'num_steps'?)",
    ),
    "unknown setting of an exit": (
        {"adapters": {"exits": [{"layer": 2, "blocks": 1}]}},
        "adapters.exits.0.blocks: unknown setting (did you mean 'num_blocks'?)",
    ),
    "unknown setting of a source": (
        {"data": {"prompts": [{"pth": "x"}]}},
        "data.prompts.0.pth: unknown setting (did you mean 'path'?)",
    ),
    "nothing given": ({"loop": {"num_steps": "left out"}}, "loop.num_steps: required, but not given"),
    "beyond the model": (
        {"adapters": {"exits": [{"layer": 6}]}},
        "adapters.exits: layer 6 is no early exit of a model of 6 layers; choose 1 to 5",
    ),
    "the same layer twice": (
        {"adapters": {"exits": [{"layer": 2}, {"layer": 2}]}},
        "adapters: exits must be at different layers, got [2, 2]",
    ),
    "more tokens than there are": (
        {"adapters": {"exits": [{"layer": 2, "vocabulary_size": 261}]}},
        "adapters.exits: vocabulary_size=261 is over the model's 260 tokens; choose at most that",
    ),
    "no loop": ({"loop": "left out"}, "recipe: adapters needs `loop` with its num_steps"),
    "a loop for what is counted": (
        {"recipe": "ngrams", "adapters": "left out"},
        "`loop` has no effect with recipe: ngrams, which counts; leave it out",
    ),
    "contexts too long": (
        {"recipe": "ngrams", "adapters": "left out", "loop": "left out", "ngrams": {"max_size": 9}},
        "ngrams.max_size: must be at most 8",
    ),
    "no exits": ({"adapters": {"exits": []}}, "adapters.exits: must have at least 1"),
    "no settings": ({"adapters": "left out"}, "recipe: adapters needs `adapters` with the exits to train"),
    "settings of another recipe": (
        {"layerskip": {}},
        "`layerskip` has no effect with recipe: adapters; leave it out",
    ),
    "two intentions": (
        {"output": {"resume": True, "overwrite": True}},
        "output: overwrite=true and resume=true contradict each other",
    ),
    "no source": (
        {"data": {"prompts": [{"limit": 3}]}},
        "needs either `path` (a file) or `opening` (the model writes them)",
    ),
    "two sources in one": (
        {"data": {"prompts": [{"path": "x", "opening": "y", "count": 1}]}},
        "needs either `path` (a file) or `opening`",
    ),
    "rows of an opening": (
        {"data": {"prompts": [{"opening": "Why ", "count": 3, "limit": 3, "field": "text"}]}},
        "`field`, `limit`: of no effect with `opening`; leave it out",
    ),
    "the length of prompts that are there": (
        {"data": {"prompts": [{"path": "prompts.jsonl", "max_tokens": 3}]}},
        "`max_tokens`: of no effect with `path`; leave it out",
    ),
    "a temperature next to zero": (
        {"data": {"prompts": [{"path": "prompts.jsonl"}], "temperatures": [0.0, 1e-7]}},
        "data.temperatures.1: too close to 0: use 0 for greedy, or at least 1e-5, got 1e-07",
    ),
    "prompts written at no temperature": (
        {"data": {"prompts": [{"path": "prompts.jsonl"}], "writing_temperature": 0.0}},
        "data.writing_temperature: must be at least 1e-05",
    ),
    "prompts written at too high a temperature": (
        {"data": {"prompts": [{"path": "prompts.jsonl"}], "writing_temperature": 101.0}},
        "data.writing_temperature: must be at most 100",
    ),
    "answers of more tokens than there can be": (
        {"data": {"prompts": [{"path": "prompts.jsonl"}], "max_tokens": 2**31}},
        "data.max_tokens: must be below 2147483648",
    ),
    "a device that is none": (
        {"engine": {"device": "gpu"}},
        "engine.device='gpu' cannot be used here",
    ),
    "an opening without a count": (
        {"data": {"prompts": [{"opening": "Why "}]}},
        "`count` says how many prompts of an `opening` are written",
    ),
    "a share over 1": ({"loop": {"warmup": 1.5}}, "loop.warmup: must be at most 1"),
    "no prompts file": (
        {"data": {"prompts": [{"path": "nowhere.jsonl"}]}},
        "nowhere.jsonl: No such file or directory; mend the path",
    ),
    "too many held out": (
        {"data": {"prompts": [{"path": "prompts.jsonl"}], "held_out": 8}},
        "data: 8 usable examples, of which data.held_out=8 are held out",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_setting_is_refused_in_one_line_that_says_what_to_do(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    changes, words = REFUSED[what]
    config = write_config(tmp_path, model, **changes)
    if what != "too many held out":  # which is known only once the rows have been answered
        monkeypatch.setattr("hispec.llm.LLM.__init__", None)
    assert train(config) == 2
    out, err = capsys.readouterr()
    assert words in err and "Traceback" not in err and out == ""
    assert not (tmp_path / "out" / TENSORS).exists()


def test_a_gpu_that_training_would_not_take_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate takes the first that the process sees."""
    monkeypatch.setattr("hispec.training.recipes.select_device", torch.device)
    config = write_config(tmp_path, model, engine={"device": "cuda:1"})
    assert train(config) == 2
    assert "set it to cuda, and CUDA_VISIBLE_DEVICES in the environment to" in capsys.readouterr().err


def test_what_another_command_trains_into_is_left_alone(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = tmp_path / "out", write_config(tmp_path, model)
    folder.mkdir()
    other = os.open(folder, os.O_RDONLY)
    assert lock(other)
    try:
        assert train(config) == 2
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
        with _held(folder):
            """The second process of a run that holds it."""
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ConfigError, match="another process is training into"), _held(folder):
            """The first of another."""
    finally:
        os.close(other)
    monkeypatch.undo()
    assert f"another process is training into {folder}; wait for its end" in capsys.readouterr().err
    assert list(folder.iterdir()) == [folder / "work"] and not list((folder / "work").iterdir())
    assert train(config, "--only-data") == 0, "nobody holds it any more"


def test_a_block_of_nothing_is_refused_with_the_other_settings(tmp_path: Path, model: Path) -> None:
    config = write_config(
        tmp_path, model, adapters={"exits": [{"layer": 2, "attention": False, "intermediate_size": None}]}
    )
    assert train(config) == 2


def test_a_folder_that_is_not_empty_is_left_alone(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("chapter 1")
    assert train(write_config(tmp_path, model)) == 2
    error = capsys.readouterr().err
    assert (
        f"output.path: {tmp_path / 'out'} is not empty; set output.resume=true to go on with it,"
        " output.overwrite=true to start anew" in error
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").touch()
    assert train(write_config(tmp_path, model, output={"path": str(tmp_path / "file" / "out")})) == 2
    assert "output.path: cannot write to" in capsys.readouterr().err
    (tmp_path / "out" / "thesis.tex").unlink()
    assert train(write_config(tmp_path, model), "--set", f"output.work={tmp_path / 'file'}") == 2
    assert f"output.work: cannot write to {tmp_path / 'file'}: it is a file" in capsys.readouterr().err


def test_a_model_without_a_chat_template_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(write_config(tmp_path, tiny_checkpoint(tmp_path / "bare", num_layers=6))) == 2
    assert (
        "a chat template, which prompts are put into; choose a model that has one" in capsys.readouterr().err
    )


def test_hidden_states_that_take_too_much_room_are_refused_with_the_sizes(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(write_config(tmp_path, model, adapters={"max_states_gb": 1e-6})) == 2
    error = capsys.readouterr().err
    assert (
        re.search(r"the hidden states of \d+ examples at 2 exits take", error)
        and "raise it, or train fewer exits or examples at once" in error
    )


def test_nothing_left_to_train_on_is_said_before_states_are_computed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples that equal a held-out one are not trained on."""
    row = {"messages": [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Nothing."}]}
    config = write_config(
        tmp_path, model, data={"prompts": [{"path": "same.jsonl"}], "max_length": 100, "held_out": 1}
    )
    (tmp_path / "same.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    assert train(config) == 2 and "there are no examples to train on" in capsys.readouterr().err
    assert not (tmp_path / "out" / "work" / "states").exists()
