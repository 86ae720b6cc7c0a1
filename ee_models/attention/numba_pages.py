"""CPU attention that reads pages in place, float32.

Work is cut into units of (row, KV head, a few tokens). A unit walks the context in tiles of 64 positions,
counted from position 0, with an online softmax; its queries go through a tile a few at a time, so that keys
and values are loaded once for all of these. The tiles, and the order of every sum for one query, depend on
nothing but that query's own position: so a token's output has the same bits whatever else is in the pass, and
whatever the block size.

In a tree the nodes of a unit share the tiles in which they see the same slots. From there on they take turns,
each with its own path in the tile: the arithmetic, and so the bits, are those of a chain of the node and its
ancestors.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import cfunc, njit, types
from numba.np.numpy_support import carray, from_dtype
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from ..kernels.numba_math import ONE, ZERO, exp32
from ..kernels.numba_vectors import WIDTH
from ..kernels.threads import KernelThreads, address_of, pointer, take
from .numba_products import COLUMNS, KEYS, QUERIES, add_weighted, dots

_TILE = 64
_QUERIES_PER_UNIT = 16
_FAR_BELOW = np.float32(-1e30)
_NO_PATH = 1 << 62  # the start of a chain's path: the block table tells every slot
# Multiplications of a call's scores from which other threads are worth their 3 microseconds.
_PARALLEL_FROM = 1 << 17
_OPTIONS: dict[str, Any] = {
    "fastmath": {"contract"},
    "error_model": "numpy",
    "cache": True,
    "nogil": True,
}


@njit(**_OPTIONS)
def _find_slots(
    table: Any, block_size: int, path: Any, path_start: int, start: int, count: int, slots: Any
) -> None:
    """Writes the slots of `count` positions from `start` on; up to a multiple of KEYS, the last again."""
    by_table = max(0, min(count, path_start - start))
    j = 0
    while j < by_table:  # block after block: a division for each position would take as long as its score
        block, offset = (start + j) // block_size, (start + j) % block_size
        first = table[block] * block_size + offset
        rest = min(block_size - offset, by_table - j)
        for k in range(rest):
            slots[j + k] = first + k
        j += rest
    for j in range(by_table, count):
        slots[j] = path[start + j - path_start]
    for j in range(count, (count + KEYS - 1) // KEYS * KEYS):
        slots[j] = slots[count - 1]


@njit(**_OPTIONS)
def _score(queries: Any, i: int, keys: Any, kv_head: int, slots: Any, count: int, scores: Any) -> None:
    """scores[k, j] = query i + k . key of slot j, for QUERIES k and `count` j; what else is written to scores
    means nothing."""
    head_dim, bytes_per_query, bytes_per_key = queries.shape[1], queries.strides[0], keys.strides[0]
    of_queries = (queries.ctypes.data + i * bytes_per_query, bytes_per_query)
    of_keys = (keys.ctypes.data + kv_head * keys.strides[1], bytes_per_key)
    for j in range(0, count, KEYS):
        of_scores = (scores.ctypes.data + j * scores.strides[1], scores.strides[0])
        dots(of_queries, of_keys, slots.ctypes.data + j * slots.strides[0], head_dim, of_scores)
    for d in range(head_dim // WIDTH * WIDTH, head_dim):
        for k in range(QUERIES):
            for j in range(count):
                scores[k, j] += queries[i + k, d] * keys[slots[j], kv_head, d]


@njit(**_OPTIONS)
def _accumulate(weights: Any, values: Any, kv_head: int, slots: Any, count: int, sums: Any, i: int) -> None:
    """sums[i + k] += weights[k, j] * value of slot j, for QUERIES k and one after another of `count` j."""
    head_dim, bytes_per_sum, bytes_per_value = sums.shape[1], sums.strides[0], values.strides[0]
    of_weights = (weights.ctypes.data, weights.strides[0])
    of_sums, of_values = (
        sums.ctypes.data + i * bytes_per_sum,
        values.ctypes.data + kv_head * values.strides[1],
    )
    whole = head_dim // COLUMNS * COLUMNS
    for d in range(0, whole, COLUMNS):
        some_values, some_sums = (of_values + 4 * d, bytes_per_value), (of_sums + 4 * d, bytes_per_sum)
        add_weighted(of_weights, some_values, slots.ctypes.data, count, some_sums)
    for k in range(QUERIES):
        o = sums[i + k]
        for j in range(count if whole < head_dim else 0):
            v, weight = values[slots[j], kv_head], weights[k, j]
            for d in range(whole, head_dim):
                o[d] += weight * v[d]


@njit(**_OPTIONS)
def _highest(scores: Any, peak: Any, some: Any) -> Any:
    """The largest of a tile's scores and `peak`; a maximum is the same in any order. `some` [16] is
    overwritten: LLVM takes maxima of a vector's elements side by side, not those of one loop."""
    for j in range(16):
        a, b, c, d = scores[j], scores[j + 16], scores[j + 32], scores[j + 48]
        a, c = (a if a > b else b), (c if c > d else d)
        some[j] = a if a > c else c
    for j in range(8):
        some[j] = some[j] if some[j] > some[j + 8] else some[j + 8]
    for j in range(8):
        peak = some[j] if some[j] > peak else peak
    return peak


