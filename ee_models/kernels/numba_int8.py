"""Matrix products on a CPU in int8: of tokens, as two terms, with weights that have a scale for each output.

A token is scale * (a + b / 254): a and b are whole numbers of -127 to 127, a the nearest to what it stands
for and b what a leaves. With a alone a small model answers otherwise; with b the error is that of the
weights. Sums of whole numbers have no order, and what follows is rounded element by element: a token's bits
depend on nothing but itself, on any CPU.

A panel holds COLUMNS outputs: their biases, scales and sums of weights, then four inputs after four inputs
the weights [in / 4, COLUMNS, 4]. The CPU multiplies bytes without sign by bytes with one, so that terms are
kept with 128 added, which the sums of weights take away again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

from .numba_vectors import (
    FLOAT,
    INT,
    INT32,
    NONE,
    ROWS,
    VECTOR,
    WIDTH,
    compiles_for,
    for_count,
    largest,
    load,
    prefetch,
    rows_of,
    spread,
    store,
)
from .threads import pointer

_TERMS = 2
TOKENS = 6 if WIDTH == 16 else 3  # whose sums, with what is added to them, fill the CPU's vectors
COLUMNS = 2 * WIDTH
GROUP = 4  # inputs that are multiplied together
MAX_INPUTS = 1 << 17  # of which 127 * 127 add up to less than 2 ** 31
# Bytes of a panel ahead of its groups: bias, scale and sum of each column; of a group; of one of a token's.
HEAD, GROUP_BYTES, TOKEN_GROUP_BYTES = 12 * COLUMNS, GROUP * COLUMNS, _TERMS * GROUP
WHOLE = ir.VectorType(INT32, WIDTH)
# What multiplies bytes and adds up four: instructions for that; pairs of 16 bits; or what LLVM makes of it.
if compiles_for("avx512vnni" if WIDTH == 16 else "avxvnni"):
    DOT = "vnni"
elif compiles_for("avx512bw" if WIDTH == 16 else "avx2"):
    DOT = "pairs"
else:
    DOT = "plain"


def make_panels(weight: Tensor, bias: Tensor) -> Tensor:
    """A weight [out, in] and its bias [out], float32, as panels [out / COLUMNS rounded up, bytes] uint8; the
    largest weight of an output becomes 127."""
    num_outputs, num_inputs = weight.shape
    peak = weight.abs().amax(1, keepdim=True)
    scale = torch.where(peak > 0, (peak / 127).clamp_(min=torch.finfo(torch.float32).tiny), 1.0)
    missing = -num_outputs % COLUMNS
    whole = (weight / scale).round_().clamp_(-127, 127).to(torch.int8)
    whole = F.pad(whole, (0, -num_inputs % GROUP, 0, missing))
    inner = whole.reshape(-1, COLUMNS, whole.shape[1] // GROUP, GROUP).transpose(1, 2)
    columns = (bias, scale[:, 0], whole[:num_outputs].sum(1, dtype=torch.int32))
    head = [F.pad(each, (0, missing)).view(torch.uint8).reshape(len(inner), -1) for each in columns]
    return torch.cat([*head, inner.reshape(len(inner), -1).view(torch.uint8)], 1)


def _dot(builder: Any, total: Any, x: Any, weight: Any) -> None:
    """total [WIDTH] int32, a place in memory, += the products of four bytes of x, without sign, by those of
    weight, with one."""
    before = builder.load(total)
    if DOT == "vnni":
        kind = ir.FunctionType(WHOLE, [WHOLE] * 3)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}"
        after = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [before, x, weight])
    elif DOT == "pairs":
        after = before
        pairs = ir.VectorType(ir.IntType(16), 2 * WIDTH)
        eight = ir.Constant(pairs, [8] * (2 * WIDTH))
        name = "llvm.x86.avx512.pmaddw.d.512" if WIDTH == 16 else "llvm.x86.avx2.pmadd.wd"
        kind = ir.FunctionType(WHOLE, [pairs] * 2)
        add_products = cgutils.get_or_insert_function(builder.module, kind, name)
        x, weight = builder.bitcast(x, pairs), builder.bitcast(weight, pairs)
        of_x = builder.and_(x, ir.Constant(pairs, [255] * (2 * WIDTH))), builder.lshr(x, eight)
        of_weight = builder.ashr(builder.shl(weight, eight), eight), builder.ashr(weight, eight)
        for each, its_weight in zip(of_x, of_weight, strict=True):
            after = builder.add(after, builder.call(add_products, [each, its_weight]))
    else:
        after = before
        for byte in range(GROUP):
            up, down = (ir.Constant(WHOLE, [bits] * WIDTH) for bits in (24 - 8 * byte, 24))
            of_x = builder.lshr(builder.shl(x, up), down)
            after = builder.add(after, builder.mul(of_x, builder.ashr(builder.shl(weight, up), down)))
    builder.store(after, total)


def _multiply_tile_intrinsic(
    _context: Any, num_tokens: Any, terms: Any, scales: Any, num_groups: Any, panel: Any, out: Any, ahead: Any
) -> Any:
    """out[t, :COLUMNS] = bias + scale * (terms[t] . panel) for 1 to TOKENS tokens t. terms and out: ROWS;
    scales and panel: addresses; ahead: ROWS of memory that is asked for, one a group of inputs."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        num_tokens, *inputs = args
        for_count(builder, num_tokens, TOKENS, lambda count: _tile(builder, count, *inputs))
        return NONE

    return types.none(types.intp, ROWS, types.intp, types.intp, types.intp, ROWS, ROWS), generate


