"""The training loop: a resumed run is the uninterrupted one bit for bit, and a checkpoint on disk is always
whole."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import ee_models.training.loop as loop
from ee_models.errors import TrainingError
from ee_models.training.examples import Example, split, step_indices
from ee_models.training.loop import (
    CHECKPOINT,
    LOG,
    Metrics,
    Outcome,
    ParameterGroup,
    train,
    write_atomically,
)
from ee_models.training.settings import LoopSettings
from tests.helpers.runs import but

CPU = torch.device("cpu")
SETTINGS = LoopSettings(
    num_steps=12, learning_rate=0.05, warmup=0.25, weight_decay=0.1, eval_every=5, checkpoint_every=4
)


class Killed(BaseException):
    """Nothing in the program may catch it, as nothing catches a kill."""


class Halves(nn.Module):
    """Small models that share nothing, each with a loss of its own; a frozen weight besides."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        for name in names:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(ord(name))
                self.parts[name] = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, batch: Tensor) -> tuple[Tensor, Metrics]:
        target = batch.sin().sum(-1, keepdim=True)
        losses = {
            name: (part(batch) - target * ord(name) / 90).square().mean() for name, part in self.parts.items()
        }
        return torch.stack(list(losses.values())).sum(), {
            name: loss.detach() for name, loss in losses.items()
        }


@dataclass
class ToyTask:
    """Data told by the step alone; `on_step` is called before each."""

    names: str = "ab"
    on_step: Callable[[int], Any] = lambda step: None
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.module = Halves(self.names)
        self.seen: list[int] = []

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup(list(part.parameters())) for part in self.module.parts.values()]

    def num_places(self, micro_batch: Tensor) -> int:
        return len(micro_batch)

    def num_tokens(self, micro_batch: Tensor) -> int:
        return 3 * len(micro_batch)

    def micro_batches(self, step: int, rank: int, num_ranks: int, device: torch.device) -> list[Tensor]:
        assert (rank, num_ranks, device) == (0, 1, CPU) and self.module.training
        self.on_step(step)
        self.seen.append(step)
        return [self.scale * torch.randn(8, 6, generator=torch.Generator().manual_seed(step))]

    def evaluate(self, device: torch.device) -> Metrics:
        assert not self.module.training and not torch.is_grad_enabled()
        return {"loss": float(self.module(torch.ones(4, 6))[0])}


def run(
    task: ToyTask,
    folder: Path,
    settings: LoopSettings = SETTINGS,
    identity: str = "this run",
    resume: bool = False,
    **others: Any,
) -> Outcome:
    folder.mkdir(exist_ok=True)
    return train(task, settings, folder, identity, cpu=True, resume=resume, progress=False, **others)


