"""The recipes: from examples to exits, to a model, to both, or to n-grams. Each but the last is one task of
`ee_models.training.loop`, and what is written when it ends."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ee_models.checkpoint.ee_package import INFO, EEPackage, holds_package, save_package
from ee_models.checkpoint.exit_files import BaseModelInfo, ExitsFile, save_exits
from ee_models.checkpoint.loader import Checkpoint, load_tokenizer, open_checkpoint
from ee_models.checkpoint.ngram_file import save_ngrams
from ee_models.decoder import Decoder
from ee_models.errors import TrainingError, install_command
from ee_models.exits import head_name
from ee_models.training.adapters import AdapterModule, AdaptersTask, Exits, check_shape, frequent_tokens
from ee_models.training.early_exit import EarlyExitTask, ExitingModel
from ee_models.training.examples import Example, check_examples, split
from ee_models.training.hidden_states import StateStore, num_bytes
from ee_models.training.layerskip import LayerSkipTask
from ee_models.training.loop import CHECKPOINT, LOG, Outcome, Task, train
from ee_models.training.settings import LayerSkipSettings, LoopSettings
from ee_models.training.trunk import load_trainable, replace_folder, save_checkpoint

from ..errors import ConfigError
from ..loading.target_model import select_device
from ..loading.trained_exits import TrainedExits
from ..utils.files import expanded
from .exits import check_exits, describe_data, describe_recipe, export, make_adapter, shape_of
from .ngrams import by_size, count_ngrams, evaluate
from .schema import EarlyExitConfig, NgramsConfig, TrainConfig


@dataclass
class Run:
    """A run of a recipe.

    only_export     write what the last checkpoint holds, without training on
    has_forgotten   whether what an earlier training has reached is gone, as `output.overwrite` asks
    """

    config: TrainConfig
    checkpoint: Checkpoint
    examples: list[Example]
    work: Path
    progress: bool
    only_export: bool
    has_forgotten: bool = False

    @cached_property
    def trunk(self) -> str:
        return self.checkpoint.fingerprint

    @cached_property
    def split(self) -> tuple[list[Example], list[Example]]:
        """(training, held out). Raises TrainingError for examples that cannot be trained on."""
        training, held_out = split(self.examples, self.config.data.held_out)
        check_examples(training, held_out, self.checkpoint.config.vocab_size)
        return training, held_out

    @property
    def is_cpu(self) -> bool:
        return trains_on_cpu(self.config)

    @property
    def is_main(self) -> bool:
        from accelerate import PartialState

        return PartialState(cpu=self.is_cpu).is_main_process

    @property
    def loop(self) -> LoopSettings:
        assert self.config.loop is not None  # as the schema says
        return self.config.loop

    def train(self, task: Task, begun: Sequence[str] = ()) -> Outcome:
        """begun: checksums of trained weights that it begins with."""
        config = self.config
        return train(
            task,
            self.loop,
            config.output.path,
            self._identity(begun),
            cpu=self.is_cpu,
            resume=config.output.resume or self.only_export,
            only_evaluate=self.only_export,
            progress=self.progress,
            forget=self.forget,
        )

    def forget(self) -> None:
        """With `output.overwrite`, called once nothing is refused any more."""
        if self.config.output.overwrite and not self.only_export:
            _forget(self.config.output.path)
            self.has_forgotten = True

    def _identity(self, begun: Sequence[str]) -> str:
        """A digest of all that the trained weights depend on."""
        include = {"recipe", "seed", "adapters", "ee", "layerskip", "loop"}
        settings = self.config.model_dump(mode="json", include=include)
        # What no weight depends on; `begun` tells what `init_path` holds.
        changeable = {"loop": ("eval_every", "checkpoint_every"), "adapters": ("max_states_gb",)}
        for section, names in (changeable | {"ee": ("init_path",)}).items():
            for name in names if settings[section] is not None else ():
                del settings[section][name]
        # max_length: by it trunks are loaded with one attention or another, which round differently.
        known = [settings, self.trunk, self.config.data.held_out, self.config.data.max_length, *begun]
        digest = hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=16)
        for example in self.examples:
            digest.update(json.dumps([example.prompt_len, example.token_ids]).encode())
        return digest.hexdigest()


def trains_on_cpu(config: TrainConfig) -> bool:
    """Whether engine.device, on which answers are written, has training run on a CPU. Raises ConfigError for
    one that cannot be used."""
    name, has_gpu = config.engine.device, torch.cuda.is_available()
    if name == "auto" or (name in ("cuda", "cuda:0") and has_gpu):
        return not has_gpu  # not selected: each process would hold memory of the first GPU
    return select_device(name).type == "cpu"


def check_gpu(config: TrainConfig) -> None:
    """Raises ConfigError for a GPU that accelerate, which gives each process of a training its own, would not
    take."""
    kind, _, index = config.engine.device.partition(":")
    if kind == "cuda" and index not in ("", "0"):
        raise ConfigError(
            f"engine.device={config.engine.device!r}: training takes the first GPU that its process sees; set"
            " it to cuda, and CUDA_VISIBLE_DEVICES in the environment to that GPU alone"
        )


def _forget(folder: Path) -> None:
    """Removes what an earlier training has reached. Answers and states took hours: they stay, and are used if
    they fit."""
    for name in (CHECKPOINT, LOG):
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output.overwrite: cannot remove {folder / name}: {error.strerror}; choose another"
                " output.path"
            ) from None


def _check_trunk(config: TrainConfig, checkpoint: Checkpoint, lora_rank: int | None) -> None:
    """Raises ConfigError for a model that cannot be trained itself."""
    if not Path(checkpoint.path).is_dir():
        raise ConfigError(
            f"model: {config.model} is a GGUF file, whose weights are rounded; train the safetensors"
            " checkpoint that it was made from"
        )
    if lora_rank is not None and find_spec("peft") is None:
        raise ConfigError(
            f"{config.recipe}.lora_rank={lora_rank} needs the package peft: {install_command('train')}; or"
            " set it to null to train all weights"
        )


# ---- adapters: exits on a frozen trunk ----


def _check_adapters(config: TrainConfig, checkpoint: Checkpoint) -> None:
    assert config.adapters is not None
    check_exits(config, config.adapters.exits, checkpoint)


def _train_adapters(run: Run) -> Outcome:
    from accelerate import PartialState

    config, checkpoint, adapters = run.config, run.checkpoint, run.config.adapters
    assert adapters is not None
    training, held_out = run.split
    model = checkpoint.config
    dtype = torch.float32 if run.loop.mixed_precision == "no" else torch.bfloat16
    needed = num_bytes(run.examples, len(adapters.exits), model.hidden_size)
    if needed > adapters.max_states_gb * 1e9:
        raise ConfigError(
            f"the hidden states of {len(run.examples)} examples at {len(adapters.exits)} exits take"
            f" {needed / 1e9:.1f} GB on disk, over adapters.max_states_gb={adapters.max_states_gb:g}; raise"
            " it, or train fewer exits or examples at once"
        )
    device = torch.device("cpu" if run.is_cpu else "cuda")
    decoder = Decoder.load(checkpoint, dtype, device, max_positions=config.data.max_length)
    layers, ordered = [exit_.layer for exit_ in adapters.exits], [*training, *held_out]
    identity = f"{run.trunk} {decoder.dtype}"
    with PartialState(cpu=run.is_cpu).main_process_first():  # the others then find them written
        store = StateStore(run.work / "states", decoder, layers, ordered, identity, progress=run.progress)
    del decoder
    frequent = frequent_tokens(training, model.vocab_size, model.eos_token_ids)
    head = checkpoint.tensor(head_name(checkpoint)).to(dtype)
    modules = [
        make_adapter(exit_, adapters.init, checkpoint, frequent, config.seed) for exit_ in adapters.exits
    ]
    exits = Exits(modules, head, model.rope.inv_freq(model.head_dim))
    numbers = range(len(training), len(ordered))
    task = AdaptersTask(exits, store, ordered, numbers, run.loop.batch_size, config.seed)
    outcome = run.train(task)
    if run.is_main:
        recipe = describe_recipe(config, outcome.step)
        _save_exits(run, config.output.path, modules, outcome, "layer{}_", config.model, checkpoint, recipe)
    return outcome


def _save_exits(
    run: Run,
    folder: Path,
    modules: list[AdapterModule],
    outcome: Outcome,
    metric: str,
    name: str,
    model: Checkpoint,
    recipe: dict[str, Any],
) -> ExitsFile:
    """Writes exits of `model`, called `name`. Raises TrainingError."""
    try:
        return save_exits(
            folder,
            BaseModelInfo.of(name, model),
            export(modules, outcome.metrics, metric),
            recipe,
            describe_data(run.config, run.split[0]),
        )
    except OSError as error:
        raise TrainingError(
            f"cannot write the exits to {folder}: {error}; free some space and run again with"
            " output.resume=true"
        ) from error


# ---- ee: a model and its exits together ----


def _check_ee(config: TrainConfig, checkpoint: Checkpoint) -> None:
    assert config.ee is not None
    check_exits(config, config.ee.exits, checkpoint)
    _check_trunk(config, checkpoint, config.ee.lora_rank)
    begun = _begin(config.ee, checkpoint)
    if begun.package is not None:
        _check_goes_on(config, config.ee, begun.package)
    for exit_ in config.ee.exits:
        if begun.exits is not None and exit_.init == "trained":
            check_shape(shape_of(exit_, checkpoint), begun.exits)


@dataclass(frozen=True)
class _Beginning:
    """What training begins with. exits: of those of `init: trained`; package: of the trunk and the exits;
    None: it has no such."""

    exits: ExitsFile | None = None
    package: EEPackage | None = None

    def checksums(self) -> list[str]:
        return [each.about.tensors_sha256 for each in (self.exits, self.package) if each is not None]


def _begin(ee: EarlyExitConfig, checkpoint: Checkpoint) -> _Beginning:
    """Raises ExitsError, PackageError or ConfigError for what `ee.init_path` cannot be."""
    needs_exits = any(exit_.init == "trained" for exit_ in ee.exits)
    path = ee.init_path
    if path is None or not holds_package(expanded(str(path))):
        if needs_exits:
            return _Beginning(TrainedExits(checkpoint).file(None if path is None else str(path)))
        if path is not None:
            raise ConfigError(
                f"ee.init_path: {path} is no EE package, and has no effect without an exit of init: trained;"
                " leave it out"
            )
        return _Beginning()
    package = EEPackage(expanded(str(path)))
    package.check_base(checkpoint)
    if needs_exits and package.exits is None:
        raise ConfigError(f"ee.init_path: {path} holds no exits to begin with; give them another init")
    return _Beginning(package.exits if needs_exits else None, package)


def _check_goes_on(config: TrainConfig, ee: EarlyExitConfig, package: EEPackage) -> None:
    """Raises ConfigError unless training can go on from `package`, with the next examples if it is to."""
    if ee.lora_rank is None:
        raise ConfigError(
            f"ee.init_path: {ee.init_path} is an EE package, whose low-rank matrices cannot be gone on with"
            " by training all weights; give lora_rank, or train the checkpoint that it makes"
        )
    first = next(iter(package.low_rank().values()))
    rank = len(first.a)
    if (rank, first.scale) != (ee.lora_rank, ee.lora_alpha / ee.lora_rank):
        raise ConfigError(
            f"ee.init_path: {ee.init_path} has low-rank matrices of lora_rank={rank} and"
            f" lora_alpha={first.scale * rank:g}, not {ee.lora_rank} and {ee.lora_alpha}; give those"
        )
    recipe = package.about.recipe
    now = {"seed": config.seed, "batch_size": None if config.loop is None else config.loop.batch_size}
    for name, value in now.items():
        if ee.skip_batches and recipe.get(name) != value:
            raise ConfigError(
                f"ee.skip_batches={ee.skip_batches}: the training of {ee.init_path} had {name}="
                f"{recipe.get(name)}, not {value}, and other examples in its batches; give the same, or leave"
                " skip_batches out"
            )


def _train_ee(run: Run) -> Outcome:
    config, checkpoint, ee = run.config, run.checkpoint, run.config.ee
    assert ee is not None
    model = checkpoint.config
    training, held_out = run.split
    frequent = frequent_tokens(training, model.vocab_size, model.eos_token_ids)
    begun = _begin(ee, checkpoint)
    known = None if begun.package is None else begun.package.about.data.get("examples")
    if ee.skip_batches and known is not None and known != len(training):
        raise ConfigError(
            f"ee.skip_batches={ee.skip_batches}: the training of {ee.init_path} had {known} examples,"
            f" this has {len(training)}, and others in its batches; give the same `data`, or leave"
            " skip_batches out"
        )
    modules = [
        make_adapter(exit_, exit_.init, checkpoint, frequent, config.seed, begun.exits) for exit_ in ee.exits
    ]
    # What LoRA leaves frozen is multiplied in the precision that it is kept in.
    narrow = ee.lora_rank is not None and run.loop.mixed_precision == "bf16"
    trunk = load_trainable(checkpoint.path, torch.bfloat16 if narrow else torch.float32)
    inv_freq = model.rope.inv_freq(model.head_dim)
    module = ExitingModel(trunk, modules, inv_freq, ee, [exit_.weight for exit_ in ee.exits])
    size = run.loop.batch_size
    task = EarlyExitTask(module, training, held_out, ee, batch_size=size, seed=config.seed)
    if begun.package is not None:
        module.begin_as(begun.package.low_rank())
    outcome = run.train(task, begun.checksums())
    if run.is_main:
        _save_ee(run, module, modules, outcome, begun)
    return outcome


def _save_ee(
    run: Run, module: ExitingModel, modules: list[AdapterModule], outcome: Outcome, begun: _Beginning
) -> None:
    """Writes `package` and `model`; with all weights trained, `model` alone. Raises TrainingError."""
    config, path = run.config, run.config.output.path
    name, recipe = f"{config.model} + {path.name}", describe_recipe(config, outcome.step)
    if begun.package is not None:
        recipe["begun_as"] = begun.package.about.recipe
    if config.ee is not None and config.ee.lora_rank is None:
        tokenizer, state = load_tokenizer(run.checkpoint), module.merged(run.checkpoint.dtype)

        def write_exits(folder: Path) -> None:
            made = open_checkpoint(folder)
            _save_exits(run, folder, modules, outcome, "exit_{}_", name, made, recipe)

        dtype = run.checkpoint.dtype
        save_checkpoint(path / "model", module.model, state, dtype, tokenizer, write_exits)
        return
    last = {
        metric.removeprefix("last_"): round(value, 4)
        for metric, value in outcome.metrics.items()
        if metric.startswith("last_")
    }

    def write_package(folder: Path) -> None:
        package = save_package(
            folder,
            config.model,
            run.checkpoint,
            module.low_rank(),
            recipe=recipe,
            data=describe_data(config, run.split[0]),
            held_out=last,
        )
        with tempfile.TemporaryDirectory(dir=folder) as work:
            # Exits belong to the merged model, which is told by its weights. In a folder of its own, since a
            # temporary one is private, and a copy of it would be.
            made = Path(work) / "model"
            made.mkdir()
            model = package.make_checkpoint(run.checkpoint, made)
            _save_exits(run, folder, modules, outcome, "exit_{}_", name, model, recipe)

            def write_model(target: Path) -> None:
                shutil.copytree(made, target, dirs_exist_ok=True)
                for file in folder.glob("exits.*"):
                    shutil.copyfile(file, target / file.name)

            replace_folder(path / "model", "checkpoint", "config.json", write_model)

    replace_folder(path / "package", "EE package", INFO, write_package)


# ---- layerskip: a model whose every layer is an exit ----


def _check_layerskip(config: TrainConfig, checkpoint: Checkpoint) -> None:
    _check_trunk(config, checkpoint, (config.layerskip or LayerSkipSettings()).lora_rank)


def _train_layerskip(run: Run) -> Outcome:
    config, settings = run.config, run.config.layerskip or LayerSkipSettings()
    trunk = load_trainable(run.checkpoint.path)
    size, num_steps = run.loop.batch_size, run.loop.num_steps
    task = LayerSkipTask(trunk, *run.split, settings, batch_size=size, num_steps=num_steps, seed=config.seed)
    outcome = run.train(task)
    if run.is_main:
        tokenizer = load_tokenizer(run.checkpoint)
        task.save(config.output.path / "model", dtype=run.checkpoint.dtype, tokenizer=tokenizer)
    return outcome


# ---- ngrams: what follows what, counted ----


def _check_ngrams(config: TrainConfig, checkpoint: Checkpoint) -> None:
    """All that the schema allows can be counted."""


def _count_ngrams(run: Run) -> Outcome:
    config, settings, started = run.config, run.config.ngrams or NgramsConfig(), time.monotonic()
    training, held_out = run.split
    guesses = count_ngrams(training, settings.max_size, settings.least_count)
    if not guesses:
        raise ConfigError(
            f"data: no context of up to {settings.max_size} tokens was seen {settings.least_count} times in"
            f" {len(training)} answers; give more prompts, or lower ngrams.least_count"
        )
    metrics = evaluate(guesses, held_out, settings.max_size)
    if run.is_main:
        folder = config.output.path
        run.forget()
        try:
            save_ngrams(
                folder,
                config.model,
                run.checkpoint.config.vocab_size,
                by_size(guesses),
                recipe={"name": config.recipe, "seed": config.seed, **settings.model_dump()},
                data=describe_data(config, training),
                held_out={name: round(value, 4) for name, value in metrics.items()},
            )
        except OSError as error:
            raise TrainingError(
                f"cannot write the n-grams to {folder}: {error}; free some space and run again with"
                " output.resume=true"
            ) from error
    return Outcome(0, 0, time.monotonic() - started, {"contexts": len(guesses), **metrics})


@dataclass(frozen=True)
class Recipe:
    """check: raises ConfigError or ExitsError for what cannot be trained, before any work is done."""

    check: Callable[[TrainConfig, Checkpoint], None]
    train: Callable[[Run], Outcome]


RECIPES = {
    "adapters": Recipe(_check_adapters, _train_adapters),
    "ee": Recipe(_check_ee, _train_ee),
    "layerskip": Recipe(_check_layerskip, _train_layerskip),
    "ngrams": Recipe(_check_ngrams, _count_ngrams),
}
