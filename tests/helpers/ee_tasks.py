"""Small tasks of the recipe `ee`."""

from __future__ import annotations

from pathlib import Path

import torch

from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import Checkpoint, open_checkpoint
from ee_models.training.early_exit import EarlyExitTask, ExitingModel
from ee_models.training.examples import Example
from ee_models.training.settings import EarlyExitSettings
from ee_models.training.trunk import load_trainable
from tests.helpers.tiny import TINY_VOCAB, tiny_checkpoint
from tests.helpers.training_adapters import make_modules

CPU = torch.device("cpu")
LAYERS = 5
INFOS = [
    ExitInfo(layer=2, intermediate_size=20),
    ExitInfo(layer=4, intermediate_size=None, vocabulary_size=90),
]
SETTINGS = EarlyExitSettings(target="labels", lora_rank=3, exit_loss_scale=0.5, max_pass_tokens=128)


def make_checkpoint(folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint(folder / "model", num_layers=LAYERS, matrix_std=0.15))


def make_examples(count: int, seed: int = 0, prompts: float = 0.0) -> list[Example]:
    """Of 4 to 84 tokens, 1 to 3 of them prompt, or this share of all."""
    generator = torch.Generator().manual_seed(seed)
    lens = [4 + index * 17 % 81 for index in range(count)]
    return [
        Example(
            torch.randint(TINY_VOCAB, (n,), generator=generator).tolist(),
            max(1 + index % 3, int(prompts * n)),
        )
        for index, n in enumerate(lens)
    ]


def make_task(
    checkpoint: Checkpoint,
    settings: EarlyExitSettings = SETTINGS,
    seed: int = 0,
    prompts: float = 0.0,
    batch_size: int = 4,
) -> EarlyExitTask:
    model = checkpoint.config
    module = ExitingModel(
        load_trainable(checkpoint.path),
        make_modules(checkpoint, INFOS),
        model.rope.inv_freq(model.head_dim),
        settings,
        weights=[3.0, 1.0],
    )
    examples, held_out = make_examples(13, prompts=prompts), make_examples(5, seed=1, prompts=prompts)
    return EarlyExitTask(module, examples, held_out, settings, batch_size=batch_size, seed=seed)


def shaken(task: EarlyExitTask) -> EarlyExitTask:
    """As after some training: LoRA, which begins as no change, changes the model."""
    generator = torch.Generator().manual_seed(5)
    for group in task.parameter_groups():
        for parameter in group.parameters:
            with torch.no_grad():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return task
