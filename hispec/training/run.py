"""Runs a training file: data, hidden states, training, exits; each stage goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ee_models.checkpoint.exit_files import BaseModelInfo, ExitInfo, ExitsFile, fingerprint, save_exits
from ee_models.checkpoint.loader import Checkpoint, load_tokenizer
from ee_models.decoder import Decoder
from ee_models.errors import TrainingError, install_command
from ee_models.exits import head_name
from ee_models.training.adapters import AdapterModule, AdaptersTask, Exits, frequent_tokens, init_from_trunk
from ee_models.training.examples import Example, split
from ee_models.training.hidden_states import StateStore, num_bytes
from ee_models.training.loop import CHECKPOINT, LOG, LoopSettings, Metrics, Outcome, Task, train

from ..errors import ConfigError
from ..loading.target_model import open_model
from .data import make_examples
from .schema import AdaptersConfig, ExitTraining, TrainConfig


@dataclass(frozen=True)
class TrainReport:
    """path: the folder of the exits, or of the trained model."""

    path: Path
    num_examples: int
    num_tokens: int
    outcome: Outcome


def run_training(
    config: TrainConfig, *, only_data: bool = False, progress: bool = True
) -> TrainReport | None:
    """Runs the training of `config`; with `only_data`, ends with the data and returns None.

    With several processes (`accelerate launch`), run it once with `only_data` first. Raises ConfigError,
    CheckpointError, TrainingError; all that is on disk then is whole, and `output.resume` goes on from there.
    """
    if not only_data and find_spec("accelerate") is None:
        raise ConfigError(f"training needs the package accelerate: {install_command('train')}")
    checkpoint = open_model(config.model)
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            f"model: {config.model} has no tokenizer with a chat template, which prompts are put into; choose"
            " a model that has one"
        )
    longest = checkpoint.config.max_position_embeddings
    if config.data.max_length > longest:
        raise ConfigError(
            f"data.max_length={config.data.max_length} is over the {longest} positions of {config.model};"
            " choose at most that"
        )
    if config.adapters is not None:
        _check_exits(config.adapters, checkpoint)
    elif config.layerskip is None:
        raise ConfigError("recipe: layerskip needs `layerskip` with its settings ({} takes the defaults)")
    folder, work = config.output.path, config.output.work or config.output.path / "work"
    _prepare(config, work)
    examples = make_examples(config, work, tokenizer, progress=progress)
    num_tokens = sum(len(example.token_ids) for example in examples)
    print(
        f"{len(examples)} examples, {num_tokens} tokens,"
        f" {sum(len(e.token_ids) - e.prompt_len for e in examples)} of them in answers",
        file=sys.stderr,
    )
    if only_data:
        return None
    if config.adapters is not None:
        outcome = _train_adapters(config, config.adapters, checkpoint, examples, work, progress)
    else:
        outcome = _train_layerskip(config, checkpoint, examples, progress)
    return TrainReport(folder, len(examples), num_tokens, outcome)


def _prepare(config: TrainConfig, work: Path) -> None:
    folder = config.output.path
    try:
        if config.output.overwrite and folder.exists():
            for name in (
                CHECKPOINT,
                LOG,
            ):  # answers and states took hours: they stay, and are used if they fit
                (folder / name).unlink(missing_ok=True)
        may_exist = config.output.resume or config.output.overwrite
        if not may_exist and folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"output.path: {folder} is not empty; set output.resume=true to go on with it,"
                " output.overwrite=true to start anew, or choose another"
            )
        folder.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output.path: cannot write to {folder}: {error.strerror}; choose another"
        ) from None


def _check_exits(adapters: AdaptersConfig, checkpoint: Checkpoint) -> None:
    depth = checkpoint.config.num_layers
    for exit_ in adapters.exits:
        if exit_.layer >= depth:
            raise ConfigError(
                f"adapters.exits: layer {exit_.layer} is no early exit of a model of {depth} layers; choose 1"
                f" to {depth - 1}"
            )
        if exit_.vocabulary_size is not None and exit_.vocabulary_size > checkpoint.config.vocab_size:
            raise ConfigError(
                f"adapters.exits: vocabulary_size={exit_.vocabulary_size} is over the model's"
                f" {checkpoint.config.vocab_size} tokens; choose at most that, or leave it out for all"
            )


def _train_adapters(
    config: TrainConfig,
    adapters: AdaptersConfig,
    checkpoint: Checkpoint,
    examples: list[Example],
    work: Path,
    progress: bool,
) -> Outcome:
    from accelerate import PartialState

    training, held_out = split(examples, config.data.held_out)
    model = checkpoint.config
    dtype = torch.float32 if config.loop.mixed_precision == "no" else torch.bfloat16
    needed = num_bytes(examples, len(adapters.exits), model.hidden_size)
    if needed > adapters.max_states_gb * 1e9:
        raise ConfigError(
            f"the hidden states of {len(examples)} examples at {len(adapters.exits)} exits take"
            f" {needed / 1e9:.1f} GB on disk, over adapters.max_states_gb={adapters.max_states_gb:g}; raise"
            " it, or train fewer exits or examples at once"
        )
    device = torch.device("cpu" if _is_cpu(config) else "cuda")
    decoder = Decoder.load(checkpoint, dtype, device, max_positions=config.data.max_length)
    layers, ordered = [exit_.layer for exit_ in adapters.exits], [*training, *held_out]
    trunk = fingerprint(checkpoint)
    identity = f"{trunk} {decoder.dtype}"
    with PartialState(cpu=_is_cpu(config)).main_process_first():  # the others then find them written
        store = StateStore(work / "states", decoder, layers, ordered, identity, progress=progress)
    del decoder
    frequent = frequent_tokens(training, model.vocab_size)
    head = checkpoint.tensor(head_name(checkpoint)).to(dtype)
    modules = [_make_adapter(exit_, adapters, checkpoint, frequent, config.seed) for exit_ in adapters.exits]
    exits = Exits(modules, head, model.rope.inv_freq(model.head_dim))
    numbers = range(len(training), len(examples))
    task = AdaptersTask(exits, store, ordered, numbers, config.loop.batch_size, config.seed)
    outcome = _train(task, config, trunk, examples, progress)
    if PartialState().is_main_process:
        _save(config, checkpoint, modules, training, outcome.metrics)
    return outcome


def _make_adapter(
    exit_: ExitTraining, adapters: AdaptersConfig, checkpoint: Checkpoint, frequent: torch.Tensor, seed: int
) -> AdapterModule:
    size = exit_.intermediate_size
    size = checkpoint.config.intermediate_size if size == "model" else size
    info = ExitInfo(**{**exit_.model_dump(), "intermediate_size": size if exit_.num_blocks else None})
    vocabulary = None if exit_.vocabulary_size is None else frequent[: exit_.vocabulary_size]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + exit_.layer)  # an exit's start does not depend on which others are trained
        module = AdapterModule(info, checkpoint.config, vocabulary)
    if adapters.init == "trunk":
        init_from_trunk(module, checkpoint)
    return module


def _save(
    config: TrainConfig,
    checkpoint: Checkpoint,
    modules: list[AdapterModule],
    training: list[Example],
    metrics: Metrics,
) -> ExitsFile:
    exits = {}
    for module in modules:
        layer = module.info.layer
        names = {what: f"layer{layer}_{what}" for what in ("loss", "agreement")}
        held_out = {what: round(metrics[name], 4) for what, name in names.items() if name in metrics}
        exits[layer] = module.info.model_copy(update={"held_out": held_out}), module.export()
    init = config.adapters.init if config.adapters else None
    recipe = {"name": "adapters", "seed": config.seed, "init": init, **config.loop.model_dump()}
    num_tokens = sum(len(example.token_ids) for example in training)
    data: dict[str, Any] = {
        "examples": len(training),
        "tokens": num_tokens,
        "answer_tokens": num_tokens - sum(e.prompt_len for e in training),
        "prompts": [_describe(source.model_dump(exclude_none=True)) for source in config.data.prompts],
    }
    try:
        return save_exits(config.output.path, BaseModelInfo.of(config.model, checkpoint), exits, recipe, data)
    except OSError as error:
        raise TrainingError(
            f"cannot write the exits to {config.output.path}: {error}; free some space and run again with"
            " output.resume=true"
        ) from error


def _describe(source: dict[str, Any]) -> dict[str, Any]:
    """A source of prompts, without its file's folder."""
    if "path" in source:
        return source | {"path": Path(source["path"]).name}
    return {name: value for name, value in source.items() if name != "field"}