@njit(**_OPTIONS)
def _sum(scores: Any, some: Any) -> Any:
    """The sum of a tile's scores, in an order that vectors can follow; `some` as in _highest."""
    for j in range(16):
        some[j] = (scores[j] + scores[j + 16]) + (scores[j + 32] + scores[j + 48])
    for j in range(8):
        some[j] += some[j + 8]
    for j in range(4):
        some[j] += some[j + 4]
    return (some[0] + some[2]) + (some[1] + some[3])


@njit(**_OPTIONS)
def _weigh(scores: Any, count: int, peak: Any, total: Any, some: Any) -> Any:
    """Turns a tile's scores into weights exp(score - new peak), 0 from `count` on -> (new peak, new total,
    factor for earlier sums)."""
    for j in range(max(count, 0), _TILE):
        scores[j] = _FAR_BELOW
    new_peak = _highest(scores, peak, some)
    shrink = exp32(peak - new_peak)
    for j in range(_TILE):
        scores[j] = exp32(scores[j] - new_peak)
    for j in range(max(count, 0), _TILE):
        scores[j] = ZERO
    return new_peak, total * shrink + _sum(scores, some), shrink


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

    Queries are (token, head) pairs, taken QUERIES at a time; of these, those of other tokens than the one in
    turn get no weight.
    """
    head_dim, group = q.shape[2], q.shape[1] // keys.shape[1]
    num_queries = (last - first) * group
    padded = num_queries + QUERIES - 1
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
    slots, scores = np.empty(_TILE, np.int64), np.empty((QUERIES, _TILE), np.float32)
    some = np.empty(16, np.float32)
    for start in range(0, context_len, _TILE):
        together = start + _TILE <= shared
        num_in_turn = last - first if together else 1
        for token in range(first, last, num_in_turn):
            count = min(_TILE, (context_len if together else positions[token] + 1) - start)
            if count <= 0:
                continue
            _find_slots(table, block_size, paths[token], path_starts[token], start, count, slots)
            end = (token - first + num_in_turn) * group
            for i in range((token - first) * group, end, QUERIES):
                longest = min(count, np.max(lengths[i : i + QUERIES]) - start)
                if longest <= 0:
                    continue
                _score(queries, i, keys, kv_head, slots, longest, scores)
                for k in range(i, i + QUERIES):
                    num_seen = min(count, lengths[k] - start) if k < end else 0
                    peak[k], total[k], shrink = _weigh(scores[k - i], num_seen, peak[k], total[k], some)
                    o = sums[k]
                    for d in range(head_dim):
                        o[d] *= shrink
                _accumulate(scores, values, kv_head, slots, longest, sums, i)
    for i in range(num_queries):
        o, s, factor = out[first + i // group, kv_head * group + i % group], sums[i], ONE / total[i]
        for d in range(head_dim):
            o[d] = s[d] * factor


_ARRAYS = ("tables", "positions", "units", "paths", "path_starts")  # of a pass, int64


class Call(ctypes.Structure):
    """One call for all units of a pass at a layer: addresses of arrays, their sizes, and the next unit.
    Units differ in size along a prompt, so each thread takes one when it is done with one."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *(
                    "next",
                    "q",
                    "keys",
                    "values",
                    "out",
                    "tables",
                    "positions",
                    "units",
                    "paths",
                    "path_starts",
                ),
                *("num_tokens", "num_heads", "num_kv_heads", "head_dim", "num_slots", "block_size"),
                *("num_rows", "num_blocks", "num_units", "path_len"),
            )
        ),
        ("scale", ctypes.c_float),
    ]


