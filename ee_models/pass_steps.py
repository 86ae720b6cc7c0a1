"""What a pass does, step by step: layers, exits on the way, logits at its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from torch import Tensor

from .linear import Linear

if TYPE_CHECKING:
    from .decoder import LayerWeights


class Kind(IntEnum):
    """LAYER: attention and MLP, or one of them. FILL: no more of a layer than to write its keys and values.
    BRANCH: what follows works on a copy of the hidden states, up to BACK. HEAD: logits."""

    LAYER = 0
    FILL = 1
    BRANCH = 2
    BACK = 3
    HEAD = 4


@dataclass(frozen=True, eq=False)
class PassStep:
    """A step and what it reads: a layer, whose KV is layer `kv_layer` of the cache; or a norm, a head, and
    the token of each of its outputs, [n] int64, None = all."""

    kind: Kind
    layer: LayerWeights | None = None
    kv_layer: int = 0
    norm: Tensor | None = None
    head: Linear | None = None
    vocabulary: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix [rows, hidden]: row index[t] [tokens] int64 is that of token t."""

    matrix: Tensor
    index: Tensor


@dataclass(frozen=True)
class Repeats:
    """How often a pass is made, at most, each over the tokens that the one before it chose; it ends after
    one that chose any of a row's stops, by token of the pass."""

    most: int
    stops: Sequence[Collection[int]]


@dataclass(frozen=True)
class Repeated:
    """What passes chose one after the other, [passes, tokens] int64, and the sum of the logits of these
    [tokens] float32."""

    chosen: Tensor
    evidence: Tensor


@dataclass(frozen=True)
class Output:
    """Of a pass: hidden states [tokens, hidden] after its last layer; if it read a head, logits [tokens, n];
    and as was asked for, the likeliest token of each [tokens] int64, and the sum of exp(logit - its logit)
    [tokens]. If it was repeated, of the last pass, with what all of them chose."""

    hidden: Tensor
    logits: Tensor | None
    best: Tensor | None
    sums: Tensor | None
    repeated: Repeated | None = None
