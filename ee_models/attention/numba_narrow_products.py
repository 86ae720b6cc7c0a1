"""What attention does with a tile of positions on a CPU that has products in bfloat16 (`kernels.numba_tiles`,
`kernels.numba_pairs`): keys and values in bfloat16 are laid out as these read them, scores and weighted sums
are products of theirs.

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
from ..kernels import numba_pairs, numba_tiles
from ..kernels.numba_bfloat16 import COLUMNS, GROUP
from ..kernels.numba_tiles import HAS_TILES
from ..kernels.numba_vectors import INT, NONE, ROWS, WIDTH, copy_numbers, load, prefetch, store
from ..kernels.threads import pointer
from .numba_products import PAIRS, TILE, row_of_slot, transposed

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "cache": True, "nogil": True}
_LINE, _HALF = 64, ir.IntType(16)
_HAS_PRODUCTS = HAS_TILES or numba_pairs.HAS_PAIRS
QUERIES = numba_tiles.TILE if HAS_TILES else numba_pairs.BLOCK  # that are taken together, at most


def _pack_keys_intrinsic(
    _context: Any, keys: Any, slots: Any, num_dims: Any, out: Any, asked: Any, asked_slots: Any
) -> Any:
    """out[p, j] = numbers 2 p and 2 p + 1 of keys[slots[j]] for WIDTH slots j, whole groups of GROUP numbers
    of them; asks for asked[asked_slots[j]] meanwhile. keys and asked are ROWS, the others addresses."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if not _HAS_PRODUCTS:
            return NONE
        keys, slots, num_dims, out, asked, asked_slots = args
        key_rows = [row_of_slot(builder, keys, slots, INT(j)) for j in range(WIDTH)]
        asked_rows = [row_of_slot(builder, asked, asked_slots, INT(j)) for j in range(WIDTH)]
        with cgutils.for_range(builder, builder.udiv(num_dims, INT(GROUP))) as loop:
            offset = builder.mul(loop.index, INT(_LINE))
            for row in asked_rows:
                prefetch(builder, row, offset)
            columns = transposed(builder, [load(builder, row, offset, PAIRS) for row in key_rows])
            to = builder.add(out, builder.mul(loop.index, INT(_LINE * WIDTH)))
            for p, column in enumerate(columns):
                store(builder, column, to, INT(_LINE * p))
        return NONE

    return types.none(ROWS, *(types.intp,) * 3, ROWS, types.intp), generate


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


def _prefetch_intrinsic(_context: Any, place: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        prefetch(builder, args[0], INT(0))
        return NONE

    return types.none(types.intp), generate


_pack_keys: Any = intrinsic(_pack_keys_intrinsic)
_pack_two_values: Any = intrinsic(_pack_two_values_intrinsic)
_prefetch: Any = intrinsic(_prefetch_intrinsic)


@njit(**_OPTIONS)
def pack_queries(queries: Any, out: Any) -> None:
    """queries [n, head_dim] in bfloat16; out [n or more, dims] int16 of zeros."""
    for i in range(queries.shape[0]):
        copy_numbers(queries[i].ctypes.data, queries.shape[1], out[i].ctypes.data, 2)


@njit(**_OPTIONS)
def pack_keys(keys: Any, head_dim: int, slots: Any, count: int, out: Any, asked: Any) -> None:
    """Keys of `count` slots, and of as many more as make a multiple of WIDTH, in out [TILE / 16, dims / 2,
    16, 2] int16, whose dims from head_dim on are zeros; keys: ROWS of one head. asked: keys, slots and their
    count of what is asked for meanwhile."""
    asked_keys, asked_slots, num_asked = asked
    whole, (first, stride) = head_dim // GROUP * GROUP, keys
    for j in range(0, count, WIDTH):
        own = slots.ctypes.data + j * slots.strides[0]
        others = asked_slots.ctypes.data + min(j, (num_asked - 1) // WIDTH * WIDTH) * slots.strides[0]
        part = out[j // WIDTH]
        _pack_keys(keys, own, head_dim, part.ctypes.data, asked_keys, others)
        if whole < head_dim:
            for k in range(WIDTH):
                key = carray(pointer(first + slots[j + k] * stride), head_dim, np.int16)
                for d in range(whole, head_dim):
                    part[d // 2, k, d % 2] = key[d]


@njit(**_OPTIONS)
def pack_values(values: Any, head_dim: int, slots: Any, count: int, out: Any, asked: Any) -> None:
    """Values of `count` slots, and zeros up to TILE, in out [dims / 16, TILE / 2, 16, 2] int16, whose dims
    from head_dim on are zeros. As pack_keys else."""
    (first, stride), ((asked_values, asked_stride), asked_slots, num_asked) = values, asked
    none, whole, bytes_per_part = np.zeros(head_dim, np.int16), head_dim // WIDTH * WIDTH, out.strides[0]
    for pair in range(TILE // 2):
        one, other = none.ctypes.data, none.ctypes.data
        if 2 * pair < count:
            one = first + slots[2 * pair] * stride
        if 2 * pair + 1 < count:
            other = first + slots[2 * pair + 1] * stride
        for j in range(2 * pair, min(2 * pair + 2, num_asked)):
            for line in range(0, 2 * head_dim, _LINE):
                _prefetch(asked_values + asked_slots[j] * asked_stride + line)
        _pack_two_values(one, other, head_dim, out[0, pair].ctypes.data, bytes_per_part)
        if whole < head_dim:
            of_one = carray(pointer(one), head_dim, np.int16)
            of_other = carray(pointer(other), head_dim, np.int16)
            for d in range(whole, head_dim):
                out[d // WIDTH, pair, d % WIDTH, 0] = of_one[d]
                out[d // WIDTH, pair, d % WIDTH, 1] = of_other[d]


@njit(**_OPTIONS)
def score(queries: Any, i: int, num: int, keys: Any, count: int, scores: Any) -> None:
    """scores[k, j] = query i + k . key j for `num` k and `count` j, both as they were packed; what else is
    written to scores [QUERIES, TILE] means nothing."""
    bytes_per_part, num_groups = keys.strides[0], queries.shape[1] // GROUP
    of_queries = queries[i].ctypes.data, queries.strides[0]
    for j in range(0, count, COLUMNS):
        of_scores = scores.ctypes.data + 4 * j, scores.strides[0]
        of_keys = keys[j // WIDTH].ctypes.data
        if HAS_TILES:
            numba_tiles.multiply_block(1, num_groups, of_queries, of_keys, bytes_per_part, of_scores)
        else:
            num_pairs = num_groups * (GROUP // 2)
            numba_pairs.multiply_block(num, num_pairs, of_queries, of_keys, bytes_per_part, 0, of_scores)


@njit(**_OPTIONS)
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
            numba_tiles.multiply_block(0, TILE // GROUP, of_weights, of_values, bytes_per_part, of_sums)
        else:
            of_factors, num_pairs = factors.ctypes.data + 4 * i, (count + 1) // 2
            numba_pairs.multiply_block(
                num, num_pairs, of_weights, of_values, bytes_per_part, of_factors, of_sums
            )
