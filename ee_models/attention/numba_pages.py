"""CPU attention that reads pages in place, float32.

Work is cut into units of (row, KV head, a few tokens). A unit walks the context in tiles of 64 positions,
counted from position 0, with an online softmax; its queries go through a tile four at a time, so that keys
and values are loaded once for four. The tiles, and the order of every sum for one query, depend on nothing
but that query's own position: so a token's output has the same bits whatever else is in the pass, and
whatever the block size.

In a tree the nodes of a unit share the tiles in which they see the same slots. From there on they take turns,
each with its own path in the tile: the arithmetic, and so the bits, are those of a chain of the node and its
ancestors.
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

from ..kernels.numba_math import ONE, ZERO, exp32, transpose_8x8

_TILE = 64
_QUERIES_PER_UNIT = 16
_FAR_BELOW = np.float32(-1e30)
_NO_PATH = 1 << 62  # the start of a chain's path: the block table tells every slot
# Multiplications in a call from which it pays to wake other threads.
_PARALLEL_FROM = 1 << 21
_OPTIONS: dict[str, Any] = {
    "fastmath": {"contract", "reassoc"},
    "error_model": "numpy",
    "cache": True,
    "nogil": True,
}


@njit(**_OPTIONS)
def _find_slots(
    table: Any, block_size: int, path: Any, path_start: int, start: int, count: int, slots: Any
) -> None:
    """Writes the slots of `count` positions from `start` on; up to a multiple of eight, the last again."""
    by_table = max(0, min(count, path_start - start))
    for j in range(by_table):
        position = start + j
        slots[j] = table[position // block_size] * block_size + position % block_size
    for j in range(by_table, count):
        slots[j] = path[start + j - path_start]
    for j in range(count, (count + 7) // 8 * 8):
        slots[j] = slots[count - 1]


@njit(**_OPTIONS)
def _load_tile(
    keys: Any, values: Any, slots: Any, kv_head: int, loaded: int, count: int, key_tile: Any, value_tile: Any
) -> None:
    """Copies `count` positions: keys transposed to [head_dim, tile], values as [tile, head_dim]. The first
    `loaded`, a multiple of eight, are in the tile already.

    Columns past `count`, up to a multiple of eight, repeat the last position; nothing reads them but with
    weight 0.
    """
    head_dim = key_tile.shape[0]
    for j in range(loaded, count):
        v, v_tile = values[slots[j], kv_head], value_tile[j]
        for d in range(head_dim):
            v_tile[d] = v[d]
    whole = head_dim // 8 * 8
    base, slot_stride = keys.ctypes.data + kv_head * keys.strides[1], keys.strides[0]
    out, out_stride = key_tile.ctypes.data, key_tile.strides[0]
    for j in range(loaded, count, 8):
        a0, a1 = base + slots[j] * slot_stride, base + slots[j + 1] * slot_stride
        a2, a3 = base + slots[j + 2] * slot_stride, base + slots[j + 3] * slot_stride
        a4, a5 = base + slots[j + 4] * slot_stride, base + slots[j + 5] * slot_stride
        a6, a7 = base + slots[j + 6] * slot_stride, base + slots[j + 7] * slot_stride
        for d in range(0, whole, 8):
            at = d * 4
            transpose_8x8(
                (a0 + at, a1 + at, a2 + at, a3 + at, a4 + at, a5 + at, a6 + at, a7 + at),
                out + d * out_stride + j * 4,
                out_stride,
            )
    for j in range(loaded, count):
        k = keys[slots[j], kv_head]
        for d in range(whole, head_dim):
            key_tile[d, j] = k[d]


@njit(**_OPTIONS)
def _score(queries: Any, key_tile: Any, scores: Any) -> None:
    """scores[i, j] = query i . key j for four queries and the whole tile."""
    s0, s1, s2, s3 = scores[0], scores[1], scores[2], scores[3]
    q0, q1, q2, q3 = queries[0], queries[1], queries[2], queries[3]
    for j in range(_TILE):
        s0[j], s1[j], s2[j], s3[j] = ZERO, ZERO, ZERO, ZERO
    head_dim = key_tile.shape[0]
    for d in range(
        0, head_dim - 1, 2
    ):  # two dimensions at a time halve the traffic of the sums; four were no faster
        ka, kb = key_tile[d], key_tile[d + 1]
        a0, a1, a2, a3 = q0[d], q1[d], q2[d], q3[d]
        b0, b1, b2, b3 = q0[d + 1], q1[d + 1], q2[d + 1], q3[d + 1]
        for j in range(_TILE):
            s0[j] = s0[j] + a0 * ka[j] + b0 * kb[j]
            s1[j] = s1[j] + a1 * ka[j] + b1 * kb[j]
            s2[j] = s2[j] + a2 * ka[j] + b2 * kb[j]
            s3[j] = s3[j] + a3 * ka[j] + b3 * kb[j]


@njit(**{**_OPTIONS, "fastmath": {"nnan", "nsz"}})
def _highest(scores: Any, peak: Any) -> Any:
    """The largest of a tile's scores and `peak`; a maximum is the same in any order."""
    for j in range(_TILE):
        peak = scores[j] if scores[j] > peak else peak
    return peak


