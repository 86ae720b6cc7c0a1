"""Finds and loads the trained exits that a plan names, each once."""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import ee_models
from ee_models.decoder import Decoder
from ee_models.exit_files import INFO, ExitsError, ExitsFile, fingerprint
from ee_models.exits import AdapterExit, load_exits
from ee_models.loader import Checkpoint

from .config import CheckConfig, DraftConfig, SpeculativeConfig

SHIPPED = Path(ee_models.__file__).parent / "pretrained"


class TrainedExits:
    """Trained exits of one checkpoint: those that come with HiSpec, and those of the user's folders."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._shipped: ExitsFile | None = None
        self._checked: set[str] = set()
        self._loaded: dict[tuple[str, int], AdapterExit] = {}

    def check(self, speculative: SpeculativeConfig | None) -> None:
        """Raises ExitsError if an exit that `speculative` names is not there, or belongs to another model. Loads nothing."""
        for name, config, layer in _named(speculative):
            try:
                self._file(config.path).info(layer)
            except ExitsError as error:
                raise ExitsError(f"speculative.{name}: {error}") from None

    def load(self, speculative: SpeculativeConfig | None, decoder: Decoder) -> list[AdapterExit]:
        """The trained exits of `speculative`; those used before are not read again. Raises ExitsError."""
        self.check(speculative)
        exits = []
        for _, config, layer in _named(speculative):
            file = self._file(config.path)
            key = file.about.tensors_sha256, layer  # exits trained anew in the same folder are others
            if key not in self._loaded:
                (self._loaded[key],) = load_exits(file, [layer], decoder, self._checkpoint)
            exits.append(self._loaded[key])
        return exits

    def layers(self, path: str | None) -> list[int]:
        """Where the folder at `path`, or with None what comes with HiSpec, has exits for this model. Raises ExitsError."""
        return sorted(self._file(path).layers)

    def _file(self, path: str | None) -> ExitsFile:
        if path is None:
            self._shipped = self._shipped or shipped_exits(self._checkpoint)
            return self._shipped
        file = ExitsFile(Path(path).expanduser())
        if file.about.tensors_sha256 not in self._checked:
            file.check_model(self._checkpoint)
            file.check_tensors()
            self._checked.add(file.about.tensors_sha256)
        return file


def shipped_exits(checkpoint: Checkpoint) -> ExitsFile:
    """The exits that come with HiSpec for this model, told by its weights. Raises ExitsError if there are none."""
    print_of_model = fingerprint(checkpoint)
    names = []
    for info in sorted(SHIPPED.glob(f"*/{INFO}")):
        file = ExitsFile(info.parent)
        if file.about.base_model.fingerprint == print_of_model:
            return file
        names.append(file.about.base_model.name)
    raise ExitsError(
        f"HiSpec comes with exits for {', '.join(names) or 'no model'} only, not for {checkpoint.path}; train some with"
        " `hispec train` and give their folder as `path`"
    )


def _named(speculative: SpeculativeConfig | None) -> Iterable[tuple[str, DraftConfig | CheckConfig, int]]:
    for name, layer in speculative.trained_layers().items() if speculative else ():
        config = getattr(speculative, name)
        yield name, config, layer
