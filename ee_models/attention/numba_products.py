"""The two products of attention for numba kernels: scores q . k, and sums of weighted values. Keys and values
are read where they lie, at the addresses of their slots.

Each is a block of QUERIES queries whose sums stay in the vectors of the CPU, which LLVM does not find by
itself in loops over arrays. How a sum is ordered depends on the width of a vector alone, never on what else
is in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# float32 in a vector. Where a CPU has wider ones than this, two of them are as good.
WIDTH = 16 if binding.get_host_cpu_features().get("avx512f") else 8
QUERIES = WIDTH // 4  # a block's sums then fill as many vectors as hide the time that one addition takes
KEYS = WIDTH  # of a block of scores: what is stored by parts is slow to be loaded whole
COLUMNS = 32  # of a block of sums

_INT, _FLOAT, _INT32 = ir.IntType(64), ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_NONE = ir.Constant(ir.IntType(8).as_pointer(), None)  # numba's None
_ROWS = types.UniTuple(types.intp, 2)  # of a matrix: the address of its first, and bytes from one to the next


def _address(builder: Any, base: Any, offset: Any, to: Any) -> Any:
    """base + offset bytes, as a pointer to values of type `to`."""
    return builder.inttoptr(builder.add(base, offset), to.as_pointer())


def _load(builder: Any, base: Any, offset: Any, what: Any = _VECTOR) -> Any:
    return builder.load(_address(builder, base, offset, what), align=4)


def _shuffle(builder: Any, x: Any, y: Any, order: Sequence[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_INT32, len(order)), list(order)))


def _add_product(builder: Any, total: Any, x: Any, y: Any) -> None:
    """total += x * y, in one rounding where the CPU can; total is a place in memory that LLVM turns into a
    register."""
    product = builder.fmul(x, y, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


def _halvings() -> list[tuple[list[int], list[int]]]:
    """Orders of the elements of two vectors x and y that are added to each other, step by step: in the end
    element i is the sum of all elements of the i-th of WIDTH vectors."""
    quads = [list(range(start, start + 4)) for start in range(0, 2 * WIDTH, 4)]
    pairs = list(zip(quads[: WIDTH // 4], quads[WIDTH // 4 :], strict=True))
    steps = [
        ([e for x, y in pairs for e in (x[0], y[0], x[1], y[1])],) * 2,
        ([e for x, y in pairs for e in (x[0], x[1], y[0], y[1])],) * 2,
    ]
    halvings = [(low, [e + 2 for e in high]) for low, high in steps]
    for _ in range((WIDTH // 4).bit_length() - 1):
        halvings.append(
            ([e for quad in quads[0::2] for e in quad], [e for quad in quads[1::2] for e in quad])
        )
    return halvings


def _sum_elements(builder: Any, vectors: Sequence[Any]) -> Any:
    """The sums of the elements of each of WIDTH vectors, as one vector."""
    for low, high in _halvings():
        vectors = [
            builder.fadd(_shuffle(builder, x, y, low), _shuffle(builder, x, y, high))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _rows(builder: Any, matrix: Any, count: int) -> list[Any]:
    """The addresses of the first `count` rows of a matrix."""
    first, stride = (builder.extract_value(matrix, i) for i in range(2))
    return [builder.add(first, builder.mul(stride, _INT(i))) for i in range(count)]


def _row_of_slot(builder: Any, matrix: Any, slots: Any, place: Any) -> Any:
    """The address of the matrix's row slots[place]."""
    slot = _load(builder, slots, builder.mul(place, _INT(8)), _INT)
    first, stride = (builder.extract_value(matrix, i) for i in range(2))
    return builder.add(first, builder.mul(slot, stride))


