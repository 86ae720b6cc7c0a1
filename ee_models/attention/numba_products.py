"""What attention does with a tile, for numba kernels: keys transposed, scores q . k, the step of a softmax,
sums of weighted values. Keys and values are read where they lie, by the places of their slots, in bytes.

Each is a block of up to QUERIES queries whose sums stay in the vectors of the CPU, which LLVM does not find
by itself in loops over arrays. A score adds up dimension after dimension, a weighted sum slot after slot: no
sum depends on what else is in the block. Scores of many keys lie side by side in a vector, so that keys are
transposed first, tile by tile; that takes no longer than adding up a vector's elements for each score.

Memory is slow beside these few sums. What is read next is asked for while a tile's keys and values are read,
line by line: asked for all at once, it would fill what the CPU can wait for, and the sums would wait too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..kernel_cache import njit
from ..kernels.numba_math import exp
from ..kernels.numba_vectors import (
    FLOAT,
    INT,
    INT32,
    NONE,
    ROWS,
    VECTOR,
    WIDTH,
    add_rows,
    for_count,
    for_size,
    load,
    load_number,
    prefetch,
    rows_of,
    shuffle,
    spread,
    store,
)

QUERIES = 12 if WIDTH == 16 else 6  # of a block, whose sums fill the CPU's vectors
COLUMNS = 2 * WIDTH  # scores or dimensions of a block
TILE = 64  # positions whose scores are there at a time
FAR_BELOW = -1e30  # any score; -inf would turn the difference of two peaks into NaN
PAIRS = ir.VectorType(INT32, WIDTH)  # of bfloat16, side by side
_LINE = 64  # bytes that memory is asked for at once


def row_at(builder: Any, base: Any, places: Any, j: Any) -> Any:
    """The address of the key or value at base + places[j]."""
    return builder.add(base, load(builder, places, builder.mul(j, INT(8)), INT))


def transposed(builder: Any, rows: Sequence[Any], offset: Any) -> list[Any]:
    """Vector i has the i-th four bytes of sixteen, from `offset` on, of WIDTH rows, which are addresses.
    Those of every fourth row are loaded side by side, and shuffled within these lanes, as CPUs do fastest."""

    def shuffled(vectors: Sequence[Any], *places: Sequence[int]) -> list[Any]:
        """Two vectors after two, with these places of each lane, those of the second from WIDTH on."""
        orders = [[lane + place for lane in range(0, WIDTH, 4) for place in each] for each in places]
        two_by_two = (vectors[:2], vectors[2:])
        return [shuffle(builder, x, y, order) for x, y in two_by_two for order in orders]

    lanes = ir.VectorType(INT32, 4)
    parts = [[load(builder, row, offset, lanes) for row in rows[i::4]] for i in range(4)]
    low, high, other_low, other_high = shuffled(
        [_side_by_side(builder, each) for each in parts],
        (0, WIDTH, 1, WIDTH + 1),
        (2, WIDTH + 2, 3, WIDTH + 3),
    )
    pairs = (0, 1, WIDTH, WIDTH + 1), (2, 3, WIDTH + 2, WIDTH + 3)
    return shuffled([low, other_low, high, other_high], *pairs)


def _side_by_side(builder: Any, vectors: list[Any]) -> Any:
    while len(vectors) > 1:
        size = 2 * vectors[0].type.count
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [shuffle(builder, x, y, range(size)) for x, y in pairs]
    return vectors[0]


def _transpose_intrinsic(
    _context: Any, keys: Any, size: Any, places: Any, num_dims: Any, out: Any, asked: Any, asked_places: Any
) -> Any:
    """out[d, j] = number d of the key at keys + places[j], for WIDTH j; asks for that at asked +
    asked_places[j] meanwhile. out: ROWS; the others are addresses, places of int64; size: bytes of a key's
    numbers, as for_size has them."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        keys, size, places, num_dims, out, asked, asked_places = args
        key_rows = [row_at(builder, keys, places, INT(j)) for j in range(WIDTH)]
        asked_rows = [row_at(builder, asked, asked_places, INT(j)) for j in range(WIDTH)]
        first, stride = (builder.extract_value(out, i) for i in range(2))

        def columns_at(size: int, offset: Any) -> list[Any]:
            """Dimensions side by side in 4 * WIDTH bytes of the keys. Two of bfloat16 lie in the place of one
            of float32, so that they are shuffled together and come apart afterwards."""
            for row in asked_rows:
                prefetch(builder, row, offset)
            starts = [builder.add(offset, INT(at)) for at in range(0, 4 * WIDTH, 16)]
            pairs = [pair for start in starts for pair in transposed(builder, key_rows, start)]
            if size == 4:
                return [builder.bitcast(each, VECTOR) for each in pairs]
            upper, mask = (ir.Constant(PAIRS, [bits] * WIDTH) for bits in (16, 0xFFFF0000 - (1 << 32)))
            apart = [each for pair in pairs for each in (builder.shl(pair, upper), builder.and_(pair, mask))]
            return [builder.bitcast(each, VECTOR) for each in apart]

        def copy(size: int) -> None:
            at_once = 4 * WIDTH // size
            whole = builder.udiv(num_dims, INT(at_once))
            with cgutils.for_range(builder, whole) as loop:
                to = builder.add(first, builder.mul(builder.mul(loop.index, INT(at_once)), stride))
                offset = builder.mul(loop.index, INT(4 * WIDTH))
                for d, column in enumerate(columns_at(size, offset)):
                    store(builder, column, to, builder.mul(stride, INT(d)))
            rest = builder.mul(whole, INT(at_once))
            with cgutils.for_range(builder, num_dims, start=rest, intp=INT) as loop:
                to = builder.add(first, builder.mul(loop.index, stride))
                for j, row in enumerate(key_rows):
                    number = load_number(builder, size, row, builder.mul(loop.index, INT(size)), FLOAT)
                    store(builder, number, to, INT(4 * j))

        for_size(builder, size, copy)
        return NONE

    return types.none(*(types.intp,) * 4, ROWS, *(types.intp,) * 2), generate


