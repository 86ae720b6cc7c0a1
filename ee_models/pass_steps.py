"""What a pass does, step by step: layers, exits on the way, logits at its end."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from torch import Tensor

from .linear import Linear

if TYPE_CHECKING:
    from .decoder import LayerWeights
    from .fused_pass import PassProgram


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
class LinkedPass:
    """One of the passes that run linked: what it begins with, row r of `source` [rows, hidden], where r is a
    token's id if `begins` (with embeddings), else where its hidden states lie; in which rows of `target` it
    leaves those after its last layer (None: nowhere); whether it tells sums, as Output has them."""

    program: PassProgram
    source: Tensor
    begins: bool
    target: Tensor | None = None
    wants_sums: bool = False


@dataclass(frozen=True)
class Link:
    """What is called between two linked passes, compiled: the function at an address, with those of places
    and of data. places: a `pass_structures.Places`, which tells what the pass before has chosen, and is told
    which is next."""

    function: int
    data: ctypes.Structure


@dataclass(frozen=True)
class TokenPlaces:
    """Arrays that a link writes for each pass, with room for the most tokens that any of them has: ids and
    rows of hidden states, positions, KV slots [tokens]; where each row's tokens begin [rows + 1]; int64."""

    token_ids: Tensor
    hidden_rows: Tensor
    positions: Tensor
    slots: Tensor
    cu_q_lens: Tensor


@dataclass(frozen=True)
class LinkedCounts:
    """Of a pass, how often it ran, over how many tokens in all, and for how long."""

    passes: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Output:
    """Of a pass: hidden states [tokens, hidden] after its last layer; if it read a head, logits [tokens, n];
    and as was asked for, the likeliest token of each [tokens] int64, and the sum of exp(logit - its logit)
    [tokens]."""

    hidden: Tensor
    logits: Tensor | None
    best: Tensor | None
    sums: Tensor | None