def _tile(
    builder: Any, count: int, terms: Any, scales: Any, num_groups: Any, panel: Any, out: Any, ahead: Any
) -> None:
    columns = [INT(4 * WIDTH * i) for i in range(COLUMNS // WIDTH)]
    padded = builder.mul(num_groups, INT(GROUP))
    term_rows = [
        builder.add(row, builder.mul(padded, INT(term)))
        for row in rows_of(builder, terms, count)
        for term in range(_TERMS)
    ]
    zero = ir.Constant(WHOLE, [0] * WIDTH)
    totals = [[cgutils.alloca_once_value(builder, zero) for _ in columns] for _ in term_rows]
    weights = builder.add(panel, INT(HEAD))
    with cgutils.for_range(builder, num_groups) as loop:
        row = builder.add(weights, builder.mul(loop.index, INT(GROUP_BYTES)))
        asked, step = (builder.extract_value(ahead, i) for i in range(2))
        for column in columns:
            prefetch(builder, asked, builder.add(builder.mul(loop.index, step), column))
        parts = [load(builder, row, column, WHOLE) for column in columns]
        for term_row, of_term in zip(term_rows, totals, strict=True):
            offset = builder.mul(loop.index, INT(GROUP))
            alike = spread(builder, load(builder, term_row, offset, INT32))
            for part, total in zip(parts, of_term, strict=True):
                _dot(builder, total, alike, part)
    rows = rows_of(builder, out, count)
    second_unit = ir.Constant(VECTOR, [float(np.float32(1 / 254))] * WIDTH)
    for i, column in enumerate(columns):
        bias, scale = (load(builder, panel, INT(4 * (COLUMNS * k + WIDTH * i))) for k in range(2))
        added = load(builder, panel, INT(4 * (2 * COLUMNS + WIDTH * i)), WHOLE)
        added = builder.shl(added, ir.Constant(WHOLE, [7] * WIDTH))
        for token, out_row in enumerate(rows):
            sums = (builder.load(totals[_TERMS * token + term][i]) for term in range(_TERMS))
            first, second = (builder.sitofp(builder.sub(total, added), VECTOR) for total in sums)
            product = builder.fadd(first, builder.fmul(second, second_unit))
            of_token = spread(builder, load(builder, scales, INT(4 * token), FLOAT))
            product = builder.fmul(builder.fmul(product, of_token), scale)
            store(builder, builder.fadd(product, bias), out_row, column)


multiply_tile: Any = intrinsic(_multiply_tile_intrinsic)

# Added to a float32 of less than 2 ** 22 and taken away again, it leaves the nearest whole number.
ROUNDS = np.float32(1.5 * 2**23)
_LARGEST, _SECOND = np.float32(127), np.float32(254)


@njit(error_model="numpy", nogil=True, cache=True)
def split(x: int, num_inputs: int, terms: int, groups: int) -> Any:
    """The terms [_TERMS, groups * GROUP] uint8, at the address `terms`, of a token [in] at the address x ->
    its scale, NaN where it has a number that is not finite."""
    padded = groups * GROUP
    numbers = carray(pointer(x), num_inputs, np.float32)
    first = carray(pointer(terms), padded, np.uint8)
    second = carray(pointer(terms + padded), padded, np.uint8)
    peak = largest(x, num_inputs)
    inverse = _LARGEST / peak if peak > 0 else np.float32(0)
    is_finite = peak < np.inf
    for i in range(num_inputs):
        is_finite &= numbers[i] == numbers[i]
        number = numbers[i] * inverse
        whole = (number + ROUNDS) - ROUNDS
        rest = ((number - whole) * _SECOND + ROUNDS) - ROUNDS
        first[i] = np.uint8(np.int32(whole) + 128)
        second[i] = np.uint8(np.int32(rest) + 128)
    for i in range(num_inputs, padded):
        first[i] = second[i] = 128
    return peak / _LARGEST if is_finite else np.float32(np.nan)
