"""What attention does with a tile of positions whose keys and values are in int8 (`cache.int8_kv`): queries
and weights are rounded to whole numbers, too, and all products and their sums are of whole numbers, which
have no order; scales multiply them afterwards.

A query is mixed as keys are, and has a scale of its own. The weights of a query in a tile have one, too,
once they are multiplied by the scales of their values; they are not negative, so that they have 255 steps.
Keys and values are read where they lie, group by group: a tile is the addresses of its groups.

Memory is slow beside these sums: line by line as a tile is read, the same line of what is read next is asked
for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from cache.int8_kv import FOUR, GROUP, MULTIPLE

from ..kernel_cache import njit
from ..kernels.numba_int8 import as_numbers, dot
from ..kernels.numba_int8_kv import LINE, num_mixed
from ..kernels.numba_math import ONE
from ..kernels.numba_rounding import WHOLE, find_scale, keep_largest, mix_numbers, narrow, to_whole
from ..kernels.numba_vectors import (
    FLOAT,
    INT,
    INT32,
    NONE,
    ROWS,
    VECTOR,
    WIDTH,
    add_product,
    for_count,
    load,
    prefetch,
    rows_of,
    spread,
    store,
)
from ..kernels.threads import pointer
from .numba_products import TILE

QUERIES = 6  # that are taken together, at most
GROUPS = TILE // GROUP
_KEYS = 2 * WIDTH  # whose sums, times queries, stay in the CPU's vectors
_PARTS = 4 if WIDTH == 16 else 2  # vectors of dimensions whose sums do
_STEPS = 255  # of a weight
_FOURS = GROUP // FOUR


def _score_intrinsic(
    _context: Any,
    num: Any,
    queries: Any,
    begins: Any,
    query_scales: Any,
    parts: Any,
    head_dim: Any,
    scores: Any,
    asked: Any,
) -> Any:
    """scores[i, :_KEYS] = queries[i] . keys for 1 to QUERIES queries i; WIDTH keys from each of two addresses
    in groups on, `parts`. begins: -128 times the sum of each query's numbers; asked: two addresses whose
    lines are asked for meanwhile. queries and scores are ROWS, the others addresses."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        num, queries, begins, query_scales, parts, head_dim, scores, asked = args
        own, others = ([builder.extract_value(each, i) for i in range(2)] for each in (parts, asked))
        of_scales = builder.mul(head_dim, INT(GROUP))
        upper = ir.Constant(WHOLE, [0x80808080 - (1 << 32)] * WIDTH)

        def block(count: int) -> None:
            rows, totals = rows_of(builder, queries, count), []
            for i in range(count):
                begin = spread(builder, load(builder, begins, INT(4 * i), INT32))
                totals.append([cgutils.alloca_once_value(builder, begin) for _ in own])
            with cgutils.for_range(builder, builder.udiv(head_dim, INT(FOUR))) as loop:
                offset = builder.mul(loop.index, INT(LINE))
                for other in others:
                    prefetch(builder, other, offset)
                # 128 is added to numbers with sign, as whose bits these are.
                found = [builder.xor(load(builder, part, offset, WHOLE), upper) for part in own]
                of_four = builder.mul(loop.index, INT(FOUR))
                for row, of_query in zip(rows, totals, strict=True):
                    numbers = as_numbers(builder, spread(builder, load(builder, row, of_four, INT32)))
                    for part, total in zip(found, of_query, strict=True):
                        dot(builder, total, part, numbers)
            for other in others:
                prefetch(builder, other, of_scales)
            scales = [load(builder, part, of_scales) for part in own]
            for i, (row, of_query) in enumerate(zip(rows_of(builder, scores, count), totals, strict=True)):
                of_query_scale = spread(builder, load(builder, query_scales, INT(4 * i), FLOAT))
                for j, (scale, total) in enumerate(zip(scales, of_query, strict=True)):
                    number = builder.sitofp(builder.load(total), VECTOR)
                    found_score = builder.fmul(builder.fmul(scale, of_query_scale), number)
                    store(builder, found_score, row, INT(4 * WIDTH * j))

        for_count(builder, num, QUERIES, block)
        return NONE

    return types.none(types.intp, ROWS, *(types.intp,) * 2, ROWS, types.intp, ROWS, ROWS), generate


