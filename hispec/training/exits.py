"""Exits before and after their training: made as a training file says, written with what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ee_models.checkpoint.exit_files import ExitInfo, ExitsFile
from ee_models.checkpoint.loader import Checkpoint
from ee_models.training.adapters import AdapterModule, init_from_trunk
from ee_models.training.examples import Example
from ee_models.training.loop import Metrics

from ..errors import ConfigError
from .schema import ExitTraining, TrainConfig


def check_exits(config: TrainConfig, exits: Sequence[ExitTraining], checkpoint: Checkpoint) -> None:
    """Raises ConfigError for exits that the model cannot have."""
    depth = checkpoint.config.num_layers
    for exit_ in exits:
        if exit_.layer >= depth:
            raise ConfigError(
                f"{config.recipe}.exits: layer {exit_.layer} is no early exit of a model of {depth} layers;"
                f" choose 1 to {depth - 1}"
            )
        if exit_.vocabulary_size is not None and exit_.vocabulary_size > checkpoint.config.vocab_size:
            raise ConfigError(
                f"{config.recipe}.exits: vocabulary_size={exit_.vocabulary_size} is over the model's"
                f" {checkpoint.config.vocab_size} tokens; choose at most that, or leave it out for all"
            )


def shape_of(exit_: ExitTraining, checkpoint: Checkpoint) -> ExitInfo:
    """The exit as exits.json will have it."""
    size = exit_.intermediate_size
    size = checkpoint.config.intermediate_size if size == "model" else size
    fields = exit_.model_dump(exclude={"init", "weight"})
    return ExitInfo(**fields | {"intermediate_size": size if exit_.num_blocks else None})


def make_adapter(
    exit_: ExitTraining,
    init: str,
    checkpoint: Checkpoint,
    frequent: torch.Tensor,
    seed: int,
    trained: ExitsFile | None = None,
) -> AdapterModule:
    """An exit to train. frequent [vocab]: all tokens, those first that a reduced vocabulary should hold;
    init: "trunk" starts from the layers after the exit, "trained" from those of `trained`, else at random.
    Raises ExitsError if `trained` has no exit of this shape."""
    info = shape_of(exit_, checkpoint)
    vocabulary = None if exit_.vocabulary_size is None else frequent[: exit_.vocabulary_size]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + exit_.layer)  # an exit's start does not depend on which others are trained
        module = AdapterModule(info, checkpoint.config, vocabulary)
    if init == "trunk":
        init_from_trunk(module, checkpoint)
    elif init == "trained":
        assert trained is not None
        module.load(trained)
    return module


def export(
    modules: Sequence[AdapterModule], metrics: Metrics, name: str
) -> dict[int, tuple[ExitInfo, dict[str, torch.Tensor]]]:
    """By layer: an exit's description, with its held-out figures, and its tensors. `name`: what the metrics
    of an exit begin with, such as "layer{}_"."""
    exits = {}
    for module in modules:
        prefix = name.format(module.info.layer)
        held_out = {
            metric.removeprefix(prefix): round(value, 4)
            for metric, value in metrics.items()
            if metric.startswith(prefix)
        }
        exits[module.info.layer] = module.info.model_copy(update={"held_out": held_out}), module.export()
    return exits


def describe_recipe(config: TrainConfig, step: int) -> dict[str, Any]:
    """What exits.json and ee.json say of how something was trained, up to which step."""
    own: dict[str, Any] = {}
    loop = {} if config.loop is None else config.loop.model_dump()
    if config.adapters is not None:
        own = {"init": config.adapters.init}
    elif config.ee is not None:
        own = config.ee.model_dump(exclude={"exits", "init_path"})
        own["exits"] = [
            {"layer": each.layer, "init": each.init, "weight": each.weight} for each in config.ee.exits
        ]
    return {"name": config.recipe, "seed": config.seed, "step": step, **own, **loop}


def describe_data(config: TrainConfig, training: Sequence[Example]) -> dict[str, Any]:
    """What exits.json and ee.json say of the examples that something was trained on."""
    num_tokens = sum(len(example.token_ids) for example in training)
    return {
        "examples": len(training),
        "tokens": num_tokens,
        "answer_tokens": num_tokens - sum(e.prompt_len for e in training),
        "prompts": [_describe(source.model_dump(exclude_none=True)) for source in config.data.prompts],
    }


def _describe(source: dict[str, Any]) -> dict[str, Any]:
    """A source of prompts, without its files' folders."""
    if "path" in source:
        return {name: each.name if isinstance(each, Path) else each for name, each in source.items()}
    return {name: value for name, value in source.items() if name != "field"}
