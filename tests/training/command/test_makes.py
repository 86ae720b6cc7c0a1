"""`hispec train`: from a file of prompts to exits that decode."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ee_models.training.hidden_states as states_module
from ee_models.checkpoint.exit_files import INFO, TENSORS, ExitsFile
from ee_models.checkpoint.loader import open_checkpoint
from hispec import LLM, SamplingParams
from hispec.errors import ConfigError
from hispec.loading.target_model import open_model
from hispec.training.run import run_training
from hispec.training.schema import load_training
from tests.helpers.tiny import tiny_checkpoint
from tests.helpers.training_command import (
    EXITS,
    SMALL,
    exits_of,
    same,
    train,
    write_config,
)


def test_layerskip_writes_a_model_in_the_dtype_of_its_base(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", num_layers=2, dtype=torch.bfloat16, tokenizer=True)
    recipe: dict[str, Any] = {"recipe": "layerskip", "layerskip": {}, "adapters": "left out"}
    assert train(write_config(tmp_path, base, loop={"num_steps": 1}, **recipe)) == 0
    assert open_checkpoint(tmp_path / "out" / "model").dtype == torch.bfloat16


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
    root = Path(__file__).parents[3]
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
