"""HostKV: keys and values of preempted sequences, offloaded to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from .paged_kv import INTEGERS, PagedKV


@dataclass(frozen=True)
class _Saved:
    """One sequence: for each PagedKV, all layers' keys and values [layers, 2, positions, kv_heads,
    row_width], as integers."""

    num_positions: int
    dtypes: tuple[torch.dtype, ...]
    parts: tuple[Tensor, ...]
    num_bytes: int


class HostKV:
    """Copies KV out of and back into paged KV, bit for bit, within `max_bytes`. Sequences are identified by a
    number.

    All tensors of a sequence travel together: what exits and a draft model wrote lies in further layers, or a
    tensor of its own, at the same slots. For KV on a GPU the copies are in pinned memory.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes={max_bytes} must be at least 0")
        self.max_bytes = max_bytes
        self._saved: dict[int, _Saved] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the copies held now."""
        return self._num_bytes

    def __contains__(self, number: int) -> bool:
        return number in self._saved

    def save(self, number: int, kvs: Sequence[PagedKV], blocks: Sequence[int], num_positions: int) -> bool:
        """Copies positions [0, num_positions) of the sequence in `blocks`, in place of an earlier copy.
        False, with nothing kept of it, if they do not fit in max_bytes. Raises ValueError if there are fewer
        blocks than positions; an error of the allocator leaves nothing behind.
        """
        self.drop(number)
        needed = sum(_bytes_held(kv, num_positions) for kv in kvs)
        if self._num_bytes + needed > self.max_bytes:
            return False
        parts = tuple(_copy_out(kv, _slots(kv, blocks, num_positions)) for kv in kvs)
        _wait_for(kvs)
        dtypes = tuple(kv.data.dtype for kv in kvs)
        self._saved[number] = _Saved(num_positions, dtypes, parts, needed)
        self._num_bytes += needed
        return True

    def restore(self, number: int, kvs: Sequence[PagedKV], blocks: Sequence[int]) -> bool:
        """Copies a saved sequence into `blocks` and forgets it. False, with nothing written, if these are not
        tensors like those that it was saved from; it is kept then. Raises KeyError if it is not there,
        ValueError if there are fewer blocks than positions.
        """
        saved = self._saved[number]
        if len(kvs) != len(saved.parts):
            return False
        for kv, part, dtype in zip(kvs, saved.parts, saved.dtypes, strict=True):
            sizes = part.shape[0], *part.shape[3:]
            if (kv.data.dtype, kv.num_layers, kv.num_kv_heads, kv.row_width) != (dtype, *sizes):
                return False
        slots = [_slots(kv, blocks, saved.num_positions) for kv in kvs]
        for kv, part, where in zip(kvs, saved.parts, slots, strict=True):
            _copy_in(kv, part, where)
        _wait_for(kvs)
        self.drop(number)
        return True

    def drop(self, number: int) -> None:
        """Forgets a sequence, if it is saved."""
        saved = self._saved.pop(number, None)
        if saved is not None:
            self._num_bytes -= saved.num_bytes


def _bytes_held(kv: PagedKV, num_positions: int) -> int:
    """Of host memory for so many positions; pinned memory comes in powers of two."""
    per_position = PagedKV.bytes_per_block(kv.num_layers, 1, kv.num_kv_heads, kv.head_dim, kv.data.dtype)
    num_bytes = per_position * num_positions
    return 1 << (num_bytes - 1).bit_length() if kv.data.device.type == "cuda" and num_bytes else num_bytes


def _slots(kv: PagedKV, blocks: Sequence[int], num_positions: int) -> Tensor:
    """[num_positions] int64, on the KV's device."""
    if num_positions > len(blocks) * kv.block_size:
        raise ValueError(f"{num_positions} positions do not lie in {len(blocks)} blocks of {kv.block_size}")
    first = torch.tensor(blocks, dtype=torch.int64).unsqueeze(-1) * kv.block_size
    return (first + torch.arange(kv.block_size)).flatten()[:num_positions].to(kv.data.device)


def _copy_out(kv: PagedKV, slots: Tensor) -> Tensor:
    shape = kv.num_layers, 2, slots.shape[0], kv.num_kv_heads, kv.row_width
    on_gpu = kv.data.device.type == "cuda"
    saved = torch.empty(shape, dtype=INTEGERS[kv.data.dtype.itemsize], pin_memory=on_gpu)
    # Each layer's keys, then its values: a GPU that ran out of blocks has little room for what is gathered.
    for layer, part in product(range(kv.num_layers), (0, 1)):
        saved[layer, part].copy_(kv.rows(layer, part, slots), non_blocking=True)
    return saved


def _copy_in(kv: PagedKV, saved: Tensor, slots: Tensor) -> None:
    for layer, part in product(range(kv.num_layers), (0, 1)):
        kv.put_rows(layer, part, slots, saved[layer, part].to(kv.data.device, non_blocking=True))


def _wait_for(kvs: Sequence[PagedKV]) -> None:
    """Waits for copies on a GPU to end: those out of it are read next, and the memory that those into it come
    from is freed next."""
    for device in {kv.data.device for kv in kvs if kv.data.device.type == "cuda"}:
        # The stream of these copies alone: the whole device cannot be waited for while a graph is captured.
        torch.cuda.current_stream(device).synchronize()
