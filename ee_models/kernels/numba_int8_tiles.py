"""Products in int8 (`numba_int8`) by a CPU's matrix tiles: 16 tokens in the time of one, with the same bits.

Of each group of inputs a product of tiles comes out as whole numbers, which have their scales in vectors. All
groups come out first: while stores are on their way, tiles are filled several times as slowly.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import numba_tiles
from .numba_int8 import BLOCK, COLUMNS, HEAD, NUMBER_BYTES
from .numba_rounding import WHOLE
from .numba_tiles import SUMS, TILE, TOKENS, WEIGHTS, add_products, ask, empty, fill, zero
from .numba_vectors import (
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
    load_half,
    spread,
    store,
)

HAS_TILES = numba_tiles.HAS_TILES and NUMBER_BYTES == 1  # of a token, as tiles read them
SPACE = 4 * (2 * TILE + 1) * COLUMNS  # bytes for the sums of a group and its scales
_SUMS_BYTES, _TILE_BYTES = 4 * COLUMNS, 4 * TILE * COLUMNS  # of a token, of a tile's tokens
_HALVES = [INT(4 * WIDTH * i) for i in range(2)]


def _multiply_tiles_intrinsic(
    _context: Any,
    count: Any,
    num_tokens: Any,
    terms: Any,
    stride: Any,
    num_groups: Any,
    group: Any,
    panel: Any,
    space: Any,
    out: Any,
    to: Any,
    ahead: Any,
) -> Any:
    """out[t, :COLUMNS] = bias + terms[t] . panel for the num_tokens tokens t of each of `count` tiles, one or
    two of them, whose terms and outputs begin at two addresses each, with `stride` and `to` bytes from a
    token to the next. group: inputs of one; space: the address of SPACE bytes a group; ahead: memory that is
    asked for, a lot a block of inputs, as `numba_tiles.ask` has it."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if HAS_TILES:
            count, *inputs = args
            for_count(builder, count, 2, lambda count: _tiles(builder, count, *inputs))
        return NONE

    return types.none(*(types.intp,) * 2, ROWS, *(types.intp,) * 5, ROWS, types.intp, ROWS), generate


def _tiles(
    builder: Any,
    count: int,
    num_tokens: Any,
    terms: Any,
    stride: Any,
    num_groups: Any,
    group: Any,
    panel: Any,
    space: Any,
    out: Any,
    to: Any,
    ahead: Any,
) -> None:
    rows, outputs = ([builder.extract_value(each, i) for i in range(count)] for each in (terms, out))
    scales = builder.add(space, builder.mul(num_groups, INT(2 * _TILE_BYTES)))
    _multiply_groups(builder, rows, stride, num_groups, group, panel, (space, scales), ahead)
    bias, unit = (
        [load(builder, panel, builder.add(half, INT(4 * COLUMNS * i))) for half in _HALVES] for i in range(2)
    )
    of_groups = builder.mul(num_groups, group)
    for i, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        sums = builder.add(space, INT(i * _TILE_BYTES))
        with cgutils.for_range(builder, num_tokens) as loop:
            own_sums = builder.add(sums, builder.mul(loop.index, INT(_SUMS_BYTES)))
            its_groups = builder.add(builder.add(row, builder.mul(loop.index, stride)), of_groups)
            totals = _add_groups(builder, num_groups, own_sums, its_groups, scales)
            target = builder.add(output, builder.mul(loop.index, to))
            for total, half, its_unit, its_bias in zip(totals, _HALVES, unit, bias, strict=True):
                store(builder, builder.fadd(builder.fmul(total, its_unit), its_bias), target, half)


def _multiply_groups(
    builder: Any,
    rows: Any,
    stride: Any,
    num_groups: Any,
    group: Any,
    panel: Any,
    to: tuple[Any, Any],
    ahead: Any,
) -> None:
    """Leaves at the first address of `to` the sums of each group [2 TILE, COLUMNS] int32, at the second its
    scales [COLUMNS] float32."""
    num_blocks = builder.udiv(group, INT(BLOCK))
    bytes_of_group = builder.mul(builder.add(group, INT(2)), INT(COLUMNS))
    with cgutils.for_range(builder, num_groups) as loop:
        begin = builder.add(builder.add(panel, INT(HEAD)), builder.mul(loop.index, bytes_of_group))
        sums = builder.add(to[0], builder.mul(loop.index, INT(2 * _TILE_BYTES)))
        scales = builder.add(to[1], builder.mul(loop.index, INT(_SUMS_BYTES)))
        for i, half in enumerate(_HALVES):
            store(builder, load_half(builder, begin, INT(2 * WIDTH * i)), scales, half)
        for tile in (tile for tiles in SUMS[: len(rows)] for tile in tiles):
            zero(builder, tile)
        first = builder.mul(loop.index, num_blocks)
        with cgutils.for_range(builder, num_blocks) as block:
            number = builder.add(first, block.index)
            ask(builder, ahead, number)
            of_block = builder.mul(block.index, INT(BLOCK * COLUMNS))
            weights = builder.add(begin, builder.add(of_block, INT(2 * COLUMNS)))
            for tile, half in zip(WEIGHTS, _HALVES, strict=True):
                fill(builder, tile, builder.add(weights, half), INT(4 * COLUMNS))
            for row, tokens, tiles in zip(rows, TOKENS, SUMS, strict=False):
                fill(builder, tokens, builder.add(row, builder.mul(number, INT(BLOCK))), stride)
                for tile, weight in zip(tiles, WEIGHTS, strict=True):
                    add_products(builder, "tdpbsud", tile, tokens, weight)
        for i, tiles in enumerate(SUMS[: len(rows)]):
            for tile, half in zip(tiles, _HALVES, strict=True):
                to_tile = builder.add(sums, builder.add(half, INT(i * _TILE_BYTES)))
                empty(builder, tile, to_tile, INT(_SUMS_BYTES))


def _add_groups(builder: Any, num_groups: Any, sums: Any, groups: Any, scales: Any) -> list[Any]:
    """A token's sums times its groups' scales and the weights', one after another: a vector a half."""
    totals = [cgutils.alloca_once(builder, VECTOR) for _ in _HALVES]
    for total in totals:
        builder.store(ir.Constant(VECTOR, [0.0] * WIDTH), total)
    with cgutils.for_range(builder, num_groups) as loop:
        of_group = builder.mul(loop.index, INT(8))
        of_x = spread(builder, load(builder, groups, of_group, FLOAT))
        begin = spread(builder, load(builder, groups, builder.add(of_group, INT(4)), INT32))
        own_sums = builder.add(sums, builder.mul(loop.index, INT(2 * _TILE_BYTES)))
        of_columns = builder.add(scales, builder.mul(loop.index, INT(_SUMS_BYTES)))
        for total, half in zip(totals, _HALVES, strict=True):
            number = builder.sitofp(builder.add(load(builder, own_sums, half, WHOLE), begin), VECTOR)
            add_product(builder, total, builder.fmul(load(builder, of_columns, half), of_x), number)
    return [builder.load(total) for total in totals]


multiply_tiles: Any = intrinsic(_multiply_tiles_intrinsic)