def _dots_of_four(
    builder: Any, query_rows: list[Any], keys: Any, slots: Any, first: int, num_dims: Any
) -> Any:
    """Dots of QUERIES queries and the keys of slots first to first + 3, query by query, as one vector."""
    key_rows = [_row_of_slot(builder, keys, slots, _INT(first + j)) for j in range(4)]
    zero = ir.Constant(_VECTOR, [0.0] * WIDTH)
    totals = [[cgutils.alloca_once_value(builder, zero) for _ in key_rows] for _ in query_rows]
    with cgutils.for_range(builder, builder.udiv(num_dims, _INT(WIDTH))) as loop:
        offset = builder.mul(loop.index, _INT(4 * WIDTH))
        parts = [_load(builder, row, offset) for row in key_rows]
        for row, of_query in zip(query_rows, totals, strict=True):
            query = _load(builder, row, offset)
            for part, total in zip(parts, of_query, strict=True):
                _add_product(builder, total, query, part)
    return _sum_elements(builder, [builder.load(total) for of_query in totals for total in of_query])


def _regroup(builder: Any, vectors: list[Any]) -> list[Any]:
    """Vectors of the i-th four elements of each of QUERIES vectors."""
    quads = [_shuffle(builder, v, v, range(i, i + 4)) for v in vectors for i in range(0, WIDTH, 4)]
    grouped = []
    for i in range(QUERIES):
        parts = quads[i::QUERIES]
        while len(parts) > 1:
            size = 2 * parts[0].type.count
            parts = [
                _shuffle(builder, a, b, range(size)) for a, b in zip(parts[::2], parts[1::2], strict=True)
            ]
        grouped.append(parts[0])
    return grouped


def _dots_intrinsic(_context: Any, queries: Any, keys: Any, slots: Any, num_dims: Any, scores: Any) -> Any:
    """scores[i, j] = queries[i] . keys[slots[j]] for QUERIES i and KEYS j, of the first num_dims // WIDTH *
    WIDTH dimensions. Matrices are (address, bytes from row to row) of float32; slots an address of int64."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        queries, keys, slots, num_dims, scores = args
        query_rows = _rows(builder, queries, QUERIES)
        found = [_dots_of_four(builder, query_rows, keys, slots, j, num_dims) for j in range(0, KEYS, 4)]
        for row, of_query in zip(_rows(builder, scores, QUERIES), _regroup(builder, found), strict=True):
            builder.store(of_query, _address(builder, row, _INT(0), _VECTOR), align=4)
        return _NONE

    return types.none(_ROWS, _ROWS, types.intp, types.intp, _ROWS), generate


def _add_weighted_intrinsic(
    _context: Any, weights: Any, values: Any, slots: Any, num_slots: Any, sums: Any
) -> Any:
    """sums[i, :COLUMNS] += weights[i, j] * values[slots[j], :COLUMNS] for QUERIES i and, one after another,
    num_slots j; arguments as in dots."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        weights, values, slots, num_slots, sums = args
        columns = [_INT(4 * WIDTH * i) for i in range(COLUMNS // WIDTH)]
        weight_rows, sum_rows = _rows(builder, weights, QUERIES), _rows(builder, sums, QUERIES)
        totals = [
            [cgutils.alloca_once_value(builder, _load(builder, row, column)) for column in columns]
            for row in sum_rows
        ]
        with cgutils.for_range(builder, num_slots) as loop:
            value_row = _row_of_slot(builder, values, slots, loop.index)
            parts = [_load(builder, value_row, column) for column in columns]
            for row, of_query in zip(weight_rows, totals, strict=True):
                weight = _load(builder, row, builder.mul(loop.index, _INT(4)), _FLOAT)
                alone = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), weight, _INT32(0))
                spread = _shuffle(builder, alone, alone, [0] * WIDTH)
                for part, total in zip(parts, of_query, strict=True):
                    _add_product(builder, total, spread, part)
        for row, of_query in zip(sum_rows, totals, strict=True):
            for column, total in zip(columns, of_query, strict=True):
                builder.store(builder.load(total), _address(builder, row, column, _VECTOR), align=4)
        return _NONE

    return types.none(_ROWS, _ROWS, types.intp, types.intp, _ROWS), generate


dots: Any = intrinsic(_dots_intrinsic)
add_weighted: Any = intrinsic(_add_weighted_intrinsic)
