"""Products in bfloat16 (`numba_bfloat16`) by a CPU's matrix tiles.

Inputs are multiplied two by two and added to a sum in float32, group after group, in an order that is the
CPU's own and the same for each token of a tile: a token's bits depend on nothing but itself. A tile takes 16
tokens in the time of one: as long as memory is what a pass waits for, further tokens are free.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .numba_bfloat16 import COLUMNS, GROUP, GROUP_BYTES, HEAD
from .numba_tiles import HAS_TILES, SUMS, TILE, TOKENS, WEIGHTS, add_products, ask, empty, fill, zero
from .numba_vectors import INT, LINE, NONE, ROWS, for_count


def _multiply_tiles_intrinsic(
    _context: Any,
    count: Any,
    terms: Any,
    stride: Any,
    num_groups: Any,
    panel: Any,
    out: Any,
    to: Any,
    ahead: Any,
) -> Any:
    """out[t, :COLUMNS] = bias + terms[t] . panel for the tokens t of `count` tiles, one or two of them, whose
    terms and outputs begin at two addresses each, with `stride` and `to` bytes from a token to the next;
    ahead: memory that is asked for, a lot a group, as `numba_tiles.ask` has it."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if HAS_TILES:
            count, *inputs = args
            for_count(builder, count, 2, lambda count: _tiles(builder, count, *inputs))
        return NONE

    return types.none(types.intp, ROWS, *(types.intp,) * 3, ROWS, types.intp, ROWS), generate


def _tiles(
    builder: Any,
    count: int,
    terms: Any,
    stride: Any,
    num_groups: Any,
    panel: Any,
    out: Any,
    to: Any,
    ahead: Any,
) -> None:
    halves = [INT(4 * TILE * i) for i in range(2)]
    for sums in SUMS[:count]:
        for tile, half in zip(sums, halves, strict=True):
            fill(builder, tile, builder.add(panel, half), INT(0))  # every row: the biases
    groups = builder.add(panel, INT(HEAD))
    with cgutils.for_range(builder, num_groups) as loop:
        group = builder.add(groups, builder.mul(loop.index, INT(GROUP_BYTES)))
        ask(builder, ahead, loop.index)
        for weights, half in zip(WEIGHTS, halves, strict=True):
            fill(builder, weights, builder.add(group, half), INT(4 * COLUMNS))
        of_group = builder.mul(loop.index, INT(2 * GROUP))
        for i in range(count):
            fill(builder, TOKENS[i], builder.add(builder.extract_value(terms, i), of_group), stride)
            for tile, weights in zip(SUMS[i], WEIGHTS, strict=True):
                add_products(builder, "tdpbf16ps", tile, TOKENS[i], weights)
    for i in range(count):
        for tile, half in zip(SUMS[i], halves, strict=True):
            empty(builder, tile, builder.add(builder.extract_value(out, i), half), to)


def _multiply_block_intrinsic(
    _context: Any, begins: Any, num_groups: Any, a: Any, b: Any, half: Any, out: Any
) -> Any:
    """out[:TILE, :COLUMNS] += a[:TILE] . b, with nothing to begin with if `begins`, of num_groups groups of
    GROUP numbers of bfloat16: those of a, ROWS, in a line each; of b those for TILE outputs lie together,
    [num_groups, GROUP / 2, TILE, 2], at the address b and `half` bytes later. out: ROWS, float32."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if HAS_TILES:
            _block(builder, *args)
        return NONE

    return types.none(types.intp, types.intp, ROWS, types.intp, types.intp, ROWS), generate


def _block(builder: Any, begins: Any, num_groups: Any, a: Any, b: Any, half: Any, out: Any) -> None:
    (first, stride), (to, bytes_per_out) = (
        [builder.extract_value(each, i) for i in range(2)] for each in (a, out)
    )
    halves, sums = (INT(0), half), SUMS[0]
    outputs = to, builder.add(to, INT(4 * TILE))
    with builder.if_else(builder.icmp_signed("!=", begins, INT(0))) as (from_nothing, from_sums):
        with from_nothing:
            for tile in sums:
                zero(builder, tile)
        with from_sums:
            for tile, output in zip(sums, outputs, strict=True):
                fill(builder, tile, output, bytes_per_out)
    with cgutils.for_range(builder, num_groups) as loop:
        of_a = builder.add(first, builder.mul(loop.index, INT(LINE)))
        of_b = builder.add(b, builder.mul(loop.index, INT(2 * GROUP * TILE)))
        fill(builder, TOKENS[0], of_a, stride)
        for tile, other, offset in zip(sums, WEIGHTS, halves, strict=True):
            fill(builder, other, builder.add(of_b, offset), INT(LINE))
            add_products(builder, "tdpbf16ps", tile, TOKENS[0], other)
    for tile, output in zip(sums, outputs, strict=True):
        empty(builder, tile, output, bytes_per_out)


multiply_tiles: Any = intrinsic(_multiply_tiles_intrinsic)
multiply_block: Any = intrinsic(_multiply_block_intrinsic)
