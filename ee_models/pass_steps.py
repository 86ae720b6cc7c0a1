"""What a pass does, step by step: layers, exits on the way, logits at its end."""

from __future__ import annotations

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
    """A step and what it reads: a layer, whose KV is layer `kv_layer` of the cache; or a norm and a head."""

    kind: Kind
    layer: LayerWeights | None = None
    kv_layer: int = 0
    norm: Tensor | None = None
    head: Linear | None = None
