"""Runs a training file: data, hidden states, training, exits; each stage goes on where it was interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ee_models.checkpoint.loader import load_tokenizer
from ee_models.errors import install_command
from ee_models.training.examples import Example
from ee_models.training.loop import CHECKPOINT, Outcome

from ..errors import ConfigError
from ..loading.target_model import open_model
from ..utils.files import lock
from .data import check_model_of_answers, make_examples
from .recipes import RECIPES, Run, check_gpu, trains_on_cpu
from .schema import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# What torchrun and accelerate tell a process its number by, and MPI's launchers.
_RANKS = "RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"


@dataclass(frozen=True)
class TrainReport:
    """path: the folder of the exits, or of the trained model."""

    path: Path
    num_examples: int
    num_tokens: int
    outcome: Outcome


def run_training(
    config: TrainConfig, *, only_data: bool = False, only_export: bool = False, progress: bool = True
) -> TrainReport | None:
    """Runs the training of `config`; with `only_data`, ends with the data and returns None; with
    `only_export`, writes what the last checkpoint of an interrupted run holds, without training on.

    With several processes (`accelerate launch`), run it once with `only_data` first. Raises ConfigError,
    CheckpointError, TrainingError; all that is on disk then is whole, and `output.resume` goes on from there.
    """
    if not only_data and find_spec("accelerate") is None:
        raise ConfigError(f"training needs the package accelerate: {install_command('train')}")
    trains_on_cpu(config)  # or raises: ahead of hours of answers
    if config.loop is not None and not only_data:
        check_gpu(config)
    checkpoint = open_model(config.model)
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            f"model: {config.model} has no tokenizer with a chat template, which prompts are put into; choose"
            " a model that has one"
        )
    # As in the engine: a decoder attends to all before a token, which is a window's only within its size.
    longest = min(
        checkpoint.config.max_position_embeddings,
        checkpoint.config.sliding_window or checkpoint.config.max_position_embeddings,
    )
    if config.data.max_length > longest:
        raise ConfigError(
            f"data.max_length={config.data.max_length} is over the {longest} positions of {config.model};"
            " choose at most that"
        )
    recipe = RECIPES[config.recipe]
    recipe.check(config, checkpoint)
    folder, work = config.output.path, config.output.work or config.output.path / "work"
    if only_export:
        _check_checkpoint(config)
    _prepare(config, work, goes_on=only_export)
    check_model_of_answers(config, work, checkpoint)
    run: Run | None = None
    with _held(folder):
        try:
            examples = _make_examples(config, work, tokenizer, progress, alone=only_data)
            _print_sizes(examples)
            if only_data:
                return None
            run = Run(config, checkpoint, examples, work, progress, only_export)
            outcome = recipe.train(run)
        except KeyboardInterrupt:
            if not config.output.overwrite or (run is not None and run.has_forgotten):
                raise
            # What is to be replaced is there still, and would be gone on with.
            raise KeyboardInterrupt(
                f"What is done is in {work}; the same command goes on from there"
            ) from None
    num_tokens = sum(len(example.token_ids) for example in examples)
    return TrainReport(folder, len(examples), num_tokens, outcome)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """No other command trains into `folder` meanwhile: each would replace the other's checkpoints. Raises
    ConfigError where one does. Of several processes of one run the first asks."""
    ranks = (os.environ[name] for name in _RANKS if name in os.environ)
    if next(ranks, "0") != "0" or os.name == "nt":  # where a folder cannot be opened
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor):
            raise ConfigError(
                f"output.path: another process is training into {folder}; wait for its end, or choose another"
            )
        yield
    finally:
        os.close(descriptor)


def _print_sizes(examples: list[Example]) -> None:
    num_tokens = sum(len(example.token_ids) for example in examples)
    print(
        f"{len(examples)} examples, {num_tokens} tokens,"
        f" {sum(len(e.token_ids) - e.prompt_len for e in examples)} of them in answers",
        file=sys.stderr,
    )


def _make_examples(
    config: TrainConfig, work: Path, tokenizer: PreTrainedTokenizerBase, progress: bool, alone: bool
) -> list[Example]:
    """Of several processes the first writes, and the others read then. alone: there is one."""
    if alone:
        return make_examples(config, work, tokenizer, progress=progress)
    from accelerate import PartialState

    # Also chooses the GPU of each process.
    state = PartialState(cpu=trains_on_cpu(config))
    with state.main_process_first():
        only_reads = not state.is_main_process
        return make_examples(config, work, tokenizer, progress=progress, only_reads=only_reads)


def _check_checkpoint(config: TrainConfig) -> None:
    """Raises ConfigError if there is nothing to export, before hours of answers and states."""
    if config.loop is None:
        raise ConfigError(f"--only-export: recipe {config.recipe} has no checkpoints; leave it out")
    if not (path := config.output.path / CHECKPOINT).exists():
        raise ConfigError(
            f"--only-export: there is no {path}; one is written every loop.checkpoint_every="
            f"{config.loop.checkpoint_every} steps. Train on, or name the folder with output.path"
        )


def _prepare(config: TrainConfig, work: Path, goes_on: bool) -> None:
    folder = config.output.path
    may_exist = goes_on or config.output.resume or config.output.overwrite
    try:
        # Prompts and answers are gone on with in any case.
        if not may_exist and folder.exists() and any(each != work for each in folder.iterdir()):
            raise ConfigError(
                f"output.path: {folder} is not empty; set output.resume=true to go on with it,"
                " output.overwrite=true to start anew, or choose another"
            )
    except OSError as error:
        raise _cannot_write("path", folder, error) from None
    for name, each in (("path", folder), ("work", work)):
        try:
            each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(name, each, error) from None


def _cannot_write(name: str, folder: Path, error: OSError) -> ConfigError:
    why = "it is a file" if folder.is_file() else error.strerror
    return ConfigError(f"output.{name}: cannot write to {folder}: {why}; choose another")
