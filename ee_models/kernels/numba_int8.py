"""Matrix products on a CPU in int8: of tokens and weights, both mixed, with a scale for a group of inputs.

The inputs of a token and of an output's weights are mixed, 64 at a time, by a Hadamard matrix H of 1 and -1:
x . w is (H x) . (H w) / 64, as H is symmetric and H H = 64 I. Mixed, a group of them loses little in whole
numbers of -127 to 127. As they are, a few inputs of a small model are some ten times as large as the rest,
and widen the steps of all that share their scale. (QuaRot, arXiv 2404.00456, turns a model's hidden states
for that; here a product mixes what it reads, and the model stays as it is.)

Of a token, a group of inputs is scale * a, of an output's weights scale * w, with whole numbers a and w. Sums
over a group are of whole numbers, which float32 holds as they are; both scales multiply them, and groups are
added one after another: a token's bits depend on nothing but itself.

A panel holds COLUMNS outputs: their biases and units; then, group after group, their scales in units, in
float16, and four inputs after four inputs the weights [group / 4, COLUMNS, 4]. The CPU multiplies bytes
without sign by bytes with one, so that weights are kept with 128 added, which a token's own sums take away
again: it has its a, then for each group its scale and -128 times the sum of a.
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

from cache.whole_numbers import mixed

from ..kernel_cache import njit
from .numba_rounding import WHOLE, find_scale, keep_largest, mix, reduce_whole, to_whole
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
BLOCK = 64  # inputs that are mixed
# Of a group: more save next to no time, and widen each other's steps. float32 holds the sums of up to 16.
_MOST_BLOCKS = 4
_FOUR = 4  # inputs that are multiplied together
_FOURS = 8  # of them in a turn of the loop that LLVM may unroll
HEAD = 8 * COLUMNS  # bytes of a panel ahead of its groups: bias and unit of each column
# What multiplies bytes and adds up four: instructions for that; pairs of 16 bits; or what LLVM makes of it.
if compiles_for("avx512vnni" if WIDTH == 16 else "avxvnni"):
    DOT = "vnni"
elif compiles_for("avx512bw" if WIDTH == 16 else "avx2"):
    DOT = "pairs"
else:
    DOT = "plain"
# Bytes of a token's whole numbers. Pairs of 16 bits are made once a token: it meets thousands of weights.
NUMBER_BYTES = 2 if DOT == "pairs" else 1


@njit
def group_size(num_inputs: int) -> int:
    """How many of so many inputs share a scale: the most blocks that all can be shared out into."""
    blocks = (num_inputs + BLOCK - 1) // BLOCK
    for count in range(_MOST_BLOCKS, 1, -1):
        if blocks % count == 0:
            return count * BLOCK
    return BLOCK


def make_panels(weight: Tensor, bias: Tensor) -> Tensor:
    """A weight [out, in] and its bias [out], float32, as panels [out / COLUMNS rounded up, bytes] uint8; the
    largest mixed weight of a group becomes 127. The unit of an output is a power of two, so that float16
    holds its scales whatever their size: one by which mixing neither overflows nor loses bits, times one for
    what the largest is then; no smaller than 2 ** -120, whose inverse float32 holds."""
    num_outputs, num_inputs = weight.shape
    missing, group = -num_outputs % COLUMNS, group_size.py_func(num_inputs)
    blocks = F.pad(weight, (0, -num_inputs % BLOCK, 0, missing)).view(num_outputs + missing, -1, BLOCK)
    unit = _power_of_two(blocks.abs().amax((1, 2)), least=-100)
    groups = mixed(blocks / unit[:, None, None]).div_(BLOCK).view(len(blocks), -1, group)
    peak = groups.abs().amax(2)
    rest = _power_of_two(peak.amax(1), least=-20)
    unit, groups, peak = unit * rest, groups / rest[:, None, None], peak / rest[:, None]
    scale = (peak / 127).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    whole = (groups * inverse[:, :, None]).round_().clamp_(-127, 127)
    fours = (whole + 128).to(torch.uint8).view(-1, COLUMNS, scale.shape[1], group // _FOUR, _FOUR)
    scales = scale.view(-1, COLUMNS, scale.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
    inner = torch.cat([scales, fours.permute(0, 2, 3, 1, 4).flatten(2)], 2)
    head = [each.view(torch.uint8).view(len(inner), -1) for each in (F.pad(bias, (0, missing)), unit)]
    return torch.cat([*head, inner.flatten(1)], 1)


def _power_of_two(peak: Tensor, least: int) -> Tensor:
    """One, no less than 2 ** least, by which a peak is 64 to 128, a scale of 127 steps about 1."""
    return torch.ldexp(torch.ones_like(peak), (torch.frexp(peak).exponent - 7).clamp(min=least))


def dot(builder: Any, total: Any, weight: Any, x: Sequence[Any]) -> None:
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


def as_numbers(builder: Any, bytes_: Any) -> list[Any]:
    """Four bytes with sign in each of WIDTH places, as `dot` reads them."""
    if DOT != "pairs":
        return [bytes_]
    pairs = ir.VectorType(ir.IntType(16), 2 * WIDTH)
    eight, halves = ir.Constant(pairs, [8] * (2 * WIDTH)), builder.bitcast(bytes_, pairs)
    first_and_third = builder.ashr(builder.shl(halves, eight), eight)
    return [builder.bitcast(each, WHOLE) for each in (first_and_third, builder.ashr(halves, eight))]


def _multiply_tile_intrinsic(
    _context: Any,
    num_tokens: Any,
    terms: Any,
    num_groups: Any,
    group: Any,
    panel: Any,
    out: Any,
    ahead: Any,
) -> Any:
    """out[t, :COLUMNS] = bias + terms[t] . panel for 1 to TOKENS tokens t. terms and out: ROWS; group: inputs
    of one; panel: an address; ahead: ROWS of memory that is asked for, one a group of inputs."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        num_tokens, *inputs = args
        for_count(builder, num_tokens, TOKENS, lambda count: _tile(builder, count, *inputs))
        return NONE

    return types.none(types.intp, ROWS, *(types.intp,) * 3, ROWS, ROWS), generate


