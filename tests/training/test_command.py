"""`hispec train`: from a file of prompts to exits that decode, stages that resume, and settings that are
refused before work begins."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import ee_models.training.hidden_states as states_module
import hispec.training.recipes as recipes_module
from ee_models.checkpoint.exit_files import INFO, TENSORS, ExitsFile
from ee_models.checkpoint.loader import load_tokenizer, open_checkpoint
from ee_models.training.adapters import AdaptersTask
from hispec import LLM, SamplingParams
from hispec.cli import main
from hispec.errors import ConfigError
from hispec.loading.target_model import open_model
from hispec.training.data import make_examples
from hispec.training.run import run_training
from hispec.training.schema import load_training
from tests.helpers.tiny import tiny_checkpoint

EXITS = [{"layer": 2, "vocabulary_size": 100}, {"layer": 4, "num_blocks": 2, "intermediate_size": 24}]
SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("train") / "model", num_layers=6, tokenizer=True)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HISPEC_DEBUG", raising=False)


def write_config(folder: Path, model: Path, **changes: Any) -> Path:
    """A training file with its prompts beside it; `changes` are put over its sections."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": f"Say something about {number}."} for number in range(7)]
    lines += [
        {"messages": [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Nothing."}]}
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values: dict[str, Any] = {
        "model": str(model),
        "engine": {"max_num_seqs": 8, "max_run_ms": 0.0},
        "data": {
            "prompts": [{"path": "prompts.jsonl"}, {"opening": "Why ", "count": 3, "max_tokens": 16}],
            "max_tokens": 8,
            "max_length": 100,
            "held_out": 2,
        },
        "adapters": {"exits": EXITS},
        "loop": {"num_steps": 6, "batch_size": 4, "eval_every": 4, "checkpoint_every": 2},
        "output": {"path": str(folder / "out")},
    }
    for section, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(section), dict):
            values[section] = {
                key: item for key, item in (values[section] | value).items() if item != "left out"
            }
        else:
            values[section] = value
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value != "left out"}))
    return path