def _train_layerskip(
    config: TrainConfig, checkpoint: Checkpoint, examples: list[Example], progress: bool
) -> Outcome:
    from accelerate import PartialState

    from ee_models.training.layerskip import LayerSkipSettings, LayerSkipTask, load_trainable

    assert config.layerskip is not None
    training, held_out = split(examples, config.data.held_out)
    settings = LayerSkipSettings(**config.layerskip.model_dump(), batch_size=config.loop.batch_size)
    task = LayerSkipTask(
        load_trainable(checkpoint.path),
        training,
        held_out,
        settings,
        num_steps=config.loop.num_steps,
        seed=config.seed,
    )
    outcome = _train(task, config, fingerprint(checkpoint), examples, progress)
    if PartialState().is_main_process:
        task.save(config.output.path / "model", tokenizer=load_tokenizer(checkpoint))
    return outcome


def _is_cpu(config: TrainConfig) -> bool:
    return config.engine.device == "cpu" or not torch.cuda.is_available()


def _train(task: Task, config: TrainConfig, trunk: str, examples: list[Example], progress: bool) -> Outcome:
    return train(
        task,
        LoopSettings(**config.loop.model_dump(exclude={"batch_size"}), seed=config.seed),
        config.output.path,
        _identity(config, trunk, examples),
        cpu=_is_cpu(config),
        resume=config.output.resume,
        progress=progress,
    )


def _identity(config: TrainConfig, trunk: str, examples: list[Example]) -> str:
    """A digest of all that the trained weights depend on."""
    settings = config.model_dump(mode="json", include={"recipe", "seed", "adapters", "layerskip", "loop"})
    for changeable in ("eval_every", "checkpoint_every"):
        del settings["loop"][changeable]
    digest = hashlib.blake2b(
        json.dumps([settings, trunk, config.data.held_out], sort_keys=True).encode(), digest_size=16
    )
    for example in examples:
        digest.update(json.dumps([example.prompt_len, example.token_ids]).encode())
    return digest.hexdigest()
