"""Matrix products on a CPU, float32: x [tokens, in] times a weight that lies in panels.

A panel holds COLUMNS outputs, input by input [in, COLUMNS], so that a product reads the weight once, from
front to back. A weight whose numbers are all numbers of bfloat16, as most models are given out, lies in half
of the bytes: a product of few tokens takes as long as it takes to read them, and its bits are the same.

Of up to TOKENS tokens the sums of a panel stay in vectors. An output is the bias and then weight * x, input
after input: its bits depend on nothing but its own token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

from ..kernel_cache import Kernel, njit
from .numba_vectors import (
    INT,
    NONE,
    ROWS,
    WIDTH,
    add_rows,
    for_count,
    for_size,
    load,
    prefetch,
    rows_of,
)
from .threads import pointer

TOKENS = 12 if WIDTH == 16 else 6  # whose sums, with what is added to them, fill the CPU's vectors
COLUMNS = 2 * WIDTH
# Bytes of a weight that are asked for before they are multiplied, since a CPU that multiplies for many tokens
# looks too little ahead by itself. With them 12 tokens take no longer than one.
_AHEAD = 4096


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] as panels [out / COLUMNS rounded up, in, COLUMNS], filled with zeros; in bfloat16
    if that holds all of its numbers."""
    weight = weight.bfloat16() if _fits_bfloat16(weight) else weight
    num_outputs, num_inputs = weight.shape
    missing = -num_outputs % COLUMNS
    padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight  # pad copies even then
    return padded.reshape(-1, COLUMNS, num_inputs).transpose(1, 2).contiguous()


def _fits_bfloat16(weight: Tensor) -> bool:
    # Where it does not fit, the first few rows nearly always tell.
    return all(torch.equal(part.bfloat16().to(part.dtype), part) for part in (weight[:8], weight))


def pad_bias(bias: Tensor | None, weight: Tensor) -> Tensor:
    """A bias [out] of a weight, or zeros, as panels have it."""
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    return F.pad(bias, (0, -weight.shape[0] % COLUMNS)).contiguous()


def _multiply_tile_intrinsic(
    _context: Any, num_tokens: Any, x: Any, num_inputs: Any, panel: Any, size: Any, bias: Any, out: Any
) -> Any:
    """out[t, :COLUMNS] = bias + x[t] . panel for 1 to TOKENS tokens t. x and out are ROWS, panel, of numbers
    of `size` bytes as for_size has them, and bias addresses."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        num_tokens, x, num_inputs, panel, size, bias, out = args

        def tiles(size: int) -> None:
            for_count(
                builder,
                num_tokens,
                TOKENS,
                lambda count: _tile(builder, count, x, num_inputs, panel, size, bias, out),
            )

        for_size(builder, size, tiles)
        return NONE

    return types.none(types.intp, ROWS, *(types.intp,) * 4, ROWS), generate


def _tile(
    builder: Any, count: int, x: Any, num_inputs: Any, panel: Any, size: int, bias: Any, out: Any
) -> None:
    begin = [load(builder, bias, INT(4 * WIDTH * i)) for i in range(COLUMNS // WIDTH)]

    def find_row(index: Any) -> Any:
        row = builder.add(panel, builder.mul(index, INT(size * COLUMNS)))
        for line in range(0, size * COLUMNS, 4 * WIDTH):
            prefetch(builder, row, INT(line + _AHEAD))
        return row

    x_rows, out_rows = rows_of(builder, x, count), rows_of(builder, out, count)
    add_rows(builder, x_rows, num_inputs, find_row, [begin] * count, out_rows, size)


_multiply_tile: Any = intrinsic(_multiply_tile_intrinsic)


@njit
def copy_tile(tile: Any, num_tokens: int, columns: int, out: int, bytes_per_out: int) -> None:
    """The first columns of tile [tokens, COLUMNS] to rows at the address `out`."""
    for token in range(num_tokens):
        row = carray(pointer(out + token * bytes_per_out), columns, np.float32)
        for column in range(columns):
            row[column] = tile[token, column]


@Kernel
def multiply(
    x: int,
    num_tokens: int,
    num_inputs: int,
    panels: int,
    size: int,
    bias: int,
    out: int,
    num_outputs: int,
    share: int,
    num_shares: int,
) -> None:
    """out [tokens, out] = bias + x [tokens, in] . weight, of one share of the panels; all by address. size:
    bytes of a panel's numbers."""
    num_panels = (num_outputs + COLUMNS - 1) // COLUMNS
    bytes_per_x, bytes_per_out = 4 * num_inputs, 4 * num_outputs
    num_tiles = (num_tokens + TOKENS - 1) // TOKENS
    for number in range(share * num_panels // num_shares, (share + 1) * num_panels // num_shares):
        panel, its_bias = panels + number * num_inputs * size * COLUMNS, bias + number * 4 * COLUMNS
        columns = min(COLUMNS, num_outputs - number * COLUMNS)
        first = 0
        for tile in range(num_tiles):
            count = (num_tokens - first) // (num_tiles - tile)  # tiles as alike as can be
            rows = x + first * bytes_per_x, bytes_per_x
            to = out + first * bytes_per_out + number * 4 * COLUMNS
            if columns == COLUMNS:
                _multiply_tile(count, rows, num_inputs, panel, size, its_bias, (to, bytes_per_out))
            else:  # what is past the last output must not be written over the next token's first ones
                whole = np.empty((TOKENS, COLUMNS), np.float32)
                to_whole = whole.ctypes.data, 4 * COLUMNS
                _multiply_tile(count, rows, num_inputs, panel, size, its_bias, to_whole)
                copy_tile(whole, count, columns, to, bytes_per_out)
            first += count


call_multiply = multiply.caller
