"""PagedKV: the keys and values of all layers, in one tensor allocated once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from . import int8_kv

# What numbers are copied as, which keeps the bits of every dtype and needs no kernels for them.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LINE = 64  # bytes of a CPU's cache


class PagedKV:
    """One tensor `data` [layers, 2, slots, kv_heads, head_dim]; slot = block * block_size + offset. In int8
    [layers, 2, groups, kv_heads, bytes]: some slots lie together, with their scales (`int8_kv`).

    A position is valid at a layer once written there; what lies past a sequence's length is garbage that the
    next write replaces. So rollback sets a length, and nothing is zeroed, concatenated or copied, except the
    accepted path of a token tree, whose nodes do not lie in order of position (`move`).

    Each layer has one entry after its slots, or a group of them, addressed as slot -1. It takes what is to be
    written nowhere, so that shapes do not depend on values, as a captured graph requires.
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
        """Raises ValueError for blocks or heads that `dtype` has no place for."""
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        # Zeros, not empty: a tile may read past a sequence's end with weight 0, and 0 * NaN would not be 0.
        num_entries, width = num_blocks * block_size, head_dim
        if dtype == torch.int8:
            int8_kv.check_block(block_size)
            int8_kv.check_head(head_dim)
            num_entries, width = num_entries // int8_kv.GROUP, int8_kv.bytes_per_group(head_dim)
        self._storage = _zeros((num_layers, 2, num_entries + 1, num_kv_heads, width), dtype, device)
        self.data = self._storage[:, :, :-1]
        # Views are made once: indexing a tensor costs as much as a small kernel, twice per layer and pass.
        self._keys, self._values = ([layer[part] for layer in self.data] for part in (0, 1))

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        bytes_per_head = head_dim * dtype.itemsize
        if dtype == torch.int8:
            bytes_per_head += int8_kv.SCALE_BYTES
        return num_layers * 2 * block_size * num_kv_heads * bytes_per_head

    @property
    def row_width(self) -> int:
        """Numbers that are kept of a head's keys or values at a slot; of int8, bytes."""
        return self.head_dim + (int8_kv.SCALE_BYTES if self.data.dtype == torch.int8 else 0)

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes

    def keys(self, layer: int) -> Tensor:
        """[slots, kv_heads, head_dim], a view; of int8 [groups, kv_heads, bytes]."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """As keys."""
        return self._values[layer]

    def release(self) -> None:
        """Gives the memory back; nothing can be read or written afterwards."""
        self.data = self._storage = self.data.new_empty(0)
        self._keys, self._values = [], []

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values [tokens, kv_heads, head_dim] at slots [tokens]; those at slot -1 are written
        nowhere."""
        for part, numbers in enumerate((keys, values)):
            entries = self._storage[layer, part]
            if self.data.dtype == torch.int8:
                int8_kv.put(entries, slots, part == 0, int8_kv.encode(numbers, part == 0))
            else:
                entries[slots] = numbers.to(self.data.dtype)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., kv_heads, head_dim] at slots [...]; those of int8 in float32."""
        if self.data.dtype != torch.int8:
            return self._storage[layer, 0][slots], self._storage[layer, 1][slots]
        keys, values = (self.rows(layer, part, slots).view(torch.int8) for part in (0, 1))
        return int8_kv.decode(keys, is_key=True), int8_kv.decode(values, is_key=False)

    def rows(self, layer: int, part: int, slots: Tensor) -> Tensor:
        """What is kept at slots [n] of keys (part 0) or values (1), its bits as integers [n, kv_heads,
        row_width]."""
        entries = self._storage[layer, part]
        if self.data.dtype == torch.int8:
            return int8_kv.take(entries, slots, part == 0).view(torch.uint8)
        return entries.view(INTEGERS[entries.dtype.itemsize]).index_select(0, slots)

    def put_rows(self, layer: int, part: int, slots: Tensor, rows: Tensor) -> None:
        """Writes what `rows` gave to slots [n]."""
        entries = self._storage[layer, part]
        if self.data.dtype == torch.int8:
            int8_kv.put(entries, slots, part == 0, rows.view(torch.int8))
        else:
            entries.view(rows.dtype).index_copy_(0, slots, rows)

    def move(self, first_layer: int, last_layer: int, sources: Tensor, targets: Tensor) -> None:
        """Copies the KV of layers [first_layer, last_layer) from slots sources [n] to slots targets [n]
        (int64), all of it read before any is written, so a slot may be among both. Pairs with target -1 are
        not moved, whatever their source."""
        if not targets.shape[0]:
            return
        if self.data.dtype == torch.int8:
            for part in (0, 1):
                int8_kv.move(self._storage[first_layer:last_layer, part], sources, targets, part == 0)
        else:
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
