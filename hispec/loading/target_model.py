"""Loads the target model: on which device, and in which dtype."""

from __future__ import annotations

import torch

from ee_models.checkpoint.loader import Checkpoint, CheckpointError
from ee_models.decoder import Decoder

from ..config import EngineConfig
from ..errors import ConfigError


def select_device(name: str) -> torch.device:
    """The device that engine.device names. Raises ConfigError if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"engine.device={name!r} cannot be used here: {str(error).splitlines()[0]}; choose auto or cpu"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device={name!r}: this runtime runs on cpu and cuda")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # where Triton launches its kernels
    return device


def load_decoder(
    checkpoint: Checkpoint, config: EngineConfig, device: torch.device, max_positions: int
) -> Decoder:
    """The model of a checkpoint, as `config` says. Raises CheckpointError or ConfigError."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
    else:  # on a CPU float32 is the fastest here, and exact
        dtype = torch.float32 if device.type == "cpu" else checkpoint.dtype
    try:
        return Decoder.load(
            checkpoint,
            dtype,
            device,
            config.attention,
            max_positions=max_positions,
            quantization=config.quantization,
            exact=config.exact_verify,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise ConfigError(f"engine: {error}") from error
