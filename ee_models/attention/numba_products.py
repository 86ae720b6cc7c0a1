"""The two products of attention for numba kernels: scores q . k, and sums of weighted values. Keys and values
are read where they lie, at the addresses of their slots.

Each is a block of QUERIES queries whose sums stay in the vectors of the CPU, which LLVM does not find by
itself in loops over arrays. How a sum is ordered depends on the width of a vector alone, never on what else
is in the block.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..kernels.numba_vectors import (
    FLOAT,
    INT,
    NONE,
    ROWS,
    VECTOR,
    WIDTH,
    add_product,
    load,
    rows_of,
    shuffle,
    spread,
    store,
    sum_elements,
)

QUERIES = WIDTH // 4  # a block's sums then fill as many vectors as hide the time that one addition takes
KEYS = WIDTH  # of a block of scores: what is stored by parts is slow to be loaded whole
COLUMNS = 32  # of a block of sums


def _row_of_slot(builder: Any, matrix: Any, slots: Any, place: Any) -> Any:
    """The address of the matrix's row slots[place]."""
    slot = load(builder, slots, builder.mul(place, INT(8)), INT)
    first, stride = (builder.extract_value(matrix, i) for i in range(2))
    return builder.add(first, builder.mul(slot, stride))


def _dots_of_four(
    builder: Any, query_rows: list[Any], keys: Any, slots: Any, first: int, num_dims: Any
) -> Any:
    """Dots of QUERIES queries and the keys of slots first to first + 3, query by query, as one vector."""
    key_rows = [_row_of_slot(builder, keys, slots, INT(first + j)) for j in range(4)]
    zero = ir.Constant(VECTOR, [0.0] * WIDTH)
    totals = [[cgutils.alloca_once_value(builder, zero) for _ in key_rows] for _ in query_rows]
    with cgutils.for_range(builder, builder.udiv(num_dims, INT(WIDTH))) as loop:
        offset = builder.mul(loop.index, INT(4 * WIDTH))
        parts = [load(builder, row, offset) for row in key_rows]
        for row, of_query in zip(query_rows, totals, strict=True):
            query = load(builder, row, offset)
            for part, total in zip(parts, of_query, strict=True):
                add_product(builder, total, query, part)
    return sum_elements(builder, [builder.load(total) for of_query in totals for total in of_query])


def _regroup(builder: Any, vectors: list[Any]) -> list[Any]:
    """Vectors of the i-th four elements of each of QUERIES vectors."""
    quads = [shuffle(builder, v, v, range(i, i + 4)) for v in vectors for i in range(0, WIDTH, 4)]
    grouped = []
    for i in range(QUERIES):
        parts = quads[i::QUERIES]
        while len(parts) > 1:
            size = 2 * parts[0].type.count
            parts = [
                shuffle(builder, a, b, range(size)) for a, b in zip(parts[::2], parts[1::2], strict=True)
            ]
        grouped.append(parts[0])
    return grouped


def _dots_intrinsic(_context: Any, queries: Any, keys: Any, slots: Any, num_dims: Any, scores: Any) -> Any:
    """scores[i, j] = queries[i] . keys[slots[j]] for QUERIES i and KEYS j, of the first num_dims // WIDTH *
    WIDTH dimensions. Matrices are (address, bytes from row to row) of float32; slots an address of int64."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        queries, keys, slots, num_dims, scores = args
        query_rows = rows_of(builder, queries, QUERIES)
        found = [_dots_of_four(builder, query_rows, keys, slots, j, num_dims) for j in range(0, KEYS, 4)]
        for row, of_query in zip(rows_of(builder, scores, QUERIES), _regroup(builder, found), strict=True):
            store(builder, of_query, row, INT(0))
        return NONE

    return types.none(ROWS, ROWS, types.intp, types.intp, ROWS), generate


def _add_weighted_intrinsic(
    _context: Any, weights: Any, values: Any, slots: Any, num_slots: Any, sums: Any
) -> Any:
    """sums[i, :COLUMNS] += weights[i, j] * values[slots[j], :COLUMNS] for QUERIES i and, one after another,
    num_slots j; arguments as in dots."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        weights, values, slots, num_slots, sums = args
        columns = [INT(4 * WIDTH * i) for i in range(COLUMNS // WIDTH)]
        weight_rows, sum_rows = rows_of(builder, weights, QUERIES), rows_of(builder, sums, QUERIES)
        totals = [
            [cgutils.alloca_once_value(builder, load(builder, row, column)) for column in columns]
            for row in sum_rows
        ]
        with cgutils.for_range(builder, num_slots) as loop:
            value_row = _row_of_slot(builder, values, slots, loop.index)
            parts = [load(builder, value_row, column) for column in columns]
            for row, of_query in zip(weight_rows, totals, strict=True):
                weight = load(builder, row, builder.mul(loop.index, INT(4)), FLOAT)
                alike = spread(builder, weight)
                for part, total in zip(parts, of_query, strict=True):
                    add_product(builder, total, alike, part)
        for row, of_query in zip(sum_rows, totals, strict=True):
            for column, total in zip(columns, of_query, strict=True):
                store(builder, builder.load(total), row, column)
        return NONE

    return types.none(ROWS, ROWS, types.intp, types.intp, ROWS), generate


dots: Any = intrinsic(_dots_intrinsic)
add_weighted: Any = intrinsic(_add_weighted_intrinsic)
