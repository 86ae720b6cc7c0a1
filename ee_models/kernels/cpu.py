"""The kernels in numba, float32: one pass over memory each, and per token the same bits whatever else is in
the pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache.int8_kv import GROUP
from cache.paged_kv import PagedKV
from cache.view import BatchView

from ..kernel_cache import njit
from . import QkNorms
from .numba_int8_kv import bytes_of_head, store_head
from .numba_math import ONE, exp32
from .numba_vectors import copy_numbers, sum_of_squares

_NOTHING, _NO_DELTA = np.empty(0, np.float32), np.empty((0, 0), np.float32)


@njit
def _inverse_rms(x: Any, eps: Any) -> Any:
    """1 / sqrt(mean(x ** 2) + eps)."""
    total = sum_of_squares(x.ctypes.data, x.shape[0])
    return ONE / np.float32(math.sqrt(total / np.float32(x.shape[0]) + np.float32(eps)))


@njit
def add_rms_norm(hidden: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    size = hidden.shape[1]
    for token in range(hidden.shape[0]):
        h, o = hidden[token], out[token]
        if delta.shape[0] > 0:
            d = delta[token]
            for i in range(size):
                h[i] += d[i]
        scale = _inverse_rms(h, eps)
        for i in range(size):
            o[i] = h[i] * scale * weight[i]


@njit
def _store(x: int, head_dim: int, base: int, at: Any, size: int, is_key: bool, spare: int) -> None:
    """Writes a head's float32 at the address x, whose keys of int8 are worked on there, to its place (slot,
    head, heads) in keys or values from the address `base` on, of numbers of `size` bytes; spare: room for as
    many bytes as there are numbers."""
    slot, head, num_kv_heads = at
    if size == 1:
        group = base + (slot // GROUP * num_kv_heads + head) * bytes_of_head(head_dim)
        store_head(x, head_dim, spare, group, slot % GROUP, is_key)
    else:
        copy_numbers(x, head_dim, base + (slot * num_kv_heads + head) * size * head_dim, size)


@njit
def rope_and_store(
    qkv: Any,
    cos_sin: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    positions: Any,
    slots: Any,
    keys: int,
    values: int,
    kv_size: int,
    q: Any,
) -> None:
    """Works in qkv, too. keys and values: addresses, of numbers of kv_size bytes."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, half = (qkv.shape[1] // head_dim - num_heads) // 2, head_dim // 2
    spare = np.empty(head_dim, np.int8)
    for token in range(qkv.shape[0]):
        cos, sin = cos_sin[positions[token], 0], cos_sin[positions[token], 1]
        slot = slots[token]
        for head in range(num_heads + num_kv_heads):
            is_query = head < num_heads
            if not is_query and slot < 0:
                break
            x = qkv[token, head * head_dim : (head + 1) * head_dim]
            norm = q_norm if is_query else k_norm
            if norm.shape[0] > 0:
                scale = _inverse_rms(x, eps)
                for i in range(head_dim):
                    x[i] = x[i] * scale * norm[i]
            first, second = x[:half], x[half:]
            for i in range(half):
                before, after = first[i], second[i]
                first[i] = before * cos[i] - after * sin[i]
                second[i] = after * cos[i] + before * sin[i]
            if is_query:
                copy_numbers(x.ctypes.data, head_dim, q[token, head].ctypes.data, 4)
            else:
                at = slot, head - num_heads, num_kv_heads
                _store(x.ctypes.data, head_dim, keys, at, kv_size, True, spare.ctypes.data)
        for head in range(num_kv_heads if slot >= 0 else 0):
            x = qkv[token, (num_heads + num_kv_heads + head) * head_dim :]
            at = slot, head, num_kv_heads
            _store(x.ctypes.data, head_dim, values, at, kv_size, False, spare.ctypes.data)


@njit
def silu_mul(gate_up: Any, out: Any) -> None:
    size = out.shape[1]
    for token in range(out.shape[0]):
        gate, up, o = gate_up[token, :size], gate_up[token, size:], out[token]
        for i in range(size):
            o[i] = gate[i] / (ONE + exp32(-gate[i])) * up[i]


@njit
def widen(logits: Any, vocabulary: Any, out: Any) -> None:
    for row in range(out.shape[0]):
        out[row] = -np.inf
        for i in range(vocabulary.shape[0]):
            out[row, vocabulary[i]] = logits[row, i]


def size_of_numbers(kv: PagedKV) -> int:
    """Bytes of a number of a KV that numba's kernels read. Raises ValueError for one of another dtype."""
    if kv.data.dtype not in (torch.float32, torch.bfloat16, torch.int8):
        raise ValueError(
            f"numba reads KV in float32, bfloat16 or int8, not {kv.data.dtype}; use another kv_cache_dtype"
        )
    return kv.data.dtype.itemsize


class NumbaKernels:
    """Keeps the numpy arrays of weights, and of a pass's positions and slots: making one costs as much as a
    kernel."""

    def __init__(self) -> None:
        self._constants: dict[int, tuple[Tensor, Any]] = {}
        self._view: BatchView | None = None

    def add_rms_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = np.empty(hidden.shape, np.float32)
        added = _NO_DELTA if delta is None else delta.numpy()
        add_rms_norm(hidden.numpy(), added, self._constant(weight), eps, out)
        return torch.from_numpy(out)

    def rope_and_store(
        self, qkv: Tensor, rope: Tensor, norms: QkNorms, eps: float, kv: PagedKV, layer: int, view: BatchView
    ) -> Tensor:
        keys, values = kv.keys(layer), kv.values(layer)
        if view is not self._view:
            self._view, self._positions, self._slots = view, view.positions.numpy(), view.slots.numpy()
        num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
        places, size = (keys.data_ptr(), values.data_ptr()), size_of_numbers(kv)
        q = np.empty((qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim), np.float32)
        q_weight, k_weight = (_NOTHING, _NOTHING) if norms is None else map(self._constant, norms)
        table, positions, slots = self._constant(rope), self._positions, self._slots
        rope_and_store(qkv.numpy(), table, q_weight, k_weight, eps, positions, slots, *places, size, q)
        return torch.from_numpy(q)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), np.float32)
        silu_mul(gate_up.numpy(), out)
        return torch.from_numpy(out)

    def widen(self, logits: Tensor, vocabulary: Tensor, vocab_size: int) -> Tensor:
        out = np.empty((logits.shape[0], vocab_size), np.float32)
        widen(logits.numpy(), self._constant(vocabulary), out)
        return torch.from_numpy(out)

    def _constant(self, tensor: Tensor) -> Any:
        """The array of a weight or table; the tensor is kept too, so that its id stays its own."""
        found = self._constants.get(id(tensor))
        if found is None:
            found = self._constants[id(tensor)] = (tensor, tensor.numpy())
        return found[1]