@njit(**_OPTIONS)
def _weigh(scores: Any, count: int, peak: Any, total: Any) -> Any:
    """Turns a tile's scores into weights exp(score - new peak), 0 from `count` on -> (new peak, new total,
    factor for earlier sums)."""
    for j in range(max(count, 0), _TILE):
        scores[j] = _FAR_BELOW
    new_peak = _highest(scores, peak)
    shrink = exp32(peak - new_peak)
    for j in range(_TILE):
        scores[j] = exp32(scores[j] - new_peak)
    for j in range(max(count, 0), _TILE):
        scores[j] = ZERO
    tile_total = ZERO
    for j in range(_TILE):
        tile_total += scores[j]
    return new_peak, total * shrink + tile_total, shrink


@njit(**_OPTIONS)
def _accumulate(weights: Any, count: int, value_tile: Any, sums: Any) -> None:
    """sums[i] += weights[i, j] * value j for four queries and the tile's first `count` positions (then
    weights are 0)."""
    o0, o1, o2, o3 = sums[0], sums[1], sums[2], sums[3]
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for j in range(0, count, 2):
        va, vb = value_tile[j], value_tile[j + 1]
        a0, a1, a2, a3 = w0[j], w1[j], w2[j], w3[j]
        b0, b1, b2, b3 = w0[j + 1], w1[j + 1], w2[j + 1], w3[j + 1]
        for d in range(o0.shape[0]):
            o0[d] = o0[d] + a0 * va[d] + b0 * vb[d]
            o1[d] = o1[d] + a1 * va[d] + b1 * vb[d]
            o2[d] = o2[d] + a2 * va[d] + b2 * vb[d]
            o3[d] = o3[d] + a3 * va[d] + b3 * vb[d]


