"""Where results go: checked before an hour of measuring, and never left half-written."""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError


@dataclass(frozen=True)
class Targets:
    """What `hispec profile` writes; None = not asked for. `overwrite` is about the preset: the others are replaced."""

    json: Path | None = None
    preset: Path | None = None
    plots: Path | None = None
    latency: Path | None = None
    overwrite: bool = False

    def check(self) -> None:
        """Creates missing folders. Raises ConfigError for what can't be written, or must not be."""
        for flag, path in (("--json", self.json), ("--write-preset", self.preset), ("--latency", self.latency)):
            if path is None:
                continue
            if path.exists() and not path.is_file():
                raise ConfigError(f"{flag}: {path} is not a regular file; choose another path")
            _try_folder(flag, path.parent)
        if self.preset is not None and self.preset.exists() and not self.overwrite:
            raise ConfigError(f"--write-preset: {self.preset} exists; replace it with --overwrite, or choose another path")
        if self.json is not None and self.preset is not None and self.json.absolute() == self.preset.absolute():
            raise ConfigError(f"--json and --write-preset both name {self.json}; give each a path of its own")
        if self.plots is not None:
            _try_folder("--plots", self.plots)
            check_matplotlib()


def check_matplotlib() -> None:
    """Raises ConfigError, with what to install, if plots cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plots needs matplotlib, which is not installed: pip install 'hispec[plots]', or leave --plots out") from None


def _try_folder(flag: str, folder: Path) -> None:
    probe = folder / f".hispec-probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write to {folder}: {error.strerror}; choose another place") from None