def weights(task: ToyTask) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in task.module.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def killed_at(*steps: int) -> Callable[[int], None]:
    """Each step kills once."""
    left = set(steps)

    def on_step(step: int) -> None:
        if step in left:
            left.remove(step)
            raise Killed

    return on_step


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_speed_is_that_of_a_step_that_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first take a second each for 24 tokens."""
    now = [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])

    def pass_time(step: int) -> None:
        now[0] += 100.0 if step == 0 else 1.0

    assert run(ToyTask(on_step=pass_time), tmp_path).tokens_per_s == pytest.approx(24.0)
    assert run(ToyTask(), tmp_path, resume=True).tokens_per_s is None, "no step was left"


# ---- resuming ----


@pytest.mark.parametrize("kills", [(0,), (3,), (4,), (7, 11), (5, 6, 9)], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, kills: tuple[int, ...]) -> None:
    whole = ToyTask()
    outcome = run(whole, tmp_path / "whole")
    assert not same(weights(ToyTask()), weights(whole)) and outcome.steps_run == 12
    on_step = killed_at(*kills)
    for _ in kills:
        with pytest.raises(Killed):
            run(ToyTask(on_step=on_step), tmp_path / "killed", resume=True)
    resumed = ToyTask(on_step=on_step)
    again = run(resumed, tmp_path / "killed", resume=True)
    assert resumed.seen == list(range(kills[-1] // 4 * 4, 12)), "it did not go on from the last checkpoint"
    assert again.steps_run == len(resumed.seen)
    assert same(weights(resumed), weights(whole)) and again.metrics == outcome.metrics
    assert same(load_file(tmp_path / "whole" / CHECKPOINT), load_file(tmp_path / "killed" / CHECKPOINT))
    assert files(tmp_path / "killed") == files(tmp_path / "whole") == [CHECKPOINT, LOG]


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    first = ToyTask()
    outcome = run(first, tmp_path)
    again = ToyTask()
    repeated = run(again, tmp_path, resume=True)
    assert repeated.steps_run == 0 and again.seen == [] and repeated.metrics == outcome.metrics
    assert same(weights(again), weights(first))


def test_the_log_has_a_line_per_evaluation(tmp_path: Path) -> None:
    outcome = run(ToyTask(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [5, 10, 12] and lines[-1] == outcome.metrics
    assert lines[-1]["loss"] != lines[0]["loss"]


def test_what_is_evaluated_again_is_in_the_log_once(tmp_path: Path) -> None:
    """Killed at step 10, after its evaluation, the run goes on from step 8; a line is half written."""
    whole = run(ToyTask(), tmp_path / "whole")
    with pytest.raises(Killed):
        run(ToyTask(on_step=killed_at(10)), tmp_path / "killed")
    log = tmp_path / "killed" / LOG
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [5, 10]
    with log.open("a") as file:
        file.write('{"step": 1')
    before = log.read_text()
    run(ToyTask(), tmp_path / "killed", resume=True, only_evaluate=True)
    assert log.read_text() == before, "nothing of it is evaluated again"
    assert run(ToyTask(), tmp_path / "killed", resume=True).metrics == whole.metrics
    assert log.read_text() == (tmp_path / "whole" / LOG).read_text()


def test_frozen_weights_are_neither_trained_nor_kept(tmp_path: Path) -> None:
    task = ToyTask()
    run(task, tmp_path)
    assert torch.equal(task.module.frozen, torch.ones(3))
    with safe_open(tmp_path / CHECKPOINT, "pt") as file:
        names = set(file.keys())
        assert file.metadata() == {"identity": "this run", "step": "12"}
    trained = {name for name in weights(task) if name != "frozen"}
    assert names == trained | {f"{name}:{moment}" for name in trained for moment in ("exp_avg", "exp_avg_sq")}


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run(ToyTask(), tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(
        TrainingError,
        match=(
            r"^\S+/checkpoint.safetensors belongs to another run \(other data, model or settings\); set"
            r" output.overwrite=true output.resume=false to start anew, or choose another output.path$"
        ),
    ):
        run(ToyTask(), tmp_path, identity="another", resume=True)
    with pytest.raises(
        TrainingError,
        match=(
            r"exists: set output.resume=true to go on from it, output.overwrite=true output.resume=false to"
            r" start anew, or choose another"
        ),
    ):
        run(ToyTask(), tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize("damage", ["cut short", "empty", "another model's"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    run(ToyTask("a"), tmp_path)
    path = tmp_path / CHECKPOINT
    if damage != "another model's":
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:-10])
    with pytest.raises(
        TrainingError,
        match=r"checkpoint.safetensors cannot be read .*; set output.overwrite=true output.resume=false to",
    ):
        run(ToyTask("ab"), tmp_path, resume=True)


# ---- a full disk ----


FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    SafetensorError("I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=["OSError", "SafetensorError"])
@pytest.mark.parametrize("place", ["save_file", "replace"])
def test_a_full_disk_leaves_the_previous_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, place: str
) -> None:
    whole = ToyTask()
    run(whole, tmp_path / "whole")
    folder = tmp_path / "full"
    save_file, replace_file = loop.save_file, os.replace
    calls: list[Path] = []

    def full(function: Callable[..., None], draft: Path, *arguments: Any) -> None:
        calls.append(draft)
        if len(calls) == 2:
            if place == "save_file":
                draft.write_bytes(b"half of it")
            raise error
        function(*arguments)

    with monkeypatch.context() as patch:
        if place == "save_file":
            patch.setattr(
                loop, "save_file", lambda tensors, draft, about: full(save_file, draft, tensors, draft, about)
            )
        else:
            patch.setattr(os, "replace", lambda draft, target: full(replace_file, draft, draft, target))
        words = (
            r"cannot write .*checkpoint\.safetensors: .*No space left on device.*; the previous one is"
            r" unharmed; free some space"
        )
        with pytest.raises(TrainingError, match=words):
            run(ToyTask(), folder)
    assert files(folder) == [CHECKPOINT, LOG], "something was left lying about"
    with safe_open(folder / CHECKPOINT, "pt") as file:
        assert file.metadata()["step"] == "4"
    resumed = ToyTask()
    run(resumed, folder, resume=True)
    assert resumed.seen[0] == 4 and same(weights(resumed), weights(whole))


def test_a_disk_that_is_full_from_the_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict[str, Tensor], draft: Path, about: dict[str, str]) -> None:
        raise FULL[0]

    monkeypatch.setattr(loop, "save_file", full)
    with pytest.raises(
        TrainingError,
        match=r"cannot write .*No space left on device; free some space, or choose another folder",
    ):
        run(ToyTask(), tmp_path, but(SETTINGS, eval_every=100))
    assert files(tmp_path) == []


def test_a_log_that_cannot_be_written_is_a_training_error(tmp_path: Path) -> None:
    (tmp_path / LOG).mkdir()
    with pytest.raises(TrainingError):
        run(ToyTask(), tmp_path)


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    write_atomically(target, lambda draft: draft.write_text("one"))
    assert target.read_text() == "one"

    def fail(draft: Path) -> None:
        draft.write_text("tw")
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.raises(
        TrainingError, match=r"cannot write .*file: .*Disk quota exceeded; the previous one is unharmed"
    ):
        write_atomically(target, fail)
    with pytest.raises(TrainingError, match="Disk quota exceeded; free some space"):
        write_atomically(tmp_path / "other", fail)
    assert (
        target.read_text() == "one" and files(tmp_path) == ["deep"] and files(tmp_path / "deep") == ["file"]
    )
    (tmp_path / "taken").touch()
    with pytest.raises(TrainingError, match="cannot write"):
        write_atomically(tmp_path / "taken" / "file", fail)

    def interrupted(draft: Path) -> None:
        draft.write_text("three")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, interrupted)
    assert target.read_text() == "one" and files(tmp_path / "deep") == ["file"]


# ---- what goes wrong in training ----


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    class Broken(ToyTask):
        def micro_batches(self, step: int, rank: int, num_ranks: int, device: torch.device) -> list[Tensor]:
            (batch,) = super().micro_batches(step, rank, num_ranks, device)
            return [batch * (math.nan if step == 6 else 1.0)]

    with pytest.raises(
        TrainingError, match=r"the loss of step 6 is nan; lower loop\.learning_rate, and start anew"
    ):
        run(Broken(), tmp_path)
    with safe_open(tmp_path / CHECKPOINT, "pt") as file:
        assert file.metadata()["step"] == "4"
        assert all(bool(file.get_tensor(name).isfinite().all()) for name in file.keys())  # noqa: SIM118 - no dict


def test_a_gradient_that_is_no_number_never_reaches_a_checkpoint(tmp_path: Path) -> None:
    class Ruined(ToyTask):
        def parameter_groups(self) -> list[ParameterGroup]:
            groups = super().parameter_groups()
            first = groups[0].parameters[0]
            first.register_hook(lambda gradient: gradient * math.nan if self.seen[-1] == 3 else gradient)
            return groups

    with pytest.raises(TrainingError):
        run(Ruined(), tmp_path)
    if (tmp_path / CHECKPOINT).exists():
        with safe_open(tmp_path / CHECKPOINT, "pt") as file:
            assert all(bool(file.get_tensor(name).isfinite().all()) for name in file.keys())  # noqa: SIM118 - no dict


def test_one_process_may_train_in_one_precision_after_the_other(tmp_path: Path) -> None:
    run(ToyTask(), tmp_path / "wide")
    run(ToyTask(), tmp_path / "narrow", but(SETTINGS, mixed_precision="bf16"))


# ---- learning rate, groups, order ----


def test_the_learning_rate_rises_and_falls_as_documented() -> None:
    settings = LoopSettings(num_steps=10, learning_rate=2.0, warmup=0.2, final_lr=0.1)
    # Two steps up; then 0.1 + 0.9 * (1 + cos(pi * done / 8)) / 2 of the peak.
    expected = [1.0, 2.0] + [2.0 * (0.1 + 0.45 * (1 + math.cos(math.pi * done / 8))) for done in range(8)]
    assert [settings.learning_rate_at(step) for step in range(10)] == pytest.approx(expected)
    assert settings.learning_rate_at(6) == pytest.approx(2.0 * 0.55)
    assert LoopSettings(num_steps=4, learning_rate=3.0, warmup=0.0, final_lr=1.0).learning_rate_at(0) == 3.0
    assert [
        LoopSettings(num_steps=4, learning_rate=4.0, warmup=1.0).learning_rate_at(step) for step in range(4)
    ] == [1.0, 2.0, 3.0, 4.0]
    assert LoopSettings(num_steps=1, learning_rate=1.0).learning_rate_at(0) == 1.0


def test_the_optimizer_gets_that_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[set[float]] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *arguments: Any, **others: Any) -> Any:
        used.append({group["lr"] for group in self.param_groups})
        return step(self, *arguments, **others)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    run(ToyTask(), tmp_path)
    assert used == [{SETTINGS.learning_rate_at(number)} for number in range(12)]


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e6])
def test_models_trained_together_get_the_weights_that_each_gets_alone(
    tmp_path: Path, max_grad_norm: float
) -> None:
    """With gradients that are clipped, each model's by its own norm, and with gradients that are not."""
    settings = but(SETTINGS, max_grad_norm=max_grad_norm)
    together = ToyTask("ab")
    run(together, tmp_path / "together", settings)
    for name in "ab":
        alone = ToyTask(name)
        run(alone, tmp_path / name, settings)
        assert same(
            weights(alone),
            {
                key: value
                for key, value in weights(together).items()
                if key.startswith((f"parts.{name}.", "frozen"))
            },
        )