@njit(**_OPTIONS)
def _attend_unit(
    q: Any,
    keys: Any,
    values: Any,
    table: Any,
    block_size: int,
    positions: Any,
    paths: Any,
    path_starts: Any,
    first: int,
    last: int,
    kv_head: int,
    scale: Any,
    out: Any,
) -> None:
    """Attention of tokens first..last-1 of one row, for the query heads that read `kv_head`.

    Queries are (token, head) pairs, taken four at a time; of the four, those of other tokens than the one in
    turn get no weight.
    """
    head_dim, group = q.shape[2], q.shape[1] // keys.shape[1]
    num_queries = (last - first) * group
    padded = num_queries + 3
    queries, sums = np.zeros((padded, head_dim), np.float32), np.zeros((padded, head_dim), np.float32)
    peak, total = np.full(padded, _FAR_BELOW), np.zeros(padded, np.float32)
    lengths = np.zeros(padded, np.int64)  # positions that each query sees
    context_len, shared = 0, path_starts[first]  # positions below `shared` have the same slots for all
    for token in range(first, last):
        context_len, shared = max(context_len, positions[token] + 1), min(shared, path_starts[token])
    for i in range(num_queries):
        token, head = first + i // group, kv_head * group + i % group
        lengths[i] = positions[token] + 1
        for d in range(head_dim):
            queries[i, d] = q[token, head, d] * scale
    key_tile, value_tile = np.zeros((head_dim, _TILE), np.float32), np.zeros((_TILE, head_dim), np.float32)
    slots, scores = np.empty(_TILE, np.int64), np.empty((4, _TILE), np.float32)
    for start in range(0, context_len, _TILE):
        together = start + _TILE <= shared
        num_in_turn = last - first if together else 1
        loaded = 0  # leading positions of the tile that stay from one turn to the next
        for token in range(first, last, num_in_turn):
            count = min(_TILE, (context_len if together else positions[token] + 1) - start)
            if count <= 0:
                continue
            _find_slots(table, block_size, paths[token], path_starts[token], start, count, slots)
            _load_tile(keys, values, slots, kv_head, loaded // 8 * 8, count, key_tile, value_tile)
            loaded = max(loaded, min(count, shared - start))
            end = (token - first + num_in_turn) * group
            for i in range((token - first) * group, end, 4):
                longest = min(count, max(lengths[i], lengths[i + 1], lengths[i + 2], lengths[i + 3]) - start)
                if longest <= 0:
                    continue
                _score(queries[i : i + 4], key_tile, scores)
                for k in range(i, i + 4):
                    num_seen = min(count, lengths[k] - start) if k < end else 0
                    peak[k], total[k], shrink = _weigh(scores[k - i], num_seen, peak[k], total[k])
                    o = sums[k]
                    for d in range(head_dim):
                        o[d] *= shrink
                _accumulate(scores, longest, value_tile, sums[i : i + 4])
    for i in range(num_queries):
        o, s, factor = out[first + i // group, kv_head * group + i % group], sums[i], ONE / total[i]
        for d in range(head_dim):
            o[d] = s[d] * factor


@njit(**_OPTIONS)
def _attend(
    q: Any,
    keys: Any,
    values: Any,
    tables: Any,
    block_size: int,
    positions: Any,
    units: Any,
    share: int,
    num_shares: int,
    scale: Any,
    paths: Any,
    path_starts: Any,
    out: Any,
) -> None:
    """Computes every `num_shares`-th unit from `share` on: units differ in size along a prompt, so neighbours
    go to different threads."""
    num_kv_heads = keys.shape[1]
    for i in range(share, units.shape[0] * num_kv_heads, num_shares):
        unit, kv_head = units[i // num_kv_heads], i % num_kv_heads
        _attend_unit(
            q,
            keys,
            values,
            tables[unit[0]],
            block_size,
            positions,
            paths,
            path_starts,
            unit[1],
            unit[2],
            kv_head,
            scale,
            out,
        )


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
    """The units of a pass, and arrays of its view. num_pairs: number of (query, key) pairs."""

    tables: Any
    positions: Any
    units: Any
    num_pairs: int
    scale: Any
    paths: Any
    path_starts: Any


class NumbaAttention:
    """Shares large calls among as many threads as torch uses, from a Python pool, whose idle threads sleep;
    those of a second OpenMP pool would compete with torch's."""

    name = "numba"
    row_invariant = True

    def __init__(self) -> None:
        self._num_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(max(1, self._num_threads - 1), thread_name_prefix="attention")

    def prepare(self, view: BatchView, kv: PagedKV) -> _Units:
        positions = view.positions.numpy()
        units, num_pairs = _cut(view.cu_q_lens.numpy(), positions, _QUERIES_PER_UNIT)
        if view.paths is None or view.path_starts is None:
            paths, path_starts = np.empty((view.num_tokens, 0), np.int64), np.full(view.num_tokens, _NO_PATH)
        else:
            paths, path_starts = np.ascontiguousarray(view.paths.numpy()), view.path_starts.numpy()
        tables, scale = view.block_tables.numpy(), np.float32(kv.data.shape[-1] ** -0.5)
        return _Units(tables, positions, units, num_pairs, scale, paths, path_starts)

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: _Units) -> Tensor:
        (num_tokens, num_heads, head_dim), p = q.shape, prepared
        out = np.empty((num_tokens, num_heads, head_dim), np.float32)
        num_shares = self._num_threads if p.num_pairs * num_heads * head_dim > _PARALLEL_FROM else 1
        pages: tuple[Any, ...] = (*kv.host_arrays()[layer], p.tables, kv.block_size)
        inputs = (q.numpy(), *pages, p.positions, p.units)

        def run(share: int) -> None:
            _attend(*inputs, share, num_shares, p.scale, p.paths, p.path_starts, out)

        others = [self._pool.submit(run, share) for share in range(1, num_shares)]
        run(0)
        for other in others:
            other.result()
        return torch.from_numpy(out).view(-1, num_heads * head_dim)
