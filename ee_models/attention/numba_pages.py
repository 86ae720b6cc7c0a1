"""CPU attention that reads pages in place, float32.

Work is cut into units of (row, KV head, a few queries). A unit walks the context in tiles of 64 positions, counted from
position 0, with an online softmax. The tiles, and the order of every sum in them, depend on nothing but a token's own
position: so a token's output has the same bits whatever else is in the pass, and whatever the block size.
"""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from ..kernels.numba_math import ONE, ZERO, exp32

_TILE = 64
_QUERIES_PER_UNIT = 16
_FAR_BELOW = np.float32(-1e30)
# Multiplications in a call from which it pays to wake other threads.
_PARALLEL_FROM = 1 << 21
_OPTIONS: dict[str, Any] = {"fastmath": {"contract", "reassoc"}, "error_model": "numpy", "cache": True, "nogil": True}


@njit(**_OPTIONS)
def _load_tile(keys: Any, values: Any, table: Any, block_size: int, kv_head: int, start: int, count: int, key_tile: Any, value_tile: Any) -> None:
    """Copies `count` positions from `start` on: keys transposed to [head_dim, tile], values as [tile, head_dim]."""
    head_dim = key_tile.shape[0]
    for j in range(count):
        position = start + j
        slot = table[position // block_size] * block_size + position % block_size
        k, v, v_tile = keys[slot, kv_head], values[slot, kv_head], value_tile[j]
        for d in range(head_dim):
            key_tile[d, j] = k[d]
        for d in range(head_dim):
            v_tile[d] = v[d]


@njit(**_OPTIONS)
def _score(query: Any, scale: Any, key_tile: Any, scores: Any) -> None:
    """scores[j] = scale * query . key j, for the whole tile; four dimensions at a time to halve the traffic."""
    for j in range(_TILE):
        scores[j] = ZERO
    for d in range(0, query.shape[0] - 3, 4):
        q0, q1, q2, q3 = query[d] * scale, query[d + 1] * scale, query[d + 2] * scale, query[d + 3] * scale
        k0, k1, k2, k3 = key_tile[d], key_tile[d + 1], key_tile[d + 2], key_tile[d + 3]
        for j in range(_TILE):
            scores[j] += (q0 * k0[j] + q1 * k1[j]) + (q2 * k2[j] + q3 * k3[j])
    for d in range(query.shape[0] // 4 * 4, query.shape[0]):
        q0, k0 = query[d] * scale, key_tile[d]
        for j in range(_TILE):
            scores[j] += q0 * k0[j]


@njit(**_OPTIONS)
def _fold(scores: Any, count: int, value_tile: Any, peak: Any, total: Any, out: Any) -> Any:
    """Folds the tile's first `count` positions into the running softmax (peak, total, out) -> the new peak and total."""
    new_peak = peak
    for j in range(count):
        new_peak = max(new_peak, scores[j])
    shrink = exp32(peak - new_peak)
    for j in range(_TILE):
        scores[j] = exp32(scores[j] - new_peak)
    for j in range(count, _TILE):
        scores[j] = ZERO
    tile_total = ZERO
    for j in range(_TILE):
        tile_total += scores[j]
    head_dim = out.shape[0]
    for d in range(head_dim):
        out[d] *= shrink
    for j in range(0, count, 4):  # past `count` the weights are 0
        w0, w1, w2, w3 = scores[j], scores[j + 1], scores[j + 2], scores[j + 3]
        v0, v1, v2, v3 = value_tile[j], value_tile[j + 1], value_tile[j + 2], value_tile[j + 3]
        for d in range(head_dim):
            out[d] += (w0 * v0[d] + w1 * v1[d]) + (w2 * v2[d] + w3 * v3[d])
    return new_peak, total * shrink + tile_total


@njit(**_OPTIONS)
def _attend_unit(
    q: Any, keys: Any, values: Any, table: Any, block_size: int, positions: Any, first: int, last: int, kv_head: int, scale: Any, out: Any
) -> None:
    """Attention of tokens first..last-1 of one row, for the query heads that read `kv_head`."""
    head_dim, group = q.shape[2], q.shape[1] // keys.shape[1]
    num_queries = (last - first) * group
    peak, total = np.full(num_queries, _FAR_BELOW), np.zeros(num_queries, np.float32)
    key_tile, value_tile = np.zeros((head_dim, _TILE), np.float32), np.zeros((_TILE, head_dim), np.float32)
    scores = np.empty(_TILE, np.float32)
    for token in range(first, last):
        out[token, kv_head * group : (kv_head + 1) * group] = ZERO
    context_len = positions[last - 1] + 1  # a row's tokens are in order of position
    for start in range(0, context_len, _TILE):
        _load_tile(keys, values, table, block_size, kv_head, start, min(_TILE, context_len - start), key_tile, value_tile)
        for token in range(first, last):
            count = min(_TILE, positions[token] + 1 - start)
            if count <= 0:
                continue
            for g in range(group):
                i, head = (token - first) * group + g, kv_head * group + g
                _score(q[token, head], scale, key_tile, scores)
                peak[i], total[i] = _fold(scores, count, value_tile, peak[i], total[i], out[token, head])
    for token in range(first, last):
        for g in range(group):
            o, factor = out[token, kv_head * group + g], ONE / total[(token - first) * group + g]
            for d in range(head_dim):
                o[d] *= factor


@njit(**_OPTIONS)
def _attend(
    q: Any, keys: Any, values: Any, tables: Any, block_size: int, positions: Any, units: Any, share: int, num_shares: int, scale: Any, out: Any
) -> None:
    """Every `num_shares`-th unit from `share` on. Units differ in size along a prompt, so neighbours go to different threads."""
    num_kv_heads = keys.shape[1]
    for i in range(share, units.shape[0] * num_kv_heads, num_shares):
        unit, kv_head = units[i // num_kv_heads], i % num_kv_heads
        _attend_unit(q, keys, values, tables[unit[0]], block_size, positions, unit[1], unit[2], kv_head, scale, out)


@njit(cache=True)
def _cut(cu_q_lens: Any, positions: Any, queries_per_unit: int) -> Any:
    """units [n, 3]: (row, first token, last token + 1); and the number of (query, key) pairs in all."""
    units = np.empty((positions.shape[0] // queries_per_unit + cu_q_lens.shape[0], 3), np.int64)
    count, num_pairs = 0, 0
    for row in range(cu_q_lens.shape[0] - 1):
        for first in range(cu_q_lens[row], cu_q_lens[row + 1], queries_per_unit):
            last = min(first + queries_per_unit, cu_q_lens[row + 1])
            units[count] = row, first, last
            num_pairs += (last - first) * (positions[last - 1] + 1)
            count += 1
    return units[:count], num_pairs


@dataclass(frozen=True)
class _Units:
    tables: Any
    positions: Any
    units: Any
    num_pairs: int


class NumbaAttention:
    """Large calls are shared among as many threads as torch uses, from a pool of Python's: its idle threads sleep, where those
    of a second OpenMP pool would spin against torch's."""

    name = "numba"
    row_invariant = True

    def __init__(self) -> None:
        self._num_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(max(1, self._num_threads - 1), thread_name_prefix="attention")

    def prepare(self, view: BatchView, kv: PagedKV) -> _Units:
        positions = view.positions.numpy()
        units, num_pairs = _cut(view.cu_q_lens.numpy(), positions, _QUERIES_PER_UNIT)
        return _Units(view.block_tables.numpy(), positions, units, num_pairs)

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: _Units) -> Tensor:
        num_heads, head_dim = q.shape[1:]
        out = torch.empty_like(q)
        inputs = (q.numpy(), kv.keys(layer).numpy(), kv.values(layer).numpy(), prepared.tables, kv.block_size, prepared.positions, prepared.units)
        scale, result = np.float32(head_dim**-0.5), out.numpy()
        num_shares = self._num_threads if prepared.num_pairs * num_heads * head_dim > _PARALLEL_FROM else 1
        others = [self._pool.submit(_attend, *inputs, share, num_shares, scale, result) for share in range(1, num_shares)]
        _attend(*inputs, 0, num_shares, scale, result)
        for other in others:
            other.result()
        return out.view(-1, num_heads * head_dim)
