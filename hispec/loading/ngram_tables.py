"""Finds and loads the n-grams that a plan guesses from, each once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ee_models.checkpoint.exit_files import ExitsError
from ee_models.checkpoint.ngram_file import INFO, NgramsError, NgramsFile

from ..config import SpeculativeConfig
from ..drafters.ngram_table import NgramTable, make_table
from ..utils.files import expanded
from .trained_exits import TrainedExits, shipped_exits


class NgramTables:
    """Tables of n-grams for one checkpoint: the one that comes with it, and those of the user's folders."""

    def __init__(self, trained_exits: TrainedExits) -> None:
        self._trained_exits = trained_exits
        self._loaded: dict[tuple[str | None, str, torch.device], NgramTable] = {}

    def check(self, speculative: SpeculativeConfig | None) -> None:
        """Raises NgramsError if n-grams that `speculative` guesses from are not there, or of another
        vocabulary. Loads nothing."""
        for path in self._paths(speculative):
            self._named(path)

    def load(self, speculative: SpeculativeConfig | None, device: torch.device) -> list[NgramTable]:
        """The tables of `speculative`; those used before are not read again. Raises NgramsError."""
        return [self._load(path, device) for path in self._paths(speculative)]

    def candidates(self, own: SpeculativeConfig | None, device: torch.device) -> list[NgramTable]:
        """Those of the plan `own`, and those that come with the model if there are any that can be used.
        Raises NgramsError for the former."""
        tables = self.load(own, device)
        if None not in (table.path for table in tables):
            with suppress(NgramsError):
                tables.append(self._load(None, device))
        return tables

    def fingerprints(self, speculative: SpeculativeConfig | None) -> dict[str, str]:
        """{"n-grams of FOLDER": checksum of its tensors}; "n-grams" alone for those that come with the model
        or with HiSpec. Raises NgramsError."""
        return {
            "n-grams" if path is None else f"n-grams of {path}": self._named(path).about.tensors_sha256
            for path in self._paths(speculative)
        }

    def file(self, path: str | None) -> NgramsFile:
        """The n-grams in the folder at `path`; with None those that lie beside the checkpoint's weights, or
        else come with HiSpec. Raises NgramsError."""
        checkpoint = self._trained_exits.checkpoint
        folder = self._find_shipped() if path is None else expanded(path)
        if folder is None:
            raise NgramsError(
                f"no n-grams come with {checkpoint.path}; count some with `hispec train`, recipe: ngrams, and"
                " give their folder; or have them learnt from outputs (learn_tokens), or leave"
                " guess_confidence out"
            )
        file = NgramsFile(folder)
        file.check_vocabulary(checkpoint.config.vocab_size, str(checkpoint.path))
        return file

    def _find_shipped(self) -> Path | None:
        """The folder of n-grams beside the checkpoint's weights, or else of those that come with HiSpec for
        this model."""
        checkpoint = self._trained_exits.checkpoint
        if (Path(checkpoint.path) / INFO).is_file():
            return Path(checkpoint.path)
        with suppress(ExitsError):  # there are none for this model
            folder = shipped_exits(checkpoint).folder
            if (folder / INFO).is_file():
                return folder
        return None

    def _paths(self, speculative: SpeculativeConfig | None) -> list[str | None]:
        """The folders that a plan names, and None if it guesses from what comes with the model: if that is
        there, or must be."""
        lookup = None if speculative is None else speculative.draft.lookup
        if lookup is None or not lookup.guesses:
            return []
        return [lookup.guess_path] if lookup.needs_table or self._find_shipped() is not None else []

    def _named(self, path: str | None) -> NgramsFile:
        with _naming_the_field():
            return self.file(path)

    def _load(self, path: str | None, device: torch.device) -> NgramTable:
        file = self._named(path)
        key = path, file.about.tensors_sha256, device
        if key not in self._loaded:
            with _naming_the_field():
                self._loaded[key] = make_table(path, file.read(), device)
        return self._loaded[key]


@contextmanager
def _naming_the_field() -> Iterator[None]:
    try:
        yield
    except NgramsError as error:
        raise NgramsError(f"speculative.draft.ngram.guess_path: {error}") from None
