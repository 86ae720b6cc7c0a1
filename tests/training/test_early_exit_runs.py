"""Whole runs of the recipe `ee`: resumed ones are the same, compiled ones nearly, and what is written is
what was trained."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ee_models.checkpoint.loader import Checkpoint
from ee_models.errors import TrainingError
from ee_models.training.early_exit import EarlyExitTask
from ee_models.training.loop import train
from ee_models.training.settings import LoopSettings
from ee_models.training.trunk import load_trainable
from tests.helpers.ee_tasks import (
    CPU,
    INFOS,
    LAYERS,
    SETTINGS,
    make_checkpoint,
    make_examples,
    make_task,
    shaken,
)
from tests.helpers.runs import but


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("ee"))


def run_task(
    task: EarlyExitTask, folder: Path, resume: bool = False, compile: bool = False, **changes: Any
) -> dict[str, float]:
    settings = LoopSettings(
        num_steps=6, learning_rate=3e-3, eval_every=3, checkpoint_every=2, compile=compile
    )
    return train(task, settings, folder, "this", cpu=True, resume=resume, progress=False, **changes).metrics


def weights(task: EarlyExitTask) -> dict[str, Tensor]:
    return {name: each for name, each in task.module.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("prompts_learn", [True, False])
def test_a_run_that_was_killed_and_resumed_gives_the_same_bits(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts_learn: bool,
    compiled: bool,
) -> None:
    settings = but(SETTINGS, dropout_max=0.3, prompts_learn=prompts_learn)
    make, run = partial(make_task, checkpoint, settings, prompts=0.8), partial(run_task, compile=compiled)
    whole = make()
    parts = [part for step in range(6) for part in whole.micro_batches(step, 0, 1, CPU)]
    assert prompts_learn == all(part.batch.forward_only == 0 for part in parts)
    run(whole, tmp_path / "whole")
    cut = make()

    def kill(step: int, *others: Any) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return EarlyExitTask.micro_batches(cut, step, *others)

    monkeypatch.setattr(cut, "micro_batches", kill)
    with pytest.raises(KeyboardInterrupt):
        run(cut, tmp_path / "cut")
    resumed = make()
    # What the checkpoint holds can be looked at without training on.
    looked = make()
    figures = run(looked, tmp_path / "cut", resume=True, only_evaluate=True)
    assert figures == looked.evaluate(CPU) != resumed.evaluate(CPU)
    run(resumed, tmp_path / "cut", resume=True)
    one, other = weights(whole), weights(resumed)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "changes"),
    [("labels", {}), ("self", {}), ("self", {"prompts_learn": False, "original_share": 0.3})],
)
def test_compiled_layers_give_the_same_losses(
    checkpoint: Checkpoint, tmp_path: Path, target: str, changes: dict[str, Any]
) -> None:
    settings, figures = but(SETTINGS, target=target, max_pass_tokens=256, **changes), []
    for compiled in (False, True):
        task = make_task(checkpoint, settings, prompts=0.8)
        assert (changes == {}) == all(
            part.batch.forward_only == 0 for step in range(6) for part in task.micro_batches(step, 0, 1, CPU)
        )
        figures.append(run_task(task, tmp_path / str(compiled), compile=compiled))
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)


def test_every_layer_and_exit_is_compiled_or_none(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, called = [], set()

    def fake(method: Any, dynamic: bool) -> Any:
        assert dynamic
        compiled.append(method)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            called.add(method)
            return method(*args, **kwargs)

        return recorded

    monkeypatch.setattr(torch, "compile", fake)
    plain = run_task(make_task(checkpoint), tmp_path / "plain")
    assert not compiled
    assert run_task(make_task(checkpoint), tmp_path / "compiled", compile=True) == plain
    assert called == set(compiled) and len(compiled) == LAYERS + 3 * sum(i.num_blocks for i in INFOS)


def test_without_a_compiler_a_cpu_says_so_before_anything_is_done(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        TrainingError, match=r"loop.compile needs a C\+\+ compiler, and none of .*g\+\+.* is here"
    ):
        run_task(make_task(checkpoint), tmp_path / "new", compile=True)
    assert not (tmp_path / "new").exists()


def test_there_is_nothing_to_evaluate_before_the_first_checkpoint(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match="has no checkpoint yet; train up to the first one"):
        run_task(make_task(checkpoint), tmp_path, only_evaluate=True)


def test_lora_trains_nothing_of_the_model_itself_and_merges_into_it(checkpoint: Checkpoint) -> None:
    task = make_task(checkpoint)
    names = set(weights(task))
    assert all(".lora_" in name or name.startswith("adapters.") for name in names)
    shaken(task)
    (part,) = task._split(make_examples(1), CPU)
    merged = task.module.merged(torch.float32)
    with torch.no_grad():
        expected = task.module.states(part.batch)[0]
        plain = load_trainable(checkpoint.path)
        plain.load_state_dict(merged, strict=False)
        found = plain.base_model(part.batch.token_ids).last_hidden_state.flatten(0, 1)[part.batch.places]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