def _tile(
    builder: Any, count: int, terms: Any, num_groups: Any, group: Any, panel: Any, out: Any, ahead: Any
) -> None:
    columns = [INT(4 * WIDTH * i) for i in range(COLUMNS // WIDTH)]
    bytes_of_numbers = builder.mul(group, INT(NUMBER_BYTES))  # a token's, of a group
    bytes_of_group = builder.mul(builder.add(group, INT(2)), INT(COLUMNS))
    rows, of_groups = rows_of(builder, terms, count), builder.mul(num_groups, bytes_of_numbers)
    asked, step = (builder.extract_value(ahead, i) for i in range(2))
    part_of_step = builder.udiv(step, builder.udiv(group, INT(_FOUR)))
    num_turns = builder.udiv(group, INT(_FOUR * _FOURS))
    zero = ir.Constant(VECTOR, [0.0] * WIDTH)
    totals = [[cgutils.alloca_once_value(builder, zero) for _ in columns] for _ in rows]
    sums = [[cgutils.alloca_once(builder, WHOLE) for _ in columns] for _ in rows]
    with cgutils.for_range(builder, num_groups) as loop:
        scales = builder.add(builder.add(panel, INT(HEAD)), builder.mul(loop.index, bytes_of_group))
        of_group = builder.add(of_groups, builder.mul(loop.index, INT(8)))
        for row, of_token in zip(rows, sums, strict=True):
            begin = spread(builder, load(builder, row, builder.add(of_group, INT(4)), INT32))
            for total in of_token:
                builder.store(begin, total)
        first = builder.mul(loop.index, bytes_of_numbers)
        before = builder.mul(loop.index, step)
        with _for_fours(builder, num_turns) as four:
            weights = builder.add(
                scales, builder.add(builder.mul(four, INT(_FOUR * COLUMNS)), INT(2 * COLUMNS))
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
                    dot(builder, total, part, alike)
        of_columns = [load_half(builder, scales, INT(2 * WIDTH * i)) for i in range(len(columns))]
        for row, of_token, its_totals in zip(rows, sums, totals, strict=True):
            of_x = spread(builder, load(builder, row, of_group, FLOAT))
            for scale, whole, total in zip(of_columns, of_token, its_totals, strict=True):
                number = builder.sitofp(builder.load(whole), VECTOR)
                add_product(builder, total, builder.fmul(scale, of_x), number)
    for i, column in enumerate(columns):
        bias, unit = (load(builder, panel, INT(4 * (COLUMNS * k + WIDTH * i))) for k in range(2))
        for row, its_totals in zip(rows_of(builder, out, count), totals, strict=True):
            product = builder.fmul(builder.load(its_totals[i]), unit)
            store(builder, builder.fadd(product, bias), row, column)


@contextmanager
def _for_fours(builder: Any, num_turns: Any) -> Iterator[Any]:
    """Code for each four inputs of a group, which are as many turns; gives which. Where a product is one
    instruction LLVM may write a turn out. Else it is not told how long that is: it would work through one
    token after another, and keep the weights of a turn in memory meanwhile, for want of registers."""
    times = INT(_FOURS)
    if DOT != "vnni":
        times = builder.asm(ir.FunctionType(INT, [INT]), "", "=r,0", [times], side_effect=False)
    with cgutils.for_range(builder, num_turns) as turn:
        first = builder.mul(turn.index, INT(_FOURS))
        with cgutils.for_range(builder, times) as loop:
            yield builder.add(first, loop.index)


multiply_tile: Any = intrinsic(_multiply_tile_intrinsic)


def _split_group_intrinsic(_context: Any, x: Any, num_blocks: Any, to: Any, of_group: Any) -> Any:
    """The whole numbers, at the address `to`, of a group of num_blocks * BLOCK numbers at the address x, once
    they are mixed; at `of_group` their scale, NaN where one that is mixed is not finite, and -128 times their
    sum."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        x, num_blocks, to, of_group = args
        places = range(BLOCK // WIDTH)
        space = cgutils.alloca_once(builder, ir.ArrayType(VECTOR, _MOST_BLOCKS * len(places)))
        mixed_ones = builder.ptrtoint(space, INT)
        largest = cgutils.alloca_once_value(builder, ir.Constant(WHOLE, [0] * WIDTH))
        with cgutils.for_range(builder, num_blocks) as loop:
            start = builder.mul(loop.index, INT(4 * BLOCK))
            at = [builder.add(start, INT(4 * WIDTH * i)) for i in places]
            for part, place in zip(mix(builder, [load(builder, x, i) for i in at]), at, strict=True):
                store(builder, part, mixed_ones, place)
                keep_largest(builder, largest, part)
        scale, inverse, is_some = find_scale(builder, largest, 127)
        inverse, is_some = spread(builder, inverse), spread(builder, is_some)
        total = cgutils.alloca_once_value(builder, ir.Constant(WHOLE, [0] * WIDTH))
        with cgutils.for_range(builder, num_blocks) as loop:
            start = builder.mul(loop.index, INT(BLOCK))
            for i in places:
                place = builder.add(start, INT(WIDTH * i))
                part = load(builder, mixed_ones, builder.mul(place, INT(4)))
                whole = to_whole(builder, part, inverse, is_some)
                builder.store(builder.add(builder.load(total), whole), total)
                store(builder, _narrow(builder, whole), to, builder.mul(place, INT(NUMBER_BYTES)))
        store(builder, scale, of_group, INT(0))
        sums = reduce_whole(builder, "add", builder.load(total))
        store(builder, builder.mul(sums, INT32(-128)), of_group, INT(4))
        return NONE

    return types.none(*(types.intp,) * 4), generate


def _narrow(builder: Any, whole: Any) -> Any:
    """Whole numbers of a token, WIDTH of them, as `dot` reads them."""
    numbers = builder.trunc(whole, ir.VectorType(ir.IntType(8 * NUMBER_BYTES), WIDTH))
    if NUMBER_BYTES == 1:
        return numbers
    order = [four + place for four in range(0, WIDTH, _FOUR) for place in (0, 2, 1, 3)]
    order = ir.Constant(ir.VectorType(INT32, WIDTH), order)
    return builder.shuffle_vector(numbers, numbers, order)


_split_group: Any = intrinsic(_split_group_intrinsic)


@njit
def split(x: int, num_inputs: int, to: int, groups: int) -> None:
    """Of a token [in] at the address x: at the address `to` its whole numbers [groups, inputs of one], then
    of each group its scale, NaN where one that is mixed is not finite, and -128 times their sum."""
    group = group_size(num_inputs)
    of_groups, blocks, whole_groups = to + groups * group * NUMBER_BYTES, group // BLOCK, num_inputs // group
    for i in range(whole_groups):
        _split_group(x + 4 * group * i, blocks, to + group * NUMBER_BYTES * i, of_groups + 8 * i)
    if whole_groups < groups:
        rest = np.zeros(group, np.float32)
        numbers = carray(pointer(x), num_inputs, np.float32)
        for i in range(whole_groups * group, num_inputs):
            rest[i - whole_groups * group] = numbers[i]
        at = to + group * NUMBER_BYTES * whole_groups
        _split_group(rest.ctypes.data, blocks, at, of_groups + 8 * whole_groups)
        rest[0] = 0.0  # named once more: numba frees an array that nothing names, wherever its address is
