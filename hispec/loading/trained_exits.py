"""Finds and loads the trained exits that a plan names, each once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ee_models.checkpoint.exit_files import INFO, ExitsError, ExitsFile
from ee_models.checkpoint.loader import Checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit, load_exits

from ..config import SpeculativeConfig
from ..control.candidates import exit_layers, trained_path, uses_trained
from ..utils.files import expanded
from .ee_packages import shipped_files


class TrainedExits:
    """Trained exits of one checkpoint: those that come with HiSpec, and those of the user's folders."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._shipped: ExitsFile | None = None
        self._checked: set[str] = set()
        self._loaded: dict[tuple[str, int], AdapterExit] = {}

    def check(self, speculative: SpeculativeConfig | None) -> None:
        """Raises ExitsError if an exit that `speculative` names is not there, or belongs to another model.
        Loads nothing."""
        for name, path, layer in self._named(speculative):
            try:
                self.file(path).info(layer)
            except ExitsError as error:
                raise ExitsError(f"speculative.{name}: {error}") from None

    def load(self, speculative: SpeculativeConfig | None, decoder: Decoder) -> list[AdapterExit]:
        """The trained exits of `speculative`; those used before are not read again. Raises ExitsError."""
        self.check(speculative)
        named = dict.fromkeys((path, layer) for _, path, layer in self._named(speculative))
        return [self._load(path, layer, decoder) for path, layer in named]

    def load_layers(self, path: str | None, layers: Iterable[int], decoder: Decoder) -> list[AdapterExit]:
        """The exits at `layers` in the folder at `path`, or with None of those that come with HiSpec. Raises
        ExitsError."""
        return [self._load(path, layer, decoder) for layer in layers]

    def fingerprints(self, speculative: SpeculativeConfig | None) -> dict[str, str]:
        """{"exits of FOLDER": checksum of its tensors} of a plan's exits; "exits" alone for those that come
        with the model or with HiSpec. Raises ExitsError."""
        paths = {path for _, path, _ in self._named(speculative)}
        return {
            "exits" if path is None else f"exits of {path}": self.file(path).about.tensors_sha256
            for path in sorted(paths, key=str)
        }

    @property
    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    def layers(self, path: str | None) -> list[int]:
        """Where the folder at `path`, or with None what comes with HiSpec, has exits for this model. Raises
        ExitsError."""
        return sorted(self.file(path).layers)

    def _load(self, path: str | None, layer: int, decoder: Decoder) -> AdapterExit:
        file = self.file(path)
        key = file.about.tensors_sha256, layer  # exits trained anew in the same folder are others
        if key not in self._loaded:
            (self._loaded[key],) = load_exits(file, [layer], decoder, self._checkpoint)
        return self._loaded[key]

    def _named(self, speculative: SpeculativeConfig | None) -> Iterable[tuple[str, str | None, int]]:
        """(what names it, folder, layer): those of the tiers, and those that a controller may choose from."""
        if speculative is None:
            return
        chooses = speculative.control == "goodput"
        goodput = speculative.goodput if chooses else None
        for name, layer in speculative.trained_layers().items():
            if goodput is None or goodput.layers is None or layer in goodput.layers:
                yield name, getattr(speculative, name).path, layer
        if chooses and uses_trained(speculative):
            path = trained_path(speculative)
            try:
                layers = self.layers(path)
            except ExitsError as error:
                raise ExitsError(f"speculative: {error}") from None
            for layer in exit_layers(speculative, layers):
                yield "goodput.layers", path, layer

    def file(self, path: str | None) -> ExitsFile:
        """The exits in the folder at `path`; with None those that lie beside the checkpoint's weights, or
        else come with HiSpec. Raises ExitsError."""
        if path is None:
            own = Path(self._checkpoint.path)
            if not (own / INFO).is_file():
                self._shipped = self._shipped or shipped_exits(self._checkpoint)
                return self._shipped
            path = str(own)
        file = ExitsFile(expanded(path))
        if file.about.tensors_sha256 not in self._checked:
            file.check_model(self._checkpoint)
            file.check_tensors()
            self._checked.add(file.about.tensors_sha256)
        return file


def shipped_exits(checkpoint: Checkpoint) -> ExitsFile:
    """The exits that come with HiSpec for this model, told by its weights. Raises ExitsError if there are
    none."""
    print_of_model = checkpoint.fingerprint
    names = []
    for file in shipped_files():
        if file.about.base_model.fingerprint == print_of_model:
            return file
        names.append(file.about.base_model.name)
    raise ExitsError(
        f"HiSpec comes with exits for {', '.join(names) or 'no model'} only, not for {checkpoint.path}; train"
        " some with `hispec train` and give their folder as `path`"
    )
