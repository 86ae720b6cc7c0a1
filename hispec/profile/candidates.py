"""The exits that plans are made of: trained ones where there are any, else the model's own head at a few
layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ee_models.checkpoint.exit_files import ExitsError, ExitsFile
from ee_models.exits import AdapterExit

from ..config import SpeculativeConfig
from ..control.candidates import ExitTiers, trained_paths
from ..drafters.ngram_table import NgramTable
from ..engine.pretrained import Pretrained
from ..errors import ConfigError
from ..utils.files import expanded

# Where a model without trained exits is tried, in shares of its depth.
_SHARES = (1 / 16, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)


@dataclass(frozen=True)
class Candidates:
    """One exit per layer, all of one kind, and n-grams to guess from.

    exits   the trained ones; none: the model's own norm and head
    path    their folder; None = they come with HiSpec
    note    why there are no trained ones
    tables  of n-grams: the job's own, and those that come with the model
    """

    layers: list[int]
    exits: list[AdapterExit]
    path: str | None = None
    note: str | None = None
    tables: tuple[NgramTable, ...] = ()

    @property
    def tiers(self) -> ExitTiers:
        return ExitTiers("adapter" if self.exits else "exit", self.path)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.tiers.kind, "layers": self.layers, "path": self.path, "note": self.note}


def exits_folder(option: str | None, speculative: SpeculativeConfig | None) -> str | None:
    """The absolute path of the folder of trained exits to profile; None if none is named.

    Raises ConfigError if the job names two, and ExitsError if there are no exits in it. Needs no model.
    """
    named = [path for path in trained_paths(speculative) if path is not None]
    if option is None and len(named) > 1:
        raise ConfigError(
            f"speculative names trained exits in two folders, {named[0]} and {named[1]}; say with --exits"
            " which to profile"
        )
    path = option if option is not None else named[0] if named else None
    if path is None:
        return None
    folder = expanded(path).absolute()
    try:
        ExitsFile(folder)
    except ExitsError as error:
        raise ExitsError(f"{'--exits' if option is not None else 'speculative'}: {error}") from None
    return str(folder)


def find_candidates(
    loaded: Pretrained, folder: str | None, own: SpeculativeConfig | None = None, *, must_be_trained: bool
) -> Candidates:
    """The candidates of a loaded model. own: the job's plan; must_be_trained: the trained exits that come
    with HiSpec have to be there.

    Raises ExitsError for trained exits that cannot be used, NgramsError for n-grams, and ConfigError if the
    model has no room for an exit.
    """
    trained, decoder = loaded.trained_exits, loaded.decoder
    num_layers = decoder.config.num_layers
    if num_layers < 2:
        raise ConfigError(
            f"a model of {num_layers} layer has no early exit, so there is nothing to profile; plain decoding"
            " is all that it can do"
        )
    tables = tuple(loaded.ngram_tables.candidates(own, decoder.device))
    try:
        layers = trained.layers(folder)
    except ExitsError as error:
        if folder is not None or must_be_trained:
            raise
        return Candidates(default_layers(num_layers), [], note=str(error), tables=tables)
    for layer in layers:  # raises ConfigError for one that the model has no room for
        SpeculativeConfig(draft=ExitTiers("adapter", folder).draft(layer)).plan(num_layers)
    return Candidates(layers, trained.load_layers(folder, layers, decoder), path=folder, tables=tables)


def default_layers(num_layers: int) -> list[int]:
    """Layers at which the model's own head is tried as an exit."""
    return sorted({min(max(1, round(share * num_layers)), num_layers - 1) for share in _SHARES})
