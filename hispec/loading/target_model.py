"""Finds and loads the target model: on which device, and in which dtype."""

from __future__ import annotations

from pathlib import Path

import torch

from ee_models.checkpoint.ee_package import holds_package
from ee_models.checkpoint.loader import Checkpoint, CheckpointError, UnsupportedModelError, open_checkpoint
from ee_models.decoder import Decoder
from ee_models.kernels import runs_numba

from ..config import EngineConfig
from ..errors import ConfigError, shown
from ..utils.files import expanded
from ..utils.memory import free_memory_bytes, mb
from .known_models import KNOWN_MODELS, known_names, nearest_known, resolve_model


def open_model(model: str | Path, revision: str | None = None) -> Checkpoint:
    """The checkpoint of a known model, a hub id, a folder, a .gguf file, or the folder of an EE package.

    Raises ConfigError for what is no name or path, ModelNotFetchedError for a known model that is not there
    yet, and CheckpointError, with the known names where nothing of this one is there.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise ConfigError(
            f"model={shown(model)}: give a name that `hispec fetch` knows ({known_names()}), a hub"
            " id, a folder, or a .gguf file"
        )
    try:
        expanded(model).exists()
    except OSError as error:  # a name too long for a file, or a folder that may not be entered
        raise ConfigError(f"model={shown(str(model))} cannot be looked for: {error.strerror}") from None
    try:
        # A Path is no known name.
        by_name = isinstance(model, str) or holds_package(model)
        return open_checkpoint(resolve_model(str(model)) if by_name else model, revision)
    except UnsupportedModelError:
        raise
    except CheckpointError as error:
        if model in KNOWN_MODELS or expanded(model).exists():
            raise
        known = f"{known_names()}{nearest_known(str(model))}"
        raise CheckpointError(f"{error}. By name `hispec fetch` knows: {known}") from error


def select_device(name: str) -> torch.device:
    """The device that engine.device names. Raises ConfigError if it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"engine.device={name!r} cannot be used here: {str(error).splitlines()[0]}; choose auto or cpu"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"engine.device={name!r}: this runtime runs on cpu and cuda; choose one of them, or auto"
        )
    if device.type == "cuda" and device.index is None:  # the one that is the current one now, and stays it
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _select_kv_dtype(config: EngineConfig, device: torch.device, weights_dtype: torch.dtype) -> torch.dtype:
    """What KV is kept in. Raises ConfigError where kernels would not read it."""
    if config.kv_cache_dtype == "auto":
        if not runs_numba(device):
            return weights_dtype
        # Beside the rounding of weights that of bfloat16 is lost, and attention reads half of the bytes.
        is_small = config.quantization is not None or weights_dtype == torch.bfloat16
        return torch.bfloat16 if is_small else torch.float32
    kv_dtype: torch.dtype = getattr(torch, config.kv_cache_dtype)
    if kv_dtype != weights_dtype and not runs_numba(device):
        raise ConfigError(
            f"engine.kv_cache_dtype={config.kv_cache_dtype!r} with weights in"
            f" {str(weights_dtype).removeprefix('torch.')} on {device}: only HiSpec's kernels of a CPU"
            " read KV of another dtype than the weights'; leave it at auto"
        )
    return kv_dtype


def select_dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """What weights are held in, before quantization. "auto" is the checkpoint's own wherever it is computed
    in: on a GPU, and of bfloat16 on a CPU that has products in it; elsewhere float32, which loses nothing of
    it."""
    if config.dtype != "auto":
        given: torch.dtype = getattr(torch, config.dtype)
        return given
    if device.type != "cpu":
        return checkpoint.dtype
    if config.quantization is None and checkpoint.dtype == torch.bfloat16:
        from ee_models.kernels.numba_narrow import multiplies_bfloat16

        if multiplies_bfloat16():
            return torch.bfloat16
    return torch.float32


def load_decoder(
    checkpoint: Checkpoint, config: EngineConfig, device: torch.device, max_positions: int
) -> Decoder:
    """The model of a checkpoint, as `config` says. Raises CheckpointError or ConfigError."""
    needed, free = Decoder.rotary_bytes(checkpoint.config, max_positions), free_memory_bytes()
    if needed > free:
        raise ConfigError(
            f"a rotary table of {max_positions} positions takes {mb(needed)}, and {mb(free)} of memory are"
            " free; set engine.max_model_len to fewer"
        )
    weights_dtype = select_dtype(config, checkpoint, device)
    # HiSpec's kernels of a CPU compute in float32, over weights and KV that may be smaller.
    widens = runs_numba(device) and weights_dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if widens else weights_dtype
    kv_dtype = _select_kv_dtype(config, device, weights_dtype)
    try:
        return Decoder.load(
            checkpoint,
            dtype,
            device,
            config.attention,
            max_positions=max_positions,
            quantization=config.quantization,
            exact=config.exact_verify,
            weights_dtype=weights_dtype,
            kv_dtype=kv_dtype,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise ConfigError(f"engine: {error}") from error