def test_each_epoch_sees_each_example_once_in_an_order_of_its_own() -> None:
    picked = [index for step in range(9) for index in step_indices(10, 4, step, seed=3)]
    epochs = [picked[start : start + 10] for start in range(0, 30, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert picked[:4] == step_indices(10, 4, 0, seed=3) != step_indices(10, 4, 0, seed=4)
    assert step_indices(10, 4, 7, seed=3) == picked[28:32], (
        "a step depends on those that were asked for before"
    )
    for step in range(9):
        ranks = [step_indices(10, 4, step, seed=3, rank=rank, num_ranks=2) for rank in range(2)]
        assert [index for pair in zip(*ranks, strict=True) for index in pair] == picked[
            4 * step : 4 * step + 4
        ]
    assert step_indices(1, 3, 5, seed=0) == [0, 0, 0]


@pytest.mark.parametrize(("num", "held_out"), [(10, 3), (10, 0), (7, 6), (100, 33), (5, 1)])
def test_held_out_examples_are_spread_and_kept_apart(num: int, held_out: int) -> None:
    examples = [Example([number, 1], 1) for number in range(num)]
    training, kept = split(examples, held_out)
    assert len(kept) == held_out and sorted(example.token_ids[0] for example in training + kept) == list(
        range(num)
    )
    places = [example.token_ids[0] for example in kept]
    assert all(
        later - earlier in (num // held_out, num // held_out + 1) for earlier, later in pairwise(places)
    )


def test_what_is_the_same_as_a_held_out_example_is_not_trained_on() -> None:
    examples = [Example([number % 4, 1], 1) for number in range(12)]
    training, kept = split(examples, 2)
    assert {example.token_ids[0] for example in kept} == {0, 2}
    assert [example.token_ids[0] for example in training] == [1, 3] * 3
    other_prompt = Example([0, 1], 2)  # the same tokens, of which less is learnt: another example
    assert other_prompt in split([*examples, other_prompt], 2)[0]


UNEVEN = """
import sys
import torch
from accelerate import Accelerator
from torch import nn
from ee_models.training.loop import _accumulate, _weight_of

class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
    def forward(self, x):
        return (self.weight * x - 1).square().mean(), {}

accelerator = Accelerator(cpu=True)
model = Squares()
module = accelerator.prepare(model)
places = torch.arange(1.0, 11.0)
part = {1: places, 2: (places[:1], places[1:])[accelerator.process_index]}[accelerator.num_processes]
_accumulate(accelerator, module, [part], 0, _weight_of(accelerator, len(part)))
print(accelerator.num_processes, round(model.weight.grad.item(), 4))
"""


def test_a_step_of_several_processes_is_that_of_one() -> None:
    """Though one has nine times as many positions as the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    def start(**environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", UNEVEN],
            cwd=Path(loop.__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"} | environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    several = [start(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", **address) for rank in ("0", "1")]
    outputs = [process.communicate(timeout=300)[0] for process in (start(), *several)]
    assert outputs == ["1 -11.0\n", "2 -11.0\n", "2 -11.0\n"]
