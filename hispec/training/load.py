"""From a YAML file and `--set key.path=value` overrides to a checked TrainConfig."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..jobs.load import load_settings
from .schema import TrainConfig


def load_training(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The training file at `path`; files of prompts lie relative to it. Raises ConfigError with all that is wrong."""
    return load_settings(TrainConfig, Path(path), overrides, [("data", "prompts", "*", "path")])
