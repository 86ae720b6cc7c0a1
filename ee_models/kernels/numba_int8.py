"""Matrix products on a CPU in int8: of tokens and of weights, with a scale for each GROUP of inputs.

Of a token, GROUP inputs are scale * a, of an output's weights scale * w, with whole numbers a and w of -127
to 127. Sums over a group are of whole numbers, which float32 holds as they are; both scales multiply them,
and groups are added one after another: a token's bits depend on nothing but itself.

A group loses little, since no number of another one widens its steps: with one scale for a whole token, a
small model answers otherwise, as a few of its inputs are some ten times as large as the rest.

A panel holds COLUMNS outputs: their biases and units; then, group after group, their scales in units, in
float16 as GGUF files of 8 bits have them, and four inputs after four inputs the weights [GROUP / 4, COLUMNS,
4]. The CPU multiplies bytes without sign by bytes with one, so that weights are kept with 128 added, which a
token's own sums take away again: it has its a, then for each group its scale and -128 times the sum of a.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

from ..kernel_cache import njit
from .numba_vectors import (
    FLOAT,
    INT,
    INT32,
    NONE,
    ROWS,
    VECTOR,
    WIDTH,
    add_product,
    compiles_for,
    for_count,
    load,
    load_half,
    prefetch,
    rows_of,
    spread,
    store,
)
from .threads import pointer

TOKENS = 4  # whose sums, those of a group beside those of all, stay in the CPU's vectors
COLUMNS = 2 * WIDTH
GROUP = 32  # inputs that share a scale
_FOUR = 4  # inputs that are multiplied together
# Bytes of a panel ahead of its groups: bias and unit of each column; and of a group.
HEAD, GROUP_BYTES = 8 * COLUMNS, (2 + GROUP) * COLUMNS
WHOLE = ir.VectorType(INT32, WIDTH)
# What multiplies bytes and adds up four: instructions for that; pairs of 16 bits; or what LLVM makes of it.
if compiles_for("avx512vnni" if WIDTH == 16 else "avxvnni"):
    DOT = "vnni"
elif compiles_for("avx512bw" if WIDTH == 16 else "avx2"):
    DOT = "pairs"
else:
    DOT = "plain"
# Bytes of a token's whole numbers. Pairs of 16 bits are made once a token: it meets thousands of weights.
NUMBER_BYTES = 2 if DOT == "pairs" else 1


def make_panels(weight: Tensor, bias: Tensor) -> Tensor:
    """A weight [out, in] and its bias [out], float32, as panels [out / COLUMNS rounded up, bytes] uint8; the
    largest weight of a group becomes 127. The unit of an output is a power of two, so that float16 holds its
    scales whatever their size."""
    num_outputs, num_inputs = weight.shape
    missing = -num_outputs % COLUMNS
    groups = F.pad(weight, (0, -num_inputs % GROUP, 0, missing)).view(num_outputs + missing, -1, GROUP)
    peak = groups.abs().amax(2)
    exponent = torch.frexp(peak.amax(1)).exponent - 7  # the largest scale of an output is about 1
    unit = torch.ldexp(torch.ones(len(exponent)), exponent.clamp(min=-100))
    scale = (peak / unit[:, None] / 127).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    whole = ((groups / unit[:, None, None]) * inverse[:, :, None]).round_().clamp_(-127, 127)
    fours = (whole + 128).to(torch.uint8).view(-1, COLUMNS, scale.shape[1], GROUP // _FOUR, _FOUR)
    scales = scale.view(-1, COLUMNS, scale.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
    inner = torch.cat([scales, fours.permute(0, 2, 3, 1, 4).flatten(2)], 2)
    head = [each.view(torch.uint8).view(len(inner), -1) for each in (F.pad(bias, (0, missing)), unit)]
    return torch.cat([*head, inner.flatten(1)], 1)


def _dot(builder: Any, total: Any, weight: Any, x: Sequence[Any]) -> None:
    """total [WIDTH] int32, a place in memory, += the products of four bytes of weight, without sign, by those
    of x, with one; x may be two pairs of 16 bits: the first and third number, the second and fourth."""
    before = builder.load(total)
    if DOT == "vnni":
        kind = ir.FunctionType(WHOLE, [WHOLE] * 3)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}"
        after = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [before, weight, *x])
    elif DOT == "pairs":
        after = before
        pairs = ir.VectorType(ir.IntType(16), 2 * WIDTH)
        eight = ir.Constant(pairs, [8] * (2 * WIDTH))
        name = "llvm.x86.avx512.pmaddw.d.512" if WIDTH == 16 else "llvm.x86.avx2.pmadd.wd"
        kind = ir.FunctionType(WHOLE, [pairs] * 2)
        add_products = cgutils.get_or_insert_function(builder.module, kind, name)
        weight = builder.bitcast(weight, pairs)
        of_weight = builder.and_(weight, ir.Constant(pairs, [255] * (2 * WIDTH))), builder.lshr(weight, eight)
        for each, its_x in zip(of_weight, x, strict=True):
            after = builder.add(after, builder.call(add_products, [each, builder.bitcast(its_x, pairs)]))
    else:
        after = before
        for byte in range(_FOUR):
            up, down = (ir.Constant(WHOLE, [bits] * WIDTH) for bits in (24 - 8 * byte, 24))
            of_weight = builder.lshr(builder.shl(weight, up), down)
            after = builder.add(after, builder.mul(of_weight, builder.ashr(builder.shl(x[0], up), down)))
    builder.store(after, total)


def _multiply_tile_intrinsic(
    _context: Any, num_tokens: Any, terms: Any, num_groups: Any, panel: Any, out: Any, ahead: Any
) -> Any:
    """out[t, :COLUMNS] = bias + terms[t] . panel for 1 to TOKENS tokens t. terms and out: ROWS; panel: an
    address; ahead: ROWS of memory that is asked for, one a group of inputs."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        num_tokens, *inputs = args
        for_count(builder, num_tokens, TOKENS, lambda count: _tile(builder, count, *inputs))
        return NONE

    return types.none(types.intp, ROWS, types.intp, types.intp, ROWS, ROWS), generate