def _narrow_weights_intrinsic(
    _context: Any, weights: Any, groups: Any, of_head: Any, head_dim: Any, count: Any, to: Any
) -> Any:
    """Writes TILE weights at the address `weights`, times the scales of their values, as whole numbers to the
    address `to`, 0 from `count` on -> their scale. groups: the address of those of groups; of_head: where a
    head begins."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        weights, groups, of_head, head_dim, count, to = args
        largest = cgutils.alloca_once_value(builder, ir.Constant(WHOLE, [0] * WIDTH))
        of_scales = builder.add(of_head, builder.mul(head_dim, INT(GROUP)))
        limit, zero = spread(builder, builder.trunc(count, INT32)), ir.Constant(VECTOR, [0.0] * WIDTH)
        parts = []
        for at in range(0, TILE, WIDTH):
            group = load(builder, groups, INT(8 * (at // GROUP)), INT)
            scale = load(builder, builder.add(group, of_scales), INT(4 * (at % GROUP)))
            part = builder.fmul(load(builder, weights, INT(4 * at)), scale)
            # What lies past the last position may have any scale, NaN too.
            place = ir.Constant(WHOLE, list(range(at, at + WIDTH)))
            parts.append(builder.select(builder.icmp_signed("<", place, limit), part, zero))
            keep_largest(builder, largest, parts[-1])
        scale, inverse, is_some = find_scale(builder, largest, _STEPS)
        inverse, is_some = spread(builder, inverse), spread(builder, is_some)
        for i, part in enumerate(parts):
            whole = to_whole(builder, part, inverse, is_some)
            store(builder, builder.trunc(whole, ir.VectorType(ir.IntType(8), WIDTH)), to, INT(WIDTH * i))
        return scale

    return types.float32(*(types.intp,) * 6), generate


def _accumulate_intrinsic(
    _context: Any,
    num: Any,
    weights: Any,
    weight_scales: Any,
    groups: Any,
    num_groups: Any,
    offset: Any,
    factors: Any,
    sums: Any,
    num_parts: Any,
    asked: Any,
    asked_offset: Any,
) -> Any:
    """sums[i] = factors[i] * sums[i] + weight_scales[i] * weights[i] . values, for 1 to QUERIES queries i and
    num_parts times WIDTH dimensions, _PARTS or 1, from `offset` on in num_groups groups, whose addresses are
    at the address `groups`; asks for the lines at other addresses meanwhile. weights and sums are ROWS."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        num, weights, weight_scales, groups, num_groups, offset, *rest = args
        factors, sums, num_parts, asked, asked_offset = rest
        zero = ir.Constant(WHOLE, [0] * WIDTH)

        def block(count: int, parts: int) -> None:
            rows = rows_of(builder, weights, count)
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(parts)] for _ in rows]
            starts = [4 * WIDTH * i // LINE * LINE * _FOURS + 4 * WIDTH * i % LINE for i in range(parts)]
            with cgutils.for_range(builder, num_groups) as loop:
                at = builder.mul(loop.index, INT(8))
                own = builder.add(load(builder, groups, at, INT), offset)
                other = builder.add(load(builder, asked, at, INT), asked_offset)
                with cgutils.for_range(builder, INT(_FOURS)) as four:
                    line = builder.mul(four.index, INT(LINE))
                    for start in sorted({start // LINE * LINE for start in starts}):
                        prefetch(builder, other, builder.add(line, INT(start)))
                    found = [
                        as_numbers(builder, load(builder, own, builder.add(line, INT(start)), WHOLE))
                        for start in starts
                    ]
                    of_four = builder.add(
                        builder.mul(loop.index, INT(GROUP)), builder.mul(four.index, INT(FOUR))
                    )
                    for row, of_query in zip(rows, totals, strict=True):
                        weight = spread(builder, load(builder, row, of_four, INT32))
                        for numbers, total in zip(found, of_query, strict=True):
                            dot(builder, total, weight, numbers)
            for i, (row, of_query) in enumerate(zip(rows_of(builder, sums, count), totals, strict=True)):
                factor, scale = (
                    spread(builder, load(builder, each, INT(4 * i), FLOAT))
                    for each in (factors, weight_scales)
                )
                for j, total in enumerate(of_query):
                    column = INT(4 * WIDTH * j)
                    shrunk = builder.fmul(load(builder, row, column), factor)
                    its_sum = cgutils.alloca_once_value(builder, shrunk)
                    add_product(builder, its_sum, scale, builder.sitofp(builder.load(total), VECTOR))
                    store(builder, builder.load(its_sum), row, column)

        def blocks(parts: int) -> None:
            for_count(builder, num, QUERIES, lambda count: block(count, parts))

        if _PARTS * WIDTH == MULTIPLE:  # which any head has
            blocks(_PARTS)
            return NONE
        with builder.if_else(builder.icmp_unsigned("==", num_parts, INT(_PARTS))) as (wide, one):
            with wide:
                blocks(_PARTS)
            with one:
                blocks(1)
        return NONE

    signature = types.intp, ROWS, *(types.intp,) * 5, ROWS, *(types.intp,) * 3
    return types.none(*signature), generate


_score: Any = intrinsic(_score_intrinsic)
_narrow_weights: Any = intrinsic(_narrow_weights_intrinsic)
_accumulate: Any = intrinsic(_accumulate_intrinsic)


@njit
def round_queries(queries: Any, out: Any, scales: Any, begins: Any) -> None:
    """queries [n, head_dim], mixed where they are, as whole numbers out [n, head_dim] int8; scales [n], which
    take back that keys are mixed, too; begins [n] int32: -128 times their sums."""
    head_dim = queries.shape[1]
    factor = ONE / np.float32(num_mixed(head_dim))
    for i in range(queries.shape[0]):
        x = queries.ctypes.data + 4 * i * head_dim
        mix_numbers(x, head_dim)
        scales[i] = narrow(x, head_dim, out.ctypes.data + i * head_dim) * factor
        total = 0
        for d in range(head_dim):
            total += out[i, d]
        begins[i] = -128 * total


@njit
def score(
    queries: Any,
    begins: Any,
    query_scales: Any,
    i: int,
    num: int,
    groups: Any,
    of_head: int,
    count: int,
    scores: Any,
    asked: Any,
) -> None:
    """scores[k, j] = query i + k . key j for `num` k and `count` j of the groups at addresses [GROUPS], from
    `of_head` on; what else is written to scores [QUERIES, TILE] means nothing. asked: the address of those of
    other groups, and where a head begins there, of what is asked for meanwhile."""
    head_dim, (at_others, of_other) = queries.shape[1], asked
    others = carray(pointer(at_others), GROUPS, np.int64)
    of_queries = queries.ctypes.data + i * head_dim, head_dim
    of_begins, of_query_scales = begins.ctypes.data + 4 * i, query_scales.ctypes.data + 4 * i
    for j in range(0, count, _KEYS):
        one, two = j // GROUP, (j + WIDTH) // GROUP
        in_group = 4 * (WIDTH % GROUP)  # of the second WIDTH, where a group has both
        parts = groups[one] + of_head, groups[two] + of_head + in_group
        asked_parts = others[one] + of_other, others[two] + of_other
        of_scores = scores.ctypes.data + 4 * j, scores.strides[0]
        _score(num, of_queries, of_begins, of_query_scales, parts, head_dim, of_scores, asked_parts)


@njit
def accumulate(
    weights: Any,
    rounded: Any,
    weight_scales: Any,
    groups: Any,
    of_head: int,
    count: int,
    seen: Any,
    factors: Any,
    sums: Any,
    i: int,
    num: int,
    asked: Any,
) -> None:
    """sums[i + k] = factors[i + k] * sums[i + k] + weights[k, j] * value j, for `num` k of up to QUERIES and
    seen[k] j, at most `count`, of the groups, as of score. rounded [QUERIES, TILE] uint8 and weight_scales
    [QUERIES]: for the weights."""
    head_dim, (others, of_other) = sums.shape[1], asked
    for k in range(num):
        of_weights, to = weights.ctypes.data + 4 * k * TILE, rounded.ctypes.data + k * TILE
        weight_scales[k] = _narrow_weights(of_weights, groups.ctypes.data, of_head, head_dim, seen[k], to)
    num_groups, num_parts = (count + GROUP - 1) // GROUP, 1 if head_dim % (_PARTS * WIDTH) else _PARTS
    for d in range(0, head_dim, num_parts * WIDTH):
        of_sums = sums.ctypes.data + 4 * (i * head_dim + d), 4 * head_dim
        at = d // MULTIPLE * _FOURS * LINE + d % MULTIPLE * FOUR
        _accumulate(
            *(num, (rounded.ctypes.data, TILE), weight_scales.ctypes.data, groups.ctypes.data, num_groups),
            *(of_head + at, factors.ctypes.data + 4 * i, of_sums, num_parts),
            *(others, of_other + d // MULTIPLE * _FOURS * LINE),
        )
