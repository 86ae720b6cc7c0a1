"""N-grams on disk: what most often followed the last few tokens in a model's own answers.

ngrams.safetensors  for each size s: contexts.<s> [entries, s], the tokens before; tokens.<s> [entries], the
                    one that followed most often; shares.<s> [entries] uint8, how often, in 256ths. Tokens are
                    uint16 where the vocabulary allows it, else int32
ngrams.json         NgramsInfo: the model whose answers were counted, its vocabulary, the data, held-out
                    figures
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..errors import CheckpointError
from .described import FileInfo, read_info, sha256, write_described

TENSORS, INFO = "ngrams.safetensors", "ngrams.json"
SHARES = 256  # what a whole is in `shares`
MOST_TOKENS = 8  # of a context
_REMEDY = "copy it again, or count the n-grams again"


class NgramsError(CheckpointError):
    """N-grams that cannot be used: missing, damaged, or of another vocabulary."""


class Ngrams(NamedTuple):
    """N-grams of one size; each context stands there once.

    contexts  [entries, size], integers: the tokens before
    tokens    [entries], integers: what follows them
    shares    [entries] uint8: how often it does, in SHARES-ths
    """

    contexts: Any
    tokens: Any
    shares: Any


class NgramsInfo(FileInfo):
    """The contents of ngrams.json.

    model        whose answers were counted
    vocab_size   its tokens
    sizes        {tokens of a context: how many contexts}
    """

    format: Literal[1] = 1
    model: str
    vocab_size: Annotated[int, Field(ge=1)]
    sizes: Annotated[
        dict[Annotated[int, Field(ge=1, le=MOST_TOKENS)], Annotated[int, Field(ge=0)]], Field(min_length=1)
    ]
    recipe: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    held_out: dict[str, float] = Field(default_factory=dict)
    tensors_sha256: str


class NgramsFile:
    """A folder with n-grams: their description, read at once, and the n-grams, read on request."""

    def __init__(self, folder: Path) -> None:
        """Raises NgramsError if the folder holds none, or a description that cannot be read."""
        self.folder = folder
        made_by = "`hispec train` wrote with recipe: ngrams"
        self.about = read_info(folder / INFO, NgramsInfo, "n-grams", made_by, _REMEDY, NgramsError)

    def check_vocabulary(self, vocab_size: int, model: str) -> None:
        """Raises NgramsError unless the n-grams are of as many tokens as `model` has."""
        if self.about.vocab_size != vocab_size:
            raise NgramsError(
                f"the n-grams in {self.folder} were counted in answers of {self.about.model}, whose"
                f" vocabulary has {self.about.vocab_size} tokens; {model} has {vocab_size}: count some for it"
                " with `hispec train`, recipe: ngrams"
            )

    def read(self) -> dict[int, Ngrams]:
        """The n-grams by size. Raises NgramsError if they are missing, damaged, or not what the description
        says."""
        path = self.folder / TENSORS
        try:
            if sha256(path) != self.about.tensors_sha256:
                raise NgramsError(f"{path} is damaged: its checksum is not the one in {INFO}; {_REMEDY}")
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise NgramsError(f"{path} cannot be read: {error}; {_REMEDY}") from error
        found = {}
        for size, entries in sorted(self.about.sizes.items()):
            shapes = {"contexts": (entries, size), "tokens": (entries,), "shares": (entries,)}
            arrays = {name: tensors.get(f"{name}.{size}") for name in shapes}
            for name, shape in shapes.items():
                array, whole = arrays[name], np.uint8 if name == "shares" else np.integer
                if array is None or array.shape != shape or not np.issubdtype(array.dtype, whole):
                    raise NgramsError(
                        f"{path}: {name}.{size} must be {list(shape)} {whole.__name__}, as {INFO} says;"
                        f" {_REMEDY}"
                    )
                last = self.about.vocab_size - 1
                if name != "shares" and entries and not 0 <= array.min() <= array.max() <= last:
                    raise NgramsError(f"{path}: {name}.{size} has tokens outside of 0 to {last}; {_REMEDY}")
            found[size] = Ngrams(**arrays)
            if len(np.unique(found[size].contexts, axis=0)) != entries:
                raise NgramsError(f"{path}: contexts.{size} has a context twice; {_REMEDY}")
        return found


def save_ngrams(
    folder: Path,
    model: str,
    vocab_size: int,
    ngrams: Mapping[int, Ngrams],
    *,
    recipe: dict[str, Any],
    data: dict[str, Any],
    held_out: dict[str, float],
) -> NgramsFile:
    """Writes n-grams, given by size, to `folder` (`write_described`). Raises OSError if it cannot be
    written."""
    kind = np.uint16 if vocab_size <= 1 << 16 else np.int32
    tensors = {}
    for size, each in ngrams.items():
        tensors[f"contexts.{size}"] = np.ascontiguousarray(each.contexts, kind)
        tensors[f"tokens.{size}"] = np.ascontiguousarray(each.tokens, kind)
        tensors[f"shares.{size}"] = np.ascontiguousarray(each.shares, np.uint8)
    sizes = {size: len(each.tokens) for size, each in ngrams.items()}
    about = {"model": model, "vocab_size": vocab_size, "sizes": sizes}
    about |= {"recipe": recipe, "data": data, "held_out": held_out}
    write_described(
        folder,
        TENSORS,
        INFO,
        lambda path: save_file(tensors, path),
        lambda checksum: NgramsInfo.model_validate(about | {"tensors_sha256": checksum}),
    )
    return NgramsFile(folder)
