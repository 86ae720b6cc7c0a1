"""CPU attention that reads pages in place: float32, over keys and values in float32, bfloat16 or int8. Those
of bfloat16 some CPUs can multiply as they are, with queries and weights rounded to it; those of int8 all do.

Work is cut into units of (row, a few tokens, one KV head or all). A unit walks the context in tiles of 64
positions, counted from position 0, with an online softmax; its queries go through a tile a few at a time, so
that keys and values are loaded once for all of these. The tiles, and the order of every sum for one query,
depend on nothing but that query's own position: so a token's output has the same bits whatever else is in the
pass, and whatever the block size.

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
from numba import types
from numba.np.numpy_support import carray, from_dtype
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from ..kernel_cache import cfunc, inlined, njit
from ..kernels import numba_tiles as tiles
from ..kernels.cpu import size_of_numbers
from ..kernels.numba_bfloat16 import GROUP
from ..kernels.numba_math import ONE
from ..kernels.numba_narrow import multiplies_bfloat16
from ..kernels.numba_vectors import WIDTH, number_at
from ..kernels.threads import KernelThreads, address_of, pointer, take
from . import numba_narrow_products as narrow
from .numba_int8_unit import attend_unit_in_int8
from .numba_products import (
    COLUMNS,
    FAR_BELOW,
    QUERIES,
    TILE,
    add_weighted,
    query_at,
    score,
    transpose,
    vector_at,
    weigh,
)

_TOKENS_PER_UNIT = 16  # at most
_UNITS_PER_THREAD = 3  # at least, where there are tokens for it: one that is done takes what is left
NO_PATH = 1 << 62  # the start of a chain's path: the block table tells every slot
# Multiplications of a call's scores from which other threads are worth their 3 microseconds.
_PARALLEL_FROM = 1 << 17


@njit
def _find_places(
    table: Any,
    block_size: int,
    path: Any,
    path_start: int,
    start: int,
    count: int,
    bytes_per_slot: int,
    places: Any,
) -> None:
    """Writes where the slots of `count` positions from `start` on begin, in bytes; up to a multiple of WIDTH,
    the last again."""
    by_table = max(0, min(count, path_start - start))
    j = 0
    while j < by_table:  # block after block: a division for each position would take as long as its score
        block, offset = (start + j) // block_size, (start + j) % block_size
        first = (table[block] * block_size + offset) * bytes_per_slot
        rest = min(block_size - offset, by_table - j)
        for k in range(rest):
            places[j + k] = first + k * bytes_per_slot
        j += rest
    for j in range(by_table, count):
        places[j] = path[start + j - path_start] * bytes_per_slot
    for j in range(count, (count + WIDTH - 1) // WIDTH * WIDTH):
        places[j] = places[count - 1]


@njit
def _transpose(keys: int, size: int, places: Any, count: int, out: Any, asked: Any) -> None:
    """out[j // COLUMNS, d, j % COLUMNS] = dimension d of the key at place j from the address `keys` on, for
    `count` j, and as many more as make a multiple of WIDTH; of numbers of `size` bytes. asked: address,
    that of places and their count of what is asked for meanwhile."""
    head_dim, bytes_per_part, bytes_per_row = out.shape[1], out.strides[0], out.strides[1]
    asked_keys, asked_places, num_asked = asked
    for j in range(0, count, WIDTH):
        to = out.ctypes.data + j // COLUMNS * bytes_per_part + 4 * (j % COLUMNS)
        own = places.ctypes.data + j * places.strides[0]
        others = vector_at(asked_places, j, num_asked)
        transpose(keys, size, own, head_dim, (to, bytes_per_row), asked_keys, others)


@njit
def _score(queries: Any, i: int, num: int, keys: Any, count: int, scores: Any) -> None:
    """scores[k, j] = query i + k . key j of a transposed tile, for `num` k and `count` j; what else is
    written to scores means nothing."""
    head_dim, bytes_per_row = queries.shape[1], queries.strides[0]
    of_queries = (queries.ctypes.data + i * bytes_per_row, bytes_per_row)
    for j in range(0, count, COLUMNS):
        of_keys = (keys.ctypes.data + j // COLUMNS * keys.strides[0], keys.strides[1])
        of_scores = (scores.ctypes.data + j * scores.strides[1], scores.strides[0])
        score(num, of_queries, of_keys, head_dim, of_scores)


@njit
def _accumulate(
    weights: Any,
    values: int,
    size: int,
    places: Any,
    count: int,
    factors: Any,
    sums: Any,
    i: int,
    num: int,
    head_dim: int,
    rest: Any,
    asked: Any,
) -> None:
    """sums[i + k] = factors[i + k] * sums[i + k] + weights[k, j] * the value at place j, for `num` k and one
    after another of `count` j. rest: addresses of what _copy_rest has copied, and of its places; the rest as
    of _transpose."""
    bytes_per_sum = sums.strides[0]
    of_weights = (weights.ctypes.data, weights.strides[0])
    of_factors, of_sums = factors.ctypes.data + i * factors.strides[0], sums.ctypes.data + i * bytes_per_sum
    whole = head_dim // COLUMNS * COLUMNS
    asked_values, asked_places, num_asked = asked
    for d in range(0, whole, COLUMNS):
        some_sums = of_sums + 4 * d, bytes_per_sum
        add_weighted(
            *(num, of_weights, values + size * d, size, places.ctypes.data, count, of_factors, some_sums),
            *(asked_values + size * d, asked_places, num_asked),
        )
    if whole < head_dim:
        some_sums = of_sums + 4 * whole, bytes_per_sum
        rest_values, rest_places = rest
        add_weighted(
            *(num, of_weights, rest_values, 4, rest_places, count, of_factors, some_sums),
            *(rest_values, rest_places, 1),  # is there already
        )


@njit
def _copy_rest(values: int, size: int, head_dim: int, places: Any, count: int, out: Any) -> None:
    """out[j, d - whole] = number d of the value at place j, for the d of `head_dim` that make no whole
    COLUMNS, and `count` j. Number by number, but once for all queries, whose sums then are of vectors."""
    whole = head_dim // COLUMNS * COLUMNS
    for j in range(count):
        for d in range(whole, head_dim):
            out[j, d - whole] = number_at(values + places[j] + size * d, size)


# Within its caller alone: LLVM optimises what a kernel calls once more in each that calls it.
@inlined
def _attend_unit(
    q: Any,
    keys: int,
    values: int,
    num_kv_heads: int,
    kind: Any,
    places_of_row: Any,
    part: Any,
    scale: Any,
    out: Any,
) -> None:
    """Attention of a part of a row, (first token, last + 1, first KV head, last + 1), for the query heads
    that read these, tile by tile. keys and values: addresses; kind: bytes of their numbers, and whether they
    are multiplied in bfloat16; places_of_row: table of its blocks, block size, and what a Call has of paths.

    Queries are (KV head, token, head of its group), of which up to QUERIES are taken together, or as many as
    products in bfloat16 take.
    """
    size, in_bfloat16 = kind
    table, block_size, positions, paths, path_starts = places_of_row
    first, last, first_head, last_head = part
    head_dim, group = q.shape[2], q.shape[1] // num_kv_heads
    num_per_head, bytes_per_row = (last - first) * group, size * head_dim
    bytes_per_slot = num_kv_heads * bytes_per_row
    num_queries = num_per_head * (last_head - first_head)
    most = narrow.QUERIES if in_bfloat16 else QUERIES
    # In bfloat16 numbers are multiplied in groups, and a block of queries may reach past the last.
    whole = GROUP if in_bfloat16 else COLUMNS
    dims = (head_dim + whole - 1) // whole * whole
    num_rows = num_queries + most if in_bfloat16 else num_queries
    queries, sums = np.empty((num_queries, head_dim), np.float32), np.zeros((num_rows, dims), np.float32)
    peak, total = np.full(num_queries, np.float32(FAR_BELOW)), np.zeros(num_queries, np.float32)
    shrink = np.empty(num_queries, np.float32)
    lengths = np.empty(num_queries, np.int64)  # positions that each query sees
    context_len, shared = 0, path_starts[first]  # positions below `shared` have the same slots for all
    for token in range(first, last):
        context_len, shared = max(context_len, positions[token] + 1), min(shared, path_starts[token])
    for i in range(num_queries):
        token, head = query_at(i, num_per_head, group, first, first_head)
        lengths[i] = positions[token] + 1
        for d in range(head_dim):
            queries[i, d] = q[token, head, d] * scale
    places, places_ahead = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    scores = np.empty((most, TILE), np.float32)
    # Two blocks of queries still cost less than keys and values that are laid out.
    reads_places = in_bfloat16 and narrow.READS_PLACES and num_per_head <= 2 * most and dims == head_dim
    # Arrays for other ways are empty.
    is_narrow, is_packed = 1 if in_bfloat16 else 0, 1 if in_bfloat16 and not reads_places else 0
    has_rest = 1 if not in_bfloat16 and dims > head_dim else 0
    packed_queries = np.zeros((is_narrow * num_rows, dims), np.int16)
    packed_keys = np.zeros((is_packed * TILE // WIDTH, dims // 2, WIDTH, 2), np.int16)
    packed_values = np.zeros((is_packed * dims // WIDTH, TILE // 2, WIDTH, 2), np.int16)
    packed_weights = np.zeros((is_narrow * most, TILE), np.int16)
    tile_keys = np.empty(((1 - is_narrow) * TILE // COLUMNS, head_dim, COLUMNS), np.float32)
    rest_values, rest_places = np.zeros((has_rest * TILE, COLUMNS), np.float32), np.empty(TILE, np.int64)
    for j in range(has_rest * TILE):
        rest_places[j] = j * rest_values.strides[0]
    if in_bfloat16:
        narrow.pack_queries(queries, packed_queries)
    for start in range(0, context_len, TILE):
        ahead = min(TILE, min(context_len, shared) - start - TILE)
        if ahead > 0:
            _find_places(
                table, block_size, paths[first], shared, start + TILE, ahead, bytes_per_slot, places_ahead
            )
        together = start + TILE <= shared
        num_in_turn = last - first if together else 1
        for token in range(first, last, num_in_turn):
            count = min(TILE, (context_len if together else positions[token] + 1) - start)
            if count <= 0:
                continue
            _find_places(
                *(table, block_size, paths[token], path_starts[token], start, count, bytes_per_slot, places)
            )
            for kv_head in range(first_head, last_head):
                all_keys, all_values = keys + kv_head * bytes_per_row, values + kv_head * bytes_per_row
                # What is read next is asked for on the way: the next head, or the first one of the next tile.
                # By address: of arrays numba counts who holds them, one thread after the other.
                if kv_head + 1 < last_head:
                    next_head, next_places, next_count = kv_head + 1, places.ctypes.data, count
                elif ahead > 0:
                    next_head, next_places, next_count = first_head, places_ahead.ctypes.data, ahead
                else:
                    next_head, next_places, next_count = kv_head, places.ctypes.data, count
                asked = keys + next_head * bytes_per_row, next_places, next_count
                asked_values = values + next_head * bytes_per_row, next_places, next_count
                i = (kv_head - first_head) * num_per_head + (token - first) * group
                end = i + num_in_turn * group
                num_blocks = (end - i + most - 1) // most
                if in_bfloat16 and not reads_places:
                    narrow.pack_keys(all_keys, head_dim, places, count, packed_keys, asked)
                    narrow.pack_values(all_values, head_dim, places, count, packed_values, asked_values)
                elif not in_bfloat16:
                    _transpose(all_keys, size, places, count, tile_keys, asked)
                    if has_rest:
                        _copy_rest(all_values, size, head_dim, places, count, rest_values)
                for block in range(num_blocks):
                    num = (end - i) // (num_blocks - block)  # blocks as alike as can be
                    longest = 0
                    for k in range(num):
                        longest = max(longest, min(count, lengths[i + k] - start))
                    if longest > 0:
                        if reads_places:
                            narrow.score_placed(
                                packed_queries[i:], num, all_keys, places, longest, scores, asked
                            )
                        elif in_bfloat16:
                            narrow.score(packed_queries, i, num, packed_keys, longest, scores)
                        else:
                            _score(queries, i, num, tile_keys, longest, scores)
                        for k in range(num):
                            seen, at = min(count, lengths[i + k] - start), 4 * (i + k)
                            of_scores = scores.ctypes.data + k * scores.strides[0]
                            # Addresses are taken here: numba frees an array that nothing names any more.
                            of_peak, of_total = peak.ctypes.data + at, total.ctypes.data + at
                            weigh(of_scores, seen, of_peak, of_total, shrink.ctypes.data + at)
                        if reads_places:
                            narrow.accumulate_placed(
                                *(scores, packed_weights, all_values, places, longest, shrink, sums, i, num),
                                asked_values,
                            )
                        elif in_bfloat16:
                            narrow.accumulate(
                                scores, packed_weights, packed_values, longest, shrink, sums, i, num
                            )
                        else:
                            _accumulate(
                                *(scores, all_values, size, places, longest, shrink, sums, i, num),
                                *(head_dim, (rest_values.ctypes.data, rest_places.ctypes.data)),
                                asked_values,
                            )
                    i += num
    for i in range(num_queries):
        token, head = query_at(i, num_per_head, group, first, first_head)
        o, s, factor = out[token, head], sums[i], ONE / total[i]
        for d in range(head_dim):
            o[d] = s[d] * factor


_ARRAYS = ("tables", "positions", "units", "paths", "path_starts")  # of a pass, int64


class Call(ctypes.Structure):
    """One call for all units of a pass at a layer: addresses of arrays, their sizes, and the next unit.
    kv_size: bytes of a number of keys and values, 4 = float32, 2 = bfloat16, 1 = int8; in_bfloat16: whether
    such of bfloat16 are multiplied as they are.
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
                *("num_tokens", "num_heads", "num_kv_heads", "head_dim", "kv_size", "block_size"),
                *("num_rows", "num_blocks", "num_units", "many_units", "path_len", "in_bfloat16"),
            )
        ),
        ("scale", ctypes.c_float),
    ]