def _tile(builder: Any, count: int, terms: Any, num_groups: Any, panel: Any, out: Any, ahead: Any) -> None:
    columns = [INT(4 * WIDTH * i) for i in range(COLUMNS // WIDTH)]
    rows, of_groups = rows_of(builder, terms, count), builder.mul(num_groups, INT(GROUP * NUMBER_BYTES))
    asked, step = (builder.extract_value(ahead, i) for i in range(2))
    part_of_step = builder.udiv(step, INT(GROUP // _FOUR))
    zero = ir.Constant(VECTOR, [0.0] * WIDTH)
    totals = [[cgutils.alloca_once_value(builder, zero) for _ in columns] for _ in rows]
    sums = [[cgutils.alloca_once(builder, WHOLE) for _ in columns] for _ in rows]
    with cgutils.for_range(builder, num_groups) as loop:
        group = builder.add(builder.add(panel, INT(HEAD)), builder.mul(loop.index, INT(GROUP_BYTES)))
        of_group = builder.add(of_groups, builder.mul(loop.index, INT(8)))
        for row, of_token in zip(rows, sums, strict=True):
            begin = spread(builder, load(builder, row, builder.add(of_group, INT(4)), INT32))
            for total in of_token:
                builder.store(begin, total)
        first = builder.mul(loop.index, INT(GROUP * NUMBER_BYTES))
        before = builder.mul(loop.index, step)
        with _for_fours(builder) as four:
            weights = builder.add(
                group, builder.add(builder.mul(four, INT(_FOUR * COLUMNS)), INT(2 * COLUMNS))
            )
            wanted = builder.add(before, builder.mul(four, part_of_step))
            for column in columns:
                prefetch(builder, asked, builder.add(wanted, column))
            parts = [load(builder, weights, column, WHOLE) for column in columns]
            of_four = builder.add(first, builder.mul(four, INT(_FOUR * NUMBER_BYTES)))
            for row, of_token in zip(rows, sums, strict=True):
                places = [builder.add(of_four, INT(at)) for at in range(0, _FOUR * NUMBER_BYTES, 4)]
                alike = [spread(builder, load(builder, row, place, INT32)) for place in places]
                for part, total in zip(parts, of_token, strict=True):
                    _dot(builder, total, part, alike)
        scales = [load_half(builder, group, INT(2 * WIDTH * i)) for i in range(len(columns))]
        for row, of_token, its_totals in zip(rows, sums, totals, strict=True):
            of_x = spread(builder, load(builder, row, of_group, FLOAT))
            for scale, whole, total in zip(scales, of_token, its_totals, strict=True):
                number = builder.sitofp(builder.load(whole), VECTOR)
                add_product(builder, total, builder.fmul(scale, of_x), number)
    for i, column in enumerate(columns):
        bias, unit = (load(builder, panel, INT(4 * (COLUMNS * k + WIDTH * i))) for k in range(2))
        for row, its_totals in zip(rows_of(builder, out, count), totals, strict=True):
            product = builder.fmul(builder.load(its_totals[i]), unit)
            store(builder, builder.fadd(product, bias), row, column)


@contextmanager
def _for_fours(builder: Any) -> Iterator[Any]:
    """Code for each four inputs of a group; gives which. Where a product is one instruction LLVM may write
    all turns out. Else it is not told their number: it would work through one token after another, and keep
    the weights of a group in memory meanwhile, for want of registers."""
    times = INT(GROUP // _FOUR)
    if DOT != "vnni":
        times = builder.asm(ir.FunctionType(INT, [INT]), "", "=r,0", [times], side_effect=False)
    with cgutils.for_range(builder, times) as loop:
        yield loop.index


multiply_tile: Any = intrinsic(_multiply_tile_intrinsic)

# Added to a float32 of less than 2 ** 22 and taken away again, it leaves the nearest whole number.
ROUNDS = np.float32(1.5 * 2**23)
_INFINITE = 0x7F800000  # bits of a float32
_SMALLEST = np.float32(1e-30)  # peak of a group that is more than zeros: 127 / peak must have a place, too


def _split_group_intrinsic(_context: Any, x: Any, to: Any, of_group: Any) -> Any:
    """The whole numbers [GROUP], at the address `to`, of GROUP numbers at the address x; at `of_group`
    their scale, NaN where one of them is not finite, and -128 times their sum."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        x, to, of_group = args
        parts = [load(builder, x, INT(4 * WIDTH * i)) for i in range(GROUP // WIDTH)]
        mask = ir.Constant(WHOLE, [0x7FFFFFFF] * WIDTH)
        sizes = [builder.and_(builder.bitcast(part, WHOLE), mask) for part in parts]
        peak = sizes[0]  # the order of sizes is that of their bits, NaN above all
        for size in sizes[1:]:
            peak = builder.select(builder.icmp_signed(">", size, peak), size, peak)
        peak = _reduce(builder, "smax", peak)
        is_finite = builder.icmp_signed("<", peak, INT32(_INFINITE))
        number = builder.bitcast(peak, FLOAT)
        is_more = builder.fcmp_ordered(">", number, FLOAT(_SMALLEST))
        is_some = builder.and_(is_finite, is_more)
        inverse = builder.select(is_some, builder.fdiv(FLOAT(127.0), number), FLOAT(0.0))
        scale = builder.select(is_more, builder.fmul(number, FLOAT(float(np.float32(1 / 127)))), FLOAT(0.0))
        scale = builder.select(is_finite, scale, FLOAT(float("nan")))
        alike, rounds = spread(builder, inverse), ir.Constant(VECTOR, [float(ROUNDS)] * WIDTH)
        total = ir.Constant(WHOLE, [0] * WIDTH)
        for i, part in enumerate(parts):
            part = builder.select(spread(builder, is_some), part, ir.Constant(VECTOR, [0.0] * WIDTH))
            nearest = builder.fsub(builder.fadd(builder.fmul(part, alike), rounds), rounds)
            whole = builder.fptosi(nearest, WHOLE)
            total = builder.add(total, whole)
            store(builder, _narrow(builder, whole), to, INT(NUMBER_BYTES * WIDTH * i))
        store(builder, scale, of_group, INT(0))
        store(builder, builder.mul(_reduce(builder, "add", total), INT32(-128)), of_group, INT(4))
        return NONE

    return types.none(types.intp, types.intp, types.intp), generate


def _narrow(builder: Any, whole: Any) -> Any:
    """Whole numbers of a token, WIDTH of them, as `_dot` reads them."""
    numbers = builder.trunc(whole, ir.VectorType(ir.IntType(8 * NUMBER_BYTES), WIDTH))
    if NUMBER_BYTES == 1:
        return numbers
    order = [four + place for four in range(0, WIDTH, _FOUR) for place in (0, 2, 1, 3)]
    order = ir.Constant(ir.VectorType(INT32, WIDTH), order)
    return builder.shuffle_vector(numbers, numbers, order)


def _reduce(builder: Any, how: str, vector: Any) -> Any:
    kind = ir.FunctionType(INT32, [WHOLE])
    name = f"llvm.vector.reduce.{how}.v{WIDTH}i32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector])


_split_group: Any = intrinsic(_split_group_intrinsic)


@njit(error_model="numpy", nogil=True, cache=True)
def split(x: int, num_inputs: int, to: int, groups: int) -> None:
    """Of a token [in] at the address x: at the address `to` its whole numbers [groups * GROUP], then of
    each group its scale, NaN where it has a number that is not finite, and -128 times their sum."""
    of_groups = to + groups * GROUP * NUMBER_BYTES
    whole_groups = num_inputs // GROUP
    for group in range(whole_groups):
        _split_group(x + 4 * GROUP * group, to + GROUP * NUMBER_BYTES * group, of_groups + 8 * group)
    if whole_groups < groups:
        rest = np.zeros(GROUP, np.float32)
        numbers = carray(pointer(x), num_inputs, np.float32)
        for i in range(whole_groups * GROUP, num_inputs):
            rest[i - whole_groups * GROUP] = numbers[i]
        _split_group(rest.ctypes.data, to + GROUP * NUMBER_BYTES * whole_groups, of_groups + 8 * whole_groups)