def test_layerskip_writes_a_model_in_the_dtype_of_its_base(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", num_layers=2, dtype=torch.bfloat16, tokenizer=True)
    recipe: dict[str, Any] = {"recipe": "layerskip", "layerskip": {}, "adapters": "left out"}
    assert train(write_config(tmp_path, base, loop={"num_steps": 1}, **recipe)) == 0
    assert open_checkpoint(tmp_path / "out" / "model").dtype == torch.bfloat16


def train(config: Path, *arguments: str) -> int:
    return main(["train", str(config), "--no-progress", *arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("trained")
    assert train(write_config(folder, model)) == 0
    return folder / "out"


def exits_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / TENSORS)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_command_makes_exits_that_decode_without_changing_the_output(
    tmp_path: Path, model: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(write_config(tmp_path, model)) == 0
    out, err = capsys.readouterr()
    assert (
        re.search(r"\d+ examples, \d+ tokens, \d+ of them in answers", err)
        and "6 steps in " in out
        and str(tmp_path / "out") in out
    )
    assert all(f"layer{layer}_{what}: " in out for layer in (2, 4) for what in ("loss", "agreement"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint.safetensors",
        INFO,
        TENSORS,
        "log.jsonl",
        "work",
    ]
    assert same(exits_of(tmp_path / "out"), exits_of(trained)), (
        "the same file trains other exits in another folder"
    )

    prompts = ["Say something about 3.", "Why not?", "x" * 40]
    plain = LLM(str(model), **SMALL)
    greedy, sampled = (
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=1.0, seed=3, max_tokens=20),
    )
    expected = [
        [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]
        for params in (greedy, sampled)
    ]
    tiers = {
        name: {"kind": "adapter", "layer": layer, "path": str(trained)}
        for name, layer in (("draft", 2), ("check", 4))
    }
    llm = LLM(str(model), speculative={**tiers, "num_draft_tokens": 2, "num_checks": 2}, **SMALL)
    for params, wanted in zip((greedy, sampled), expected, strict=True):
        assert [
            output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
        ] == wanted
    assert llm.stats()["adapter_passes"] > 0 and llm.memory()["exit_bytes"] > 0
    llm.set_speculative(
        {"draft": {"kind": "adapter", "layer": 4, "path": str(trained)}, "draft_confidence": 0.5}
    )
    assert [
        output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)
    ] == expected[0]


def test_what_was_trained_is_described(trained: Path, model: Path) -> None:
    about = ExitsFile(trained).about
    assert about.base_model.name == str(model) and about.base_model.num_layers == 6
    assert [
        (info.layer, info.num_blocks, info.intermediate_size, info.vocabulary_size) for info in about.exits
    ] == [(2, 1, 96, 100), (4, 2, 24, None)]
    assert all(
        0 < info.held_out["loss"] < 20 and 0 <= info.held_out["agreement"] <= 1 for info in about.exits
    )
    assert about.recipe["name"] == "adapters" and about.recipe["num_steps"] == 6
    assert 6 <= about.data["examples"] <= 9 and 0 < about.data["answer_tokens"] < about.data["tokens"]
    described = [
        {"path": "prompts.jsonl", "field": "prompt", "max_tokens": 160},
        {"opening": "Why ", "count": 3, "max_tokens": 16},
    ]
    assert about.data["prompts"] == described, (
        "folders of the machine that it was trained on are nobody's business"
    )
    assert exits_of(trained)["layer2.vocabulary"].unique().numel() == 100


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


def test_rows_that_stand_twice_are_no_more_held_out_examples_than_there_are(
    tmp_path: Path, model: Path
) -> None:
    """What equals a held-out example is not trained on; and what is left is fewer than all."""
    config = write_config(tmp_path, model, data={"prompts": [{"path": "twice.jsonl"}]})
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"No {n}."}]}
        for n in range(9)
    ]
    (tmp_path / "twice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in 3 * rows))
    run_training(load_training(config, []), progress=False)
    assert (tmp_path / "out" / TENSORS).exists()


def test_data_alone_and_then_the_rest(tmp_path: Path, model: Path, trained: Path) -> None:
    config = write_config(tmp_path, model)
    assert train(config, "--only-data") == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["work"]
    assert train(config, "--set", "output.resume=true") == 0
    assert same(exits_of(tmp_path / "out"), exits_of(trained))


def test_an_exit_alone_is_the_one_trained_beside_another_on_shared_data(
    tmp_path: Path, model: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(
        tmp_path,
        model,
        adapters={"exits": EXITS[1:]},
        output={"path": str(tmp_path / "alone"), "work": str(trained / "work")},
    )
    monkeypatch.setattr("hispec.llm.LLM.__init__", None)  # answers and states are there
    monkeypatch.setattr(states_module, "trunk_states", None)
    assert train(config) == 0
    alone = exits_of(tmp_path / "alone")
    assert alone and same(
        alone, {name: tensor for name, tensor in exits_of(trained).items() if name.startswith("layer4.")}
    )


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
    assert train(config, *resume, "loop.eval_every=1", "loop.checkpoint_every=1") == 0
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


def test_another_number_of_held_out_examples_is_another_run(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model)
    assert train(config) == 0
    assert train(config, "--set", "output.resume=true", "data.held_out=4") == 2
    assert "belongs to another run" in capsys.readouterr().err


# ---- refused before work begins ----

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
    "no exits": ({"adapters": {"exits": []}}, "adapters.exits: must have at least 1 item"),
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


def test_prompts_lie_beside_the_training_file_and_output_in_the_working_directory(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path / "configs", model, output={"path": "exits/mine"})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = load_training(config)
    assert loaded.data.prompts[
        0
    ].path == tmp_path / "configs" / "prompts.jsonl" and loaded.output.path == Path("exits/mine")


def test_the_example_of_the_docs_is_a_valid_training_file() -> None:
    root = Path(__file__).parents[2]
    for path in sorted((root / "configs").glob("train_*.yaml")):
        config = load_training(path)
        assert getattr(config, config.recipe) is not None
    assert any((root / "configs").glob("train_*.yaml"))


def test_the_report_counts_what_this_run_did(tmp_path: Path, model: Path, trained: Path) -> None:
    config = load_training(
        write_config(tmp_path, model), [f"output.path={tmp_path / 'new'}", f"output.work={trained / 'work'}"]
    )
    report = run_training(config, progress=False)
    about = ExitsFile(tmp_path / "new").about
    assert report is not None and report.path == tmp_path / "new" and report.outcome.steps_run == 6
    assert report.num_examples == about.data["examples"] + 2 and report.num_tokens > about.data["tokens"]
    assert not (tmp_path / "new" / "work").exists()


def test_examples_are_no_longer_than_a_sliding_window(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it a decoder, which attends to all, is not the model."""
    checkpoint = open_model(str(model))
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, sliding_window=64))
    monkeypatch.setattr("hispec.training.run.open_model", lambda name: checkpoint)
    with pytest.raises(ConfigError, match=r"data\.max_length=100 is over the 64 positions of"):
        run_training(load_training(write_config(tmp_path, model)), progress=False)
