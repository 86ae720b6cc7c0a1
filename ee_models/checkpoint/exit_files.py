"""Exits on disk: a folder with one safetensors file, and a JSON file that describes them and their model.

exits.safetensors   layer<L>.norm, layer<L>.blocks.<i>.{attention_norm, q_proj, k_proj, v_proj, o_proj,
                    mlp_norm, gate_proj, up_proj, down_proj}, layer<L>.vocabulary; matrices as [out, in]
exits.json          ExitsInfo: the base model, each exit's shape, the recipe, the data, held-out figures
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError
from .described import FileInfo, read_info, sha256, write_described
from .exit_shape import ExitShape, check_distinct
from .loader import Checkpoint

TENSORS, INFO = "exits.safetensors", "exits.json"
_SIZES = {"num_layers": "layers", "hidden_size": "hidden size", "vocab_size": "vocabulary"}


class ExitsError(CheckpointError):
    """Exits that cannot be used: missing, damaged, or of another model."""


class ExitInfo(ExitShape):
    """An exit that was trained. held_out: metrics on held-out data."""

    intermediate_size: Annotated[int, Field(ge=1)] | None = None
    held_out: dict[str, float] = Field(default_factory=dict)

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor of this exit, without the prefix of its layer, with the shape it must have."""
        hidden, inner = model.hidden_size, self.intermediate_size
        block: dict[str, tuple[int, ...]] = {}
        if self.attention:
            block |= {"attention_norm": (hidden,), "q_proj": (model.q_size, hidden)}
            block |= dict.fromkeys(("k_proj", "v_proj"), (model.kv_size, hidden))
            block |= {"o_proj": (hidden, model.q_size)}
        if inner is not None:
            block |= {"mlp_norm": (hidden,), **dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden))}
            block |= {"down_proj": (hidden, inner)}
        shapes: dict[str, tuple[int, ...]] = {"norm": (hidden,)}
        for index in range(self.num_blocks):
            shapes |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
        if self.vocabulary_size is not None:
            shapes["vocabulary"] = (self.vocabulary_size,)
        return shapes


class BaseModelInfo(FileInfo):
    """The model that exits belong to; `fingerprint` is a checksum of some of its weights."""

    name: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, name: str, checkpoint: Checkpoint) -> BaseModelInfo:
        sizes = {field: getattr(checkpoint.config, field) for field in _SIZES}
        return cls(name=name, fingerprint=checkpoint.fingerprint, **sizes)


class ExitsInfo(FileInfo):
    """The contents of exits.json."""

    format: Literal[1] = 1
    base_model: BaseModelInfo
    exits: Annotated[list[ExitInfo], Field(min_length=1)]
    recipe: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    tensors_sha256: str

    @model_validator(mode="after")
    def _distinct(self) -> ExitsInfo:
        check_distinct(self.exits)
        return self


class ExitsFile:
    """A folder of exits: its description, read at once, and its tensors, read on request."""

    def __init__(self, folder: Path) -> None:
        """Raises ExitsError if the folder holds no exits, or a description that cannot be read."""
        self.folder = folder
        self.about = read_info(
            folder / INFO,
            ExitsInfo,
            "exits",
            "`hispec train` wrote",
            "copy it again, or train the exits again",
            ExitsError,
        )
        if not (folder / TENSORS).is_file():
            raise ExitsError(
                f"{folder} is incomplete: {TENSORS} is missing; copy it there, or train the exits again"
            )

    @property
    def layers(self) -> list[int]:
        return [info.layer for info in self.about.exits]

    def info(self, layer: int) -> ExitInfo:
        """The description of the exit at `layer`. Raises ExitsError if there is none."""
        for info in self.about.exits:
            if info.layer == layer:
                return info
        raise ExitsError(
            f"{self.folder} has no exit at layer {layer}; it has exits at"
            f" {', '.join(map(str, sorted(self.layers)))}; choose one of these, or train one"
        )

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raises ExitsError unless these exits were trained on this very model."""
        check_base_model(
            self.about.base_model, checkpoint, f"the exits in {self.folder}", "train exits for it", ExitsError
        )

    def check_tensors(self) -> None:
        """Raises ExitsError if the checksum of the tensors is not the one in the description."""
        path = self.folder / TENSORS
        try:
            checksum = sha256(path)
        except OSError as error:
            raise ExitsError(f"{path} cannot be read: {error}; copy it again") from error
        if checksum != self.about.tensors_sha256:
            raise ExitsError(
                f"{path} is damaged: its checksum is not the one in {INFO}; copy it again, or train the exits"
                " again"
            )

    def tensors(self, info: ExitInfo, model: ModelConfig) -> dict[str, Tensor]:
        """The tensors of one exit, without the prefix. Raises ExitsError if any is missing, damaged or of a
        wrong shape."""
        self.check_tensors()
        path = self.folder / TENSORS
        prefix = f"layer{info.layer}."
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(prefix + name) for name in info.shapes(model)}
        except (OSError, SafetensorError) as error:
            raise ExitsError(f"{path} cannot be read: {error}; copy it again") from error
        for name, shape in info.shapes(model).items():
            if tuple(tensors[name].shape) != shape:
                raise ExitsError(
                    f"{path}: {prefix}{name} has shape {list(tensors[name].shape)}; the exit needs"
                    f" {list(shape)}; train the exits again"
                )
        if (ids := tensors.get("vocabulary")) is not None and (
            int(ids.min()) < 0 or int(ids.max()) >= model.vocab_size or ids.unique().numel() != ids.numel()
        ):
            raise ExitsError(
                f"{path}: {prefix}vocabulary must hold distinct tokens of 0 to {model.vocab_size - 1}; train"
                " the exits again"
            )
        return tensors


def save_exits(
    folder: Path,
    base_model: BaseModelInfo,
    exits: Mapping[int, tuple[ExitInfo, dict[str, Tensor]]],
    recipe: dict[str, Any],
    data: dict[str, Any],
) -> ExitsFile:
    """Writes exits, given by layer, to `folder` (`write_described`). Raises OSError if it cannot be
    written."""
    tensors = {
        f"layer{layer}.{name}": tensor.contiguous()
        for layer, (_, named) in exits.items()
        for name, tensor in named.items()
    }
    infos = [info for _, (info, _) in sorted(exits.items())]
    write_described(
        folder,
        TENSORS,
        INFO,
        lambda path: save_file(tensors, path),
        lambda checksum: ExitsInfo(
            base_model=base_model, exits=infos, recipe=recipe, data=data, tensors_sha256=checksum
        ),
    )
    return ExitsFile(folder)


def check_base_model(
    base: BaseModelInfo, checkpoint: Checkpoint, what: str, remedy: str, error: type[CheckpointError]
) -> None:
    """Raises `error`, about `what` belongs to `base`, unless `checkpoint` is that very model."""
    for field, name in _SIZES.items():
        ours, theirs = getattr(base, field), getattr(checkpoint.config, field)
        if ours != theirs:
            raise error(
                f"{what} belong to {base.name} ({name} {ours}), not to {checkpoint.path} ({name} {theirs});"
                f" {remedy}"
            )
    if base.fingerprint != checkpoint.fingerprint:
        raise error(
            f"{what} belong to {base.name}; {checkpoint.path} has the same sizes, but other weights; {remedy}"
        )