CALL = np.dtype(Call)


@cfunc(types.void(types.CPointer(from_dtype(CALL))))
def attend(data: Any) -> None:
    """Computes units of the pass of a Call until none is left, on any number of threads at once."""
    c = carray(data, 1)[0]
    shape = (c.num_tokens, c.num_heads, c.head_dim)
    queries, outputs = carray(pointer(c.q), shape, np.float32), carray(pointer(c.out), shape, np.float32)
    tables = carray(pointer(c.tables), (c.num_rows, c.num_blocks), np.int64)
    positions = carray(pointer(c.positions), c.num_tokens, np.int64)
    units = carray(pointer(c.units), (c.num_units, 3), np.int64)
    paths = carray(pointer(c.paths), (c.num_tokens, c.path_len), np.int64)
    path_starts = carray(pointer(c.path_starts), c.num_tokens, np.int64)
    num_parts = 1 if c.num_units >= c.many_units else c.num_kv_heads
    heads_per_part = c.num_kv_heads // num_parts
    in_bfloat16 = c.in_bfloat16 != 0 and c.kv_size == 2
    if in_bfloat16:
        tiles.begin(tiles.TILE)
    while True:
        taken = take(address_of(data))
        if taken >= c.num_units * num_parts:
            break
        unit, first_head = units[taken // num_parts], taken % num_parts * heads_per_part
        places = tables[unit[0]], c.block_size, positions, paths, path_starts
        part = unit[1], unit[2], first_head, first_head + heads_per_part
        if c.kv_size == 1:
            attend_unit_in_int8(queries, c.keys, c.values, c.num_kv_heads, places, part, c.scale, outputs)
        else:
            kind = c.kv_size, in_bfloat16
            _attend_unit(queries, c.keys, c.values, c.num_kv_heads, kind, places, part, c.scale, outputs)
    if in_bfloat16:
        tiles.end()


@njit
def cut_units(cu_q_lens: Any, tokens_per_unit: int, units: Any) -> int:
    """Writes units [most, 3]: (row, first token, last token + 1) -> how many."""
    count = 0
    for row in range(cu_q_lens.shape[0] - 1):
        for first in range(cu_q_lens[row], cu_q_lens[row + 1], tokens_per_unit):
            units[count, 0], units[count, 1] = row, first
            units[count, 2] = min(first + tokens_per_unit, cu_q_lens[row + 1])
            count += 1
    return count


@njit
def cut_by(num_tokens: int, num_kv_heads: int, many_units: int, most: int) -> int:
    """Tokens of a row in one unit: so many, at most `most`, that there are `many_units` of a KV head."""
    return min(most, max(1, (num_tokens * num_kv_heads + many_units - 1) // many_units))


@dataclass(frozen=True)
class Prepared:
    """What a Call says of a pass, the arrays that it points to, and multiplications per head of scores."""

    view: BatchView
    kv: weakref.ref[PagedKV]  # not kept: it may be gigabytes
    call: Call
    arrays: tuple[Tensor, ...]
    num_products: int


class NumbaAttention:
    """Shares large calls among as many threads as torch uses.

    in_bfloat16: whether keys and values in bfloat16 are multiplied as they are, with queries and weights
    rounded to it. Raises ValueError where the CPU has no products in bfloat16."""

    name = "numba"
    row_invariant = True

    def __init__(self, in_bfloat16: bool = False) -> None:
        if in_bfloat16 and not multiplies_bfloat16():
            raise ValueError("there are no products in bfloat16 here; leave in_bfloat16 out")
        self.in_bfloat16 = in_bfloat16
        self._threads = KernelThreads()
        self._last: Prepared | None = None

    @property
    def most_per_unit(self) -> int:
        """Tokens of a unit at most."""
        return _TOKENS_PER_UNIT

    @property
    def many_units(self) -> int:
        """Units from which each takes all KV heads, whose keys and values lie side by side."""
        return _UNITS_PER_THREAD * self._threads.count

    def prepare(self, view: BatchView, kv: PagedKV) -> Prepared:
        # A pass ends with its exit, which reads the same view.
        if self._last is None or self._last.view is not view or self._last.kv() is not kv:
            self._last = self._prepare(view, kv)
        return self._last

    def _prepare(self, view: BatchView, kv: PagedKV) -> Prepared:
        positions, tables = view.positions.contiguous(), view.block_tables.contiguous()
        num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
        tokens_per_unit = cut_by(len(positions), num_kv_heads, self.many_units, self.most_per_unit)
        units = np.empty((len(positions), 3), np.int64)  # none is empty
        num_units = cut_units(view.cu_q_lens.numpy(), tokens_per_unit, units)
        num_pairs = int(positions.sum()) + len(positions)
        paths, path_starts = view.paths, view.path_starts
        if paths is None or path_starts is None:
            paths, path_starts = positions.new_empty(len(positions), 0), torch.full_like(positions, NO_PATH)
        arrays = tables, positions, torch.from_numpy(units), paths.contiguous(), path_starts.contiguous()
        addresses = dict(zip(_ARRAYS, (array.data_ptr() for array in arrays), strict=True))
        call = Call(
            **addresses,
            num_tokens=len(positions),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_size=size_of_numbers(kv),
            block_size=kv.block_size,
            num_rows=tables.shape[0],
            num_blocks=tables.shape[1],
            num_units=num_units,
            many_units=self.many_units,
            path_len=paths.shape[1],
            in_bfloat16=self.in_bfloat16,
            scale=head_dim**-0.5,
        )
        return Prepared(view, weakref.ref(kv), call, arrays, num_pairs * head_dim)

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: Prepared) -> Tensor:
        call, q = prepared.call, q.contiguous()
        out = torch.empty_like(q)
        call.next, call.num_heads, call.q, call.out = 0, q.shape[1], q.data_ptr(), out.data_ptr()
        call.keys, call.values = kv.keys(layer).data_ptr(), kv.values(layer).data_ptr()
        is_large = prepared.num_products * q.shape[1] > _PARALLEL_FROM
        self._threads.run(attend, ctypes.addressof(call), self._threads.count if is_large else 1)
        return out.view(-1, q.shape[1] * q.shape[2])
