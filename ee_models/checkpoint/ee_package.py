"""An EE package: what training with `recipe: ee` changed of a model, and the exits that go with it.

A folder of a few MB, beside which the base model is needed once, to make a plain checkpoint of the two:

    ee.json             PackageInfo: the base model and what was made of it
    lora.safetensors    <weight's name>.a [rank, in] and .b [out, rank], bfloat16
    exits.json, exits.safetensors    the exits of the changed model (exit_files.py)
    ngrams.json, ngrams.safetensors  n-grams of its answers, if there are any (ngram_file.py)
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import FiniteFloat
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError
from .described import FileInfo, read_info, sha256, write_described
from .exit_files import INFO as EXITS_INFO
from .exit_files import TENSORS as EXITS_TENSORS
from .exit_files import BaseModelInfo, ExitsFile, check_base_model
from .loader import Checkpoint, open_checkpoint
from .low_rank import LowRank
from .ngram_file import INFO as NGRAMS_INFO
from .ngram_file import TENSORS as NGRAMS_TENSORS

INFO, TENSORS = "ee.json", "lora.safetensors"
_REMEDY = "copy the package again"
# Beside the weights, what makes a folder a model that can be talked to.
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
_NOT_COPIED = ("*.safetensors.index.json", "hispec.json", EXITS_INFO, NGRAMS_INFO, INFO)


class PackageError(CheckpointError):
    """A package that cannot be used: damaged, or of another base model."""


class PackageInfo(FileInfo):
    """The contents of ee.json.

    base_model   what the low-rank matrices are added to
    scale        factor of their product
    recipe, data, held_out   how it was trained, on what, and the last layer's figures
    """

    format: Literal[1] = 1
    base_model: BaseModelInfo
    scale: FiniteFloat
    recipe: dict[str, Any]
    data: dict[str, Any]
    held_out: dict[str, float]
    tensors_sha256: str


class EEPackage:
    """A folder with a package: its description, read at once, and the checkpoint that it makes."""

    def __init__(self, folder: Path) -> None:
        """Raises PackageError, of its exits ExitsError, if a description cannot be read or tensors are
        damaged."""
        self.folder = folder
        made_by = "`hispec train` wrote with recipe: ee"
        self.about = read_info(folder / INFO, PackageInfo, "EE package", made_by, _REMEDY, PackageError)
        try:
            checksum = sha256(folder / TENSORS)
        except OSError as error:
            why = error.strerror or error
            raise PackageError(f"{folder} holds no whole EE package: {TENSORS}: {why}; {_REMEDY}") from error
        if checksum != self.about.tensors_sha256:
            raise PackageError(
                f"{folder / TENSORS} is damaged: its checksum is not the one in {INFO}; {_REMEDY}"
            )
        self.exits = ExitsFile(folder) if (folder / EXITS_INFO).exists() else None
        if self.exits is not None:
            self.exits.check_tensors()

    def check_base(self, base: Checkpoint) -> None:
        """Raises PackageError unless this is the model that was changed."""
        what, remedy = f"the changes in {self.folder}", "they can only be added to the former"
        check_base_model(self.about.base_model, base, what, remedy, PackageError)

    def low_rank(self) -> dict[str, LowRank]:
        """By the name of the weight that it changes. Raises PackageError."""
        found = {}
        try:
            with safe_open(self.folder / TENSORS, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - no dict
                    if key.endswith(".a"):
                        name = key.removesuffix(".a")
                        a, b = file.get_tensor(key), file.get_tensor(f"{name}.b")
                        found[name] = LowRank(a, b, self.about.scale)
        except (OSError, SafetensorError) as error:
            raise PackageError(f"{self.folder / TENSORS} cannot be read: {error}") from error
        return found

    def make_checkpoint(self, base: Checkpoint, folder: Path) -> Checkpoint:
        """Writes base + package to the empty `folder`: a plain checkpoint in the base's dtype, with its exits
        and n-grams where the package has them.

        The same bits on every machine (`LowRank.added_to`). Raises PackageError for another base, OSError
        where `folder` cannot be written.
        """
        from huggingface_hub import save_torch_state_dict

        self.check_base(base)
        if not Path(base.path).is_dir():
            raise PackageError(
                f"{self.folder}: the model that it changes, {base.path}, is a single file, without the"
                " settings and the tokenizer that a checkpoint has; name a folder with safetensors"
            )
        low_rank = self.low_rank()
        for name, each in low_rank.items():
            if not base.has(name):
                raise PackageError(f"{self.folder} changes {name}, which {base.path} does not have")
            if not each.fits(base.tensors[name].shape):
                raise PackageError(
                    f"{self.folder / TENSORS}: {name}.a {list(each.a.shape)} and .b {list(each.b.shape)} do"
                    f" not make a change of {list(base.tensors[name].shape)}; {_REMEDY}"
                )
        state: dict[str, Tensor] = {}
        for name in base.tensors:
            weight = base.tensor(name)
            state[name] = low_rank[name].added_to(weight, weight.dtype) if name in low_rank else weight
        copied = {file for pattern in _COPIED for file in Path(base.path).glob(pattern)}
        for file in copied - {file for pattern in _NOT_COPIED for file in Path(base.path).glob(pattern)}:
            shutil.copyfile(file, folder / file.name)
        save_torch_state_dict(state, str(folder))
        for weights in folder.glob("*.safetensors"):  # which are written private
            weights.chmod((folder / "config.json").stat().st_mode)
        made = open_checkpoint(folder)
        if self.exits is not None:
            self.exits.check_model(made)
            for name in (EXITS_TENSORS, EXITS_INFO):
                shutil.copyfile(self.folder / name, folder / name)
        if (self.folder / NGRAMS_INFO).exists():
            for name in (NGRAMS_TENSORS, NGRAMS_INFO):
                shutil.copyfile(self.folder / name, folder / name)
        return made


def save_package(
    folder: Path,
    base_name: str,
    base: Checkpoint,
    low_rank: Mapping[str, LowRank],
    *,
    recipe: dict[str, Any],
    data: dict[str, Any],
    held_out: dict[str, float],
) -> EEPackage:
    """Writes a package without exits to the empty `folder`. Raises OSError."""
    (scale,) = {change.scale for change in low_rank.values()}
    tensors = {}
    for name, change in low_rank.items():
        tensors[f"{name}.a"] = change.a.to(torch.bfloat16).contiguous()
        tensors[f"{name}.b"] = change.b.to(torch.bfloat16).contiguous()

    def describe(checksum: str) -> PackageInfo:
        return PackageInfo(
            base_model=BaseModelInfo.of(base_name, base),
            scale=scale,
            recipe=recipe,
            data=data,
            held_out=held_out,
            tensors_sha256=checksum,
        )

    write_described(folder, TENSORS, INFO, partial(save_file, tensors), describe)
    return EEPackage(folder)


def holds_package(folder: Path) -> bool:
    return (folder / INFO).is_file()
