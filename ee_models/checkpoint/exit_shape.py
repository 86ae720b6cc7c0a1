"""What an exit is made of, in a description on disk (exit_files.py) and in a training file alike. No torch: a
training file with a slip is refused at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .described import FileInfo


class ExitShape(FileInfo):
    """One exit's shape.

    layer              the exit reads the hidden state after this many layers
    num_blocks         0: only a norm of its own before the head
    attention          whether blocks have attention, with as many heads as the base model's
    intermediate_size  of the blocks' gated MLP; "model": the trunk's own; None: blocks have none (Kangaroo)
    vocabulary_size    number of tokens it has logits for, the most frequent ones of training; None: all
    """

    layer: Annotated[int, Field(ge=1)]
    num_blocks: Annotated[int, Field(ge=0, le=8)] = 1
    attention: bool = True
    intermediate_size: Annotated[int, Field(ge=1)] | Literal["model"] | None = "model"
    vocabulary_size: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.num_blocks and not self.attention and self.intermediate_size is None:
            raise ValueError(
                "a block needs attention, an intermediate_size, or both; num_blocks 0 leaves blocks out"
            )
        return self


def check_distinct(exits: Iterable[ExitShape]) -> None:
    layers = [each.layer for each in exits]
    if len(set(layers)) != len(layers):
        raise ValueError(f"exits must be at different layers, got {layers}")
