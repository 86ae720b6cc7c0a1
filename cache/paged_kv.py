"""PagedKV: the keys and values of all layers, in one tensor allocated once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_LINE = 64  # bytes of a CPU's cache


class PagedKV:
    """One tensor `data` [layers, 2, slots, kv_heads, head_dim]; slot = block * block_size + offset.

    A position is valid at a layer once written there; what lies past a sequence's length is garbage that the
    next write replaces. So rollback sets a length, and nothing is zeroed, concatenated or copied, except the
    accepted path of a token tree, whose nodes do not lie in order of position (`move`).

    Each layer has one entry after its slots, addressed as slot -1. It takes what is to be written nowhere, so
    that shapes do not depend on values, as a captured graph requires.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        # Zeros, not empty: a tile may read past a sequence's end with weight 0, and 0 * NaN would not be 0.
        self._storage = _zeros(
            (num_layers, 2, num_blocks * block_size + 1, num_kv_heads, head_dim), dtype, device
        )
        self.data = self._storage[:, :, :-1]
        # Views are made once: indexing a tensor costs as much as a small kernel, twice per layer and pass.
        self._keys, self._values = ([layer[part] for layer in self.data] for part in (0, 1))

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes

    def keys(self, layer: int) -> Tensor:
        """[slots, kv_heads, head_dim], a view."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """[slots, kv_heads, head_dim], a view."""
        return self._values[layer]

    def release(self) -> None:
        """Gives the memory back; nothing can be read or written afterwards."""
        self.data = self._storage = self.data.new_empty(0)
        self._keys, self._values = [], []

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values [tokens, kv_heads, head_dim] at slots [tokens]; those at slot -1 are written
        nowhere."""
        self._storage[layer, 0][slots] = keys.to(self.data.dtype)
        self._storage[layer, 1][slots] = values.to(self.data.dtype)

    def move(self, first_layer: int, last_layer: int, sources: Tensor, targets: Tensor) -> None:
        """Copies the KV of layers [first_layer, last_layer) from slots sources [n] to slots targets [n]
        (int64), all of it read before any is written, so a slot may be among both. Pairs with target -1 are
        not moved, whatever their source."""
        if targets.shape[0]:
            layers = self._storage[first_layer:last_layer]
            layers[:, :, targets] = layers[:, :, sources]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU the system zeroes its pages when they are first touched: torch.zeros would
    write all of them at once, while most of a pool sized for the longest sequences is never used. It begins
    where a cache line does, or the vectors of a key would lie in two of them each."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    found = np.zeros(num_bytes + _LINE, np.uint8)
    start = -found.ctypes.data % _LINE
    return torch.from_numpy(found[start : start + num_bytes]).view(dtype).view(shape)
