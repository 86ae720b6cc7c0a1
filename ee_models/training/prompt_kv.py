"""What prompts that do not learn leave for answers to attend to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PromptKV:
    """Keys and values of one layer, of positions that have no gradient: what transformers calls a cache, as
    far as an attention layer asks for one. The first pass leaves them here, the second has them ahead of its
    own.

    One a layer, and not one for all: compiled layers, which share their code, would each get their own by the
    layer's number.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        """keys, values: [rows, kv_heads, positions, head_dim]; None: those of the pass to come"""
        self.keys, self.values = keys, values

    @property
    def num_positions(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, of those of a pass."""
        if self.keys is None or self.values is None:
            self.keys, self.values = keys, values
            return keys, values
        return torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)

    def of(self, rows: Tensor) -> PromptKV:
        """Those of some rows, by their indices."""
        assert self.keys is not None and self.values is not None
        return PromptKV(self.keys[rows], self.values[rows])