CALL = np.dtype(Call)


@njit(**_OPTIONS)
def attend_units(c: Any, next_unit: int, q: int, keys: int, values: int, out: int) -> None:
    """Computes units of the pass of a Call until none is left, on any number of threads at once; next_unit:
    the address of the next unit's number. q, keys, values and out are those of one layer, by address."""
    q_shape, kv_shape = (c.num_tokens, c.num_heads, c.head_dim), (c.num_slots, c.num_kv_heads, c.head_dim)
    queries, outputs = carray(pointer(q), q_shape, np.float32), carray(pointer(out), q_shape, np.float32)
    all_keys = carray(pointer(keys), kv_shape, np.float32)
    all_values = carray(pointer(values), kv_shape, np.float32)
    tables = carray(pointer(c.tables), (c.num_rows, c.num_blocks), np.int64)
    positions = carray(pointer(c.positions), c.num_tokens, np.int64)
    units = carray(pointer(c.units), (c.num_units, 3), np.int64)
    paths = carray(pointer(c.paths), (c.num_tokens, c.path_len), np.int64)
    path_starts = carray(pointer(c.path_starts), c.num_tokens, np.int64)
    while True:
        taken = take(next_unit)
        if taken >= c.num_units * c.num_kv_heads:
            return
        unit = units[taken // c.num_kv_heads]
        _attend_unit(
            queries,
            all_keys,
            all_values,
            tables[unit[0]],
            c.block_size,
            positions,
            paths,
            path_starts,
            unit[1],
            unit[2],
            taken % c.num_kv_heads,
            c.scale,
            outputs,
        )


@cfunc(types.void(types.CPointer(from_dtype(CALL))), cache=True, error_model="numpy")
def _attend(call: Any) -> None:
    c = carray(call, 1)[0]
    attend_units(c, address_of(call), c.q, c.keys, c.values, c.out)


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
class Prepared:
    """What a Call says of a pass, the arrays that it points to, and multiplications per head of scores."""

    view: BatchView
    kv: weakref.ref[PagedKV]  # not kept: it may be gigabytes
    call: Call
    arrays: tuple[Tensor, ...]
    num_products: int


class NumbaAttention:
    """Shares large calls among as many threads as torch uses."""

    name = "numba"
    row_invariant = True

    def __init__(self) -> None:
        self._threads = KernelThreads()
        self._last: Prepared | None = None

    def prepare(self, view: BatchView, kv: PagedKV) -> Prepared:
        # A pass ends with its exit, which reads the same view.
        if self._last is None or self._last.view is not view or self._last.kv() is not kv:
            self._last = self._prepare(view, kv)
        return self._last

    def _prepare(self, view: BatchView, kv: PagedKV) -> Prepared:
        positions, tables = view.positions.contiguous(), view.block_tables.contiguous()
        units, num_pairs = _cut(view.cu_q_lens.numpy(), positions.numpy(), _QUERIES_PER_UNIT)
        paths, path_starts = view.paths, view.path_starts
        if paths is None or path_starts is None:
            paths, path_starts = positions.new_empty(len(positions), 0), torch.full_like(positions, _NO_PATH)
        arrays = tables, positions, torch.from_numpy(units), paths.contiguous(), path_starts.contiguous()
        addresses = dict(zip(_ARRAYS, (array.data_ptr() for array in arrays), strict=True))
        num_slots, num_kv_heads, head_dim = kv.data.shape[2:]
        call = Call(
            **addresses,
            num_tokens=len(positions),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_slots=num_slots,
            block_size=kv.block_size,
            num_rows=tables.shape[0],
            num_blocks=tables.shape[1],
            num_units=len(units),
            path_len=paths.shape[1],
            scale=head_dim**-0.5,
        )
        return Prepared(view, weakref.ref(kv), call, arrays, num_pairs * head_dim)

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: Prepared) -> Tensor:
        call, q = prepared.call, q.contiguous()
        out = torch.empty_like(q)
        call.next, call.num_heads, call.q, call.out = 0, q.shape[1], q.data_ptr(), out.data_ptr()
        call.keys, call.values = kv.keys(layer).data_ptr(), kv.values(layer).data_ptr()
        is_large = prepared.num_products * q.shape[1] > _PARALLEL_FROM
        self._threads.run(_attend, ctypes.addressof(call), self._threads.count if is_large else 1)
        return out.view(-1, q.shape[1] * q.shape[2])
