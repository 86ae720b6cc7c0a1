"""What attention does with a tile of positions on a CPU that has products in bfloat16 (`kernels.numba_tiles`,
`kernels.numba_pairs`): keys and values in bfloat16 are laid out as these read them, scores and weighted sums
are products of theirs. Where few queries read a tile, vectors of pairs take keys and values from where they
lie, and turn them on the way; they are added up in the same order.

Queries and weights are rounded to bfloat16; scores, peaks, totals and sums stay float32. Numbers that are
missing, of a head narrower than a tile or of positions past the last, are zeros: they add nothing to finite
ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from ..kernel_cache import njit
from ..kernels import numba_bfloat16_tiles, numba_pairs
from ..kernels.numba_bfloat16 import COLUMNS, GROUP
from ..kernels.numba_tiles import HAS_TILES
from ..kernels.numba_tiles import TILE as ROWS_OF_TILE
from ..kernels.numba_vectors import (
    FLOAT,
    INT,
    INT32,
    NONE,
    ROWS,
    VECTOR,
    WIDTH,
    copy_numbers,
    for_count,
    load,
    prefetch,
    rows_of,
    shuffle,
    spread,
    store,
)
from ..kernels.threads import pointer
from .numba_products import PAIRS, TILE, row_at, transposed, vector_at

_LINE, _HALF = 64, ir.IntType(16)
_HALVES = [INT(4 * WIDTH * i) for i in range(2)]  # where vectors of a group's sums begin
# Two lines of bfloat16, number beside number, as CPUs do it: of each lane of eight the first or last four.
_TWO_VALUES = [
    [lane + at + i // 2 + i % 2 * 2 * WIDTH for lane in range(0, 2 * WIDTH, 8) for i in range(8)]
    for at in (0, 4)
]
# A group's sums, two vectors, in that order, and back.
_DEALT = [[lane + i for lane in range(at, 2 * WIDTH, 8) for i in range(4)] for at in (0, 4)]
_IN_ORDER = [
    [lane + of + i for lane in range(at, at + WIDTH // 2, 4) for of in (0, WIDTH) for i in range(4)]
    for at in (0, WIDTH // 2)
]
_HAS_PRODUCTS = HAS_TILES or numba_pairs.HAS_PAIRS
# Whether keys and values of few queries are multiplied from where they lie, and turned in the CPU's vectors:
# that takes less time than to write them down as products read them, and to read that again.
READS_PLACES = numba_pairs.HAS_PAIRS and not HAS_TILES
QUERIES = ROWS_OF_TILE if HAS_TILES else numba_pairs.BLOCK  # that are taken together, at most


def _pack_keys_intrinsic(
    _context: Any, keys: Any, places: Any, num_dims: Any, out: Any, asked: Any, asked_places: Any
) -> Any:
    """out[p, j] = numbers 2 p and 2 p + 1 of the key at keys + places[j] for WIDTH j, whole groups of GROUP
    numbers of them; asks for that at asked + asked_places[j] meanwhile. All are addresses."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if not _HAS_PRODUCTS:
            return NONE
        keys, places, num_dims, out, asked, asked_places = args
        key_rows = [row_at(builder, keys, places, INT(j)) for j in range(WIDTH)]
        asked_rows = [row_at(builder, asked, asked_places, INT(j)) for j in range(WIDTH)]
        with cgutils.for_range(builder, builder.udiv(num_dims, INT(GROUP))) as loop:
            offset = builder.mul(loop.index, INT(_LINE))
            for row in asked_rows:
                prefetch(builder, row, offset)
            to = builder.add(out, builder.mul(loop.index, INT(_LINE * WIDTH)))
            for at in range(0, _LINE, 16):
                columns = transposed(builder, key_rows, builder.add(offset, INT(at)))
                for p, column in enumerate(columns, at // 4):
                    store(builder, column, to, INT(_LINE * p))
        return NONE

    return types.none(*(types.intp,) * 6), generate


def _pack_two_values_intrinsic(
    _context: Any, one: Any, other: Any, num_dims: Any, out: Any, bytes_per_part: Any
) -> Any:
    """The numbers of two values side by side, WIDTH of each, as often as num_dims has them: the i-th of these
    `bytes_per_part` * i bytes after the address out; the others are addresses, too."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        one, other, num_dims, out, bytes_per_part = args
        halves, upper = ir.VectorType(_HALF, WIDTH), ir.Constant(PAIRS, [16] * WIDTH)
        with cgutils.for_range(builder, builder.udiv(num_dims, INT(WIDTH))) as loop:
            offset = builder.mul(loop.index, INT(2 * WIDTH))
            low, high = (builder.zext(load(builder, row, offset, halves), PAIRS) for row in (one, other))
            both = builder.or_(low, builder.shl(high, upper))
            store(builder, both, out, builder.mul(loop.index, bytes_per_part))
        return NONE

    return types.none(*(types.intp,) * 5), generate


def _score_placed_intrinsic(
    _context: Any,
    num: Any,
    queries: Any,
    keys: Any,
    places: Any,
    num_dims: Any,
    scores: Any,
    asked: Any,
    asked_places: Any,
) -> Any:
    """scores[i, j] = queries[i] . the key at keys + places[j], for 1 to QUERIES queries i and WIDTH j, as of
    a tile that is packed; num_dims: whole groups of GROUP. queries and scores are ROWS; the rest as of
    _pack_keys."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if not numba_pairs.HAS_PAIRS:
            return NONE
        num, queries, keys, places, num_dims, scores, asked, asked_places = args
        zero = ir.Constant(VECTOR, [0.0] * WIDTH)

        def block(count: int) -> None:
            key_rows = [row_at(builder, keys, places, INT(j)) for j in range(WIDTH)]
            asked_rows = [row_at(builder, asked, asked_places, INT(j)) for j in range(WIDTH)]
            query_rows = rows_of(builder, queries, count)
            totals = [cgutils.alloca_once_value(builder, zero) for _ in query_rows]
            with cgutils.for_range(builder, builder.udiv(num_dims, INT(GROUP))) as loop:
                offset = builder.mul(loop.index, INT(_LINE))
                for row in asked_rows:
                    prefetch(builder, row, offset)
                for at in range(0, _LINE, 16):
                    start = builder.add(offset, INT(at))
                    for p, pairs in enumerate(transposed(builder, key_rows, start)):
                        place = builder.add(start, INT(4 * p))
                        for row, total in zip(query_rows, totals, strict=True):
                            alike = spread(builder, load(builder, row, place, INT32))
                            numba_pairs.add_products(builder, total, pairs, alike)
            for row, total in zip(rows_of(builder, scores, count), totals, strict=True):
                store(builder, builder.load(total), row, INT(0))

        for_count(builder, num, QUERIES, block)
        return NONE

    return types.none(types.intp, ROWS, *(types.intp,) * 3, ROWS, *(types.intp,) * 2), generate


def _accumulate_placed_intrinsic(
    _context: Any,
    num: Any,
    weights: Any,
    values: Any,
    places: Any,
    count: Any,
    factors: Any,
    sums: Any,
    asked: Any,
    asked_places: Any,
    num_asked: Any,
) -> Any:
    """sums[i, :GROUP] = factors[i] * sums[i, :GROUP] + weights[i, j] * GROUP numbers at values + places[j],
    for 1 to QUERIES queries i and `count` j, two after two, as of a tile that is packed; asks for those at
    asked + asked_places[j] meanwhile, for as many j as there are of num_asked. weights, of bfloat16, and sums
    are ROWS, the others addresses."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if not numba_pairs.HAS_PAIRS:
            return NONE
        num, weights, values, places, num_places, factors, sums, asked, asked_places, num_asked = args
        halves = ir.VectorType(_HALF, 2 * WIDTH)
        last_asked = builder.sub(num_asked, INT(1))

        def find_parts(index: Any) -> list[Any]:
            pair = [builder.add(builder.mul(index, INT(2)), INT(i)) for i in range(2)]
            for j in pair:
                wanted = builder.select(builder.icmp_signed("<", j, last_asked), j, last_asked)
                prefetch(builder, row_at(builder, asked, asked_places, wanted), INT(0))
            one, other = (load(builder, row_at(builder, values, places, j), INT(0), halves) for j in pair)
            return [builder.bitcast(shuffle(builder, one, other, order), PAIRS) for order in _TWO_VALUES]

        def block(count: int) -> None:
            rows, totals = rows_of(builder, sums, count), []
            for i, row in enumerate(rows):
                factor = spread(builder, load(builder, factors, INT(4 * i), FLOAT))
                low, high = (builder.fmul(load(builder, row, column), factor) for column in _HALVES)
                dealt = [shuffle(builder, low, high, order) for order in _DEALT]
                totals.append([cgutils.alloca_once_value(builder, each) for each in dealt])
            num_pairs = builder.udiv(builder.add(num_places, INT(1)), INT(2))
            numba_pairs.add_rows(builder, rows_of(builder, weights, count), num_pairs, find_parts, totals)
            for row, its_totals in zip(rows, totals, strict=True):
                low, high = (builder.load(total) for total in its_totals)
                for column, order in zip(_HALVES, _IN_ORDER, strict=True):
                    store(builder, shuffle(builder, low, high, order), row, column)

        for_count(builder, num, QUERIES, block)
        return NONE

    signature = types.intp, ROWS, *(types.intp,) * 4, ROWS, *(types.intp,) * 3
    return types.none(*signature), generate


def _prefetch_intrinsic(_context: Any, place: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        prefetch(builder, args[0], INT(0))
        return NONE

    return types.none(types.intp), generate


_pack_keys: Any = intrinsic(_pack_keys_intrinsic)
_pack_two_values: Any = intrinsic(_pack_two_values_intrinsic)
_prefetch: Any = intrinsic(_prefetch_intrinsic)
_score_placed: Any = intrinsic(_score_placed_intrinsic)
_accumulate_placed: Any = intrinsic(_accumulate_placed_intrinsic)


@njit
def pack_queries(queries: Any, out: Any) -> None:
    """queries [n, head_dim] in bfloat16; out [n or more, dims] int16 of zeros."""
    for i in range(queries.shape[0]):
        copy_numbers(queries[i].ctypes.data, queries.shape[1], out[i].ctypes.data, 2)


@njit
def pack_keys(keys: int, head_dim: int, places: Any, count: int, out: Any, asked: Any) -> None:
    """Keys at `count` places from the address `keys` on, and at as many more as make a multiple of WIDTH, in
    out [TILE / 16, dims / 2, 16, 2] int16, whose dims from head_dim on are zeros. asked: address, that of
    places and their count of what is asked for meanwhile."""
    asked_keys, asked_places, num_asked = asked
    whole = head_dim // GROUP * GROUP
    for j in range(0, count, WIDTH):
        own = places.ctypes.data + j * places.strides[0]
        others = vector_at(asked_places, j, num_asked)
        part = out[j // WIDTH]
        _pack_keys(keys, own, head_dim, part.ctypes.data, asked_keys, others)
        if whole < head_dim:
            for k in range(WIDTH):
                key = carray(pointer(keys + places[j + k]), head_dim, np.int16)
                for d in range(whole, head_dim):
                    part[d // 2, k, d % 2] = key[d]


@njit
def pack_values(values: int, head_dim: int, places: Any, count: int, out: Any, asked: Any) -> None:
    """Values at `count` places, after an odd one once more that of the last, and zeros up to TILE, in out
    [dims / 16, TILE / 2, 16, 2] int16, whose dims from head_dim on are zeros. As pack_keys else."""
    asked_values, asked_places, num_asked = asked
    places_asked = carray(pointer(asked_places), num_asked, np.int64)
    none, whole, bytes_per_part = np.zeros(head_dim, np.int16), head_dim // WIDTH * WIDTH, out.strides[0]
    for pair in range(TILE // 2):
        one, other = none.ctypes.data, none.ctypes.data
        if 2 * pair < count:
            one, other = values + places[2 * pair], values + places[2 * pair + 1]
        for j in range(2 * pair, min(2 * pair + 2, num_asked)):
            for line in range(0, 2 * head_dim, _LINE):
                _prefetch(asked_values + places_asked[j] + line)
        _pack_two_values(one, other, head_dim, out[0, pair].ctypes.data, bytes_per_part)
        if whole < head_dim:
            of_one = carray(pointer(one), head_dim, np.int16)
            of_other = carray(pointer(other), head_dim, np.int16)
            for d in range(whole, head_dim):
                out[d // WIDTH, pair, d % WIDTH, 0] = of_one[d]
                out[d // WIDTH, pair, d % WIDTH, 1] = of_other[d]


@njit
def score(queries: Any, i: int, num: int, keys: Any, count: int, scores: Any) -> None:
    """scores[k, j] = query i + k . key j for `num` k and `count` j, both as they were packed; what else is
    written to scores [QUERIES, TILE] means nothing."""
    bytes_per_part, num_groups = keys.strides[0], queries.shape[1] // GROUP
    of_queries = queries[i].ctypes.data, queries.strides[0]
    for j in range(0, count, COLUMNS):
        of_scores = scores.ctypes.data + 4 * j, scores.strides[0]
        of_keys = keys[j // WIDTH].ctypes.data
        if HAS_TILES:
            numba_bfloat16_tiles.multiply_block(1, num_groups, of_queries, of_keys, bytes_per_part, of_scores)
        else:
            num_pairs = num_groups * (GROUP // 2)
            numba_pairs.multiply_block(num, num_pairs, of_queries, of_keys, bytes_per_part, 0, of_scores)


@njit
def accumulate(
    weights: Any, packed: Any, values: Any, count: int, factors: Any, sums: Any, i: int, num: int
) -> None:
    """sums[i + k] = factors[i + k] * sums[i + k] + weights[k, j] * value j, for `num` k of up to QUERIES and
    `count` j of a tile, beyond which weights are zeros; values as they were packed. packed [QUERIES, TILE]
    int16: for the weights; sums [i + QUERIES, dims]."""
    for k in range(num):
        copy_numbers(weights[k].ctypes.data, TILE, packed[k].ctypes.data, 2)
    if HAS_TILES:  # which add to QUERIES sums, whatever `num` is, and multiply none
        for k in range(num):
            factor, own = factors[i + k], sums[i + k]
            for d in range(sums.shape[1]):
                own[d] *= factor
        packed[num:] = 0  # so that sums of other queries stay as they are
    of_weights, bytes_per_part = (packed.ctypes.data, packed.strides[0]), values.strides[0]
    for d in range(0, sums.shape[1], COLUMNS):
        of_sums = sums[i].ctypes.data + 4 * d, sums.strides[0]
        of_values = values[d // WIDTH].ctypes.data
        if HAS_TILES:
            numba_bfloat16_tiles.multiply_block(
                0, TILE // GROUP, of_weights, of_values, bytes_per_part, of_sums
            )
        else:
            of_factors, num_pairs = factors.ctypes.data + 4 * i, (count + 1) // 2
            numba_pairs.multiply_block(
                num, num_pairs, of_weights, of_values, bytes_per_part, of_factors, of_sums
            )


@njit
def score_placed(queries: Any, num: int, keys: int, places: Any, count: int, scores: Any, asked: Any) -> None:
    """As pack_keys and score, bit for bit, of queries [num, dims] whose dims are whole groups."""
    asked_keys, asked_places, num_asked = asked
    of_queries = queries.ctypes.data, queries.strides[0]
    for j in range(0, count, WIDTH):
        own = places.ctypes.data + j * places.strides[0]
        others = vector_at(asked_places, j, num_asked)
        of_scores = scores.ctypes.data + 4 * j, scores.strides[0]
        _score_placed(num, of_queries, keys, own, queries.shape[1], of_scores, asked_keys, others)


@njit
def accumulate_placed(
    weights: Any,
    packed: Any,
    values: int,
    places: Any,
    count: int,
    factors: Any,
    sums: Any,
    i: int,
    num: int,
    asked: Any,
) -> None:
    """As pack_values and accumulate, bit for bit, of sums whose dims are whole groups."""
    asked_values, asked_places, num_asked = asked
    for k in range(num):
        copy_numbers(weights[k].ctypes.data, TILE, packed[k].ctypes.data, 2)
    of_weights, of_factors = (packed.ctypes.data, packed.strides[0]), factors.ctypes.data + 4 * i
    for d in range(0, sums.shape[1], GROUP):
        of_sums = sums[i].ctypes.data + 4 * d, sums.strides[0]
        _accumulate_placed(
            *(num, of_weights, values + 2 * d, places.ctypes.data, count, of_factors, of_sums),
            *(asked_values + 2 * d, asked_places, num_asked),
        )