def _score_intrinsic(_context: Any, num: Any, queries: Any, keys: Any, num_dims: Any, scores: Any) -> Any:
    """scores[i, :COLUMNS] = queries[i] . keys[:, :COLUMNS] for 1 to QUERIES queries i. keys: of a tile,
    transposed. Matrices are ROWS."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        num, queries, keys, num_dims, scores = args
        first, stride = (builder.extract_value(keys, i) for i in range(2))

        def block(count: int) -> None:
            zero = [ir.Constant(VECTOR, [0.0] * WIDTH)] * (COLUMNS // WIDTH)
            add_rows(
                builder,
                rows_of(builder, queries, count),
                num_dims,
                lambda index: builder.add(first, builder.mul(index, stride)),
                [zero] * count,
                rows_of(builder, scores, count),
            )

        for_count(builder, num, QUERIES, block)
        return NONE

    return types.none(types.intp, ROWS, ROWS, types.intp, ROWS), generate


def _add_weighted_intrinsic(
    _context: Any,
    num: Any,
    weights: Any,
    values: Any,
    size: Any,
    places: Any,
    count: Any,
    factors: Any,
    sums: Any,
    asked: Any,
    asked_places: Any,
    num_asked: Any,
) -> Any:
    """sums[i, :COLUMNS] = factors[i] * sums[i, :COLUMNS] + weights[i, j] * COLUMNS numbers at values +
    places[j], for `num` queries i and, one after another, `count` j; asks for those at asked +
    asked_places[j] meanwhile, for as many j as there are of num_asked. values are numbers of `size` bytes;
    weights and sums are ROWS, factors an address, the others as above."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        num, weights, values, size, places, num_places, factors, sums, asked, asked_places, num_asked = args
        last_asked = builder.sub(num_asked, INT(1))
        columns = [INT(4 * WIDTH * i) for i in range(COLUMNS // WIDTH)]

        def block(count: int, size: int) -> None:
            begin, sum_rows = [], rows_of(builder, sums, count)
            for i, row in enumerate(sum_rows):
                factor = spread(builder, load(builder, factors, INT(4 * i), FLOAT))
                begin.append([builder.fmul(load(builder, row, column), factor) for column in columns])

            def find_row(index: Any) -> Any:
                is_one = builder.icmp_signed("<", index, last_asked)
                wanted = builder.select(is_one, index, last_asked)
                wanted = row_at(builder, asked, asked_places, wanted)
                for line in range(0, size * COLUMNS, _LINE):
                    prefetch(builder, wanted, INT(line))
                return row_at(builder, values, places, index)

            add_rows(
                builder,
                rows_of(builder, weights, count),
                num_places,
                find_row,
                begin,
                sum_rows,
                size,
            )

        for_size(builder, size, lambda size: for_count(builder, num, QUERIES, lambda num: block(num, size)))
        return NONE

    signature = types.intp, ROWS, *(types.intp,) * 5, ROWS, *(types.intp,) * 3
    return types.none(*signature), generate


def _reduce(builder: Any, vectors: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """All elements of the vectors, an even number of them, as one number: halves with halves."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [combine(x, y) for x, y in zip(vectors[:half], vectors[half:], strict=True)]
    vector, size = vectors[0], WIDTH
    while size > 1:
        size //= 2
        vector = combine(*(shuffle(builder, vector, vector, range(at, at + size)) for at in (0, size)))
    return builder.extract_element(vector, INT32(0))


def _weigh_intrinsic(_context: Any, scores: Any, count: Any, peak: Any, total: Any, factor: Any) -> Any:
    """Turns the TILE scores of a query into weights exp(score - new peak), 0 from `count` on, and brings its
    peak, the total of its weights, and the factor that its earlier sums shrink by up to date. Addresses."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        scores, count, peak, total, factor = args
        offsets = [INT(4 * j) for j in range(0, TILE, WIDTH)]
        whole = ir.VectorType(INT32, WIDTH)
        limit = spread(builder, builder.trunc(count, INT32))
        far_below, zero = (ir.Constant(VECTOR, [number] * WIDTH) for number in (FAR_BELOW, 0.0))

        def larger(x: Any, y: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        is_seen, found = [], []
        for i, offset in enumerate(offsets):
            place = ir.Constant(whole, list(range(i * WIDTH, (i + 1) * WIDTH)))
            is_seen.append(builder.icmp_signed("<", place, limit))
            found.append(builder.select(is_seen[-1], load(builder, scores, offset), far_below))
        before = load(builder, peak, INT(0), FLOAT)
        after = larger(_reduce(builder, found, larger), before)
        store(builder, after, peak, INT(0))
        shrink, alike = exp(builder, builder.fsub(before, after)), spread(builder, after)
        store(builder, shrink, factor, INT(0))
        weights = []
        for seen, offset, of_tile in zip(is_seen, offsets, found, strict=True):
            weights.append(builder.select(seen, exp(builder, builder.fsub(of_tile, alike)), zero))
            store(builder, weights[-1], scores, offset)
        earlier = builder.fmul(load(builder, total, INT(0), FLOAT), shrink)
        store(builder, builder.fadd(earlier, _reduce(builder, weights, builder.fadd)), total, INT(0))
        return NONE

    return types.none(*(types.intp,) * 5), generate


transpose: Any = intrinsic(_transpose_intrinsic)
score: Any = intrinsic(_score_intrinsic)
add_weighted: Any = intrinsic(_add_weighted_intrinsic)
weigh: Any = intrinsic(_weigh_intrinsic)


@njit
def vector_at(places: int, j: int, count: int) -> int:
    """The address of places from j on, of those at the address `places`; where j is past `count` of them, of
    the last vector of these."""
    return places + 8 * min(j, (count - 1) // WIDTH * WIDTH)


@njit
def query_at(i: int, num_per_head: int, group: int, first: int, first_head: int) -> Any:
    """The token and the head of a unit's i-th query."""
    kv_head, of_head = first_head + i // num_per_head, i % num_per_head
    return first + of_head // group, kv_head * group + of_head % group
