"""Matrix products on a CPU of tokens in 16 bits with weights in int4: a scale and a minimum for each GROUP of
an output's inputs, w = scale * q + minimum with q of 0 to 15.

A token is scale * k, with whole numbers k of -32767 to 32767. A group adds scale * (k . q) + minimum * (sum
of k) to an output. Both sums are of whole numbers, which float32 holds as they are, and groups are added one
after another: a token's bits depend on nothing but itself.

A panel holds COLUMNS outputs: their biases; then, group after group, their scales and minima, in float16 as
GGUF files have them, and eight inputs after eight inputs q [GROUP / 8, COLUMNS, 2, 4]: CPUs multiply and add
pairs of 16 bits, so that the first of four pairs is in the lowest bits of two such numbers.
"""

from __future__ import annotations

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
from . import numba_int8
from .numba_int8 import COLUMNS
from .numba_rounding import ROUNDS, WHOLE
from .numba_vectors import (
    FLOAT,
    INT,
    INT32,
    LINE,
    NONE,
    ROWS,
    VECTOR,
    WIDTH,
    add_product,
    for_count,
    largest,
    load,
    load_half,
    prefetch,
    rows_of,
    spread,
    store,
)
from .threads import pointer

GROUP = 32  # inputs that share a scale and a minimum
# Whose sums of a group fit into the CPU's vectors; where LLVM makes much code of a product, fewer.
TOKENS = 3 if numba_int8.DOT == "plain" else 8 if WIDTH == 16 else 6
LARGEST = torch.finfo(torch.float16).max  # size of a weight
# Bytes of a panel ahead of its groups: the bias of each column; of a group; of one of a token's, and of the
# scale that follows these.
HEAD, GROUP_BYTES, TOKEN_GROUP_BYTES, SCALE_BYTES = 4 * COLUMNS, (4 + GROUP // 2) * COLUMNS, 2 * GROUP + 4, 4
# Steps between the smallest and the largest weight of a group that are tried, all of them first.
_TRIED = (15, 14, 13, 12, 11, 10, 9, 8)


def make_panels(weight: Tensor, bias: Tensor) -> Tensor:
    """A weight [out, in] of at most LARGEST and its bias [out], float32, as panels [out / COLUMNS rounded up,
    bytes] uint8."""
    num_outputs, num_inputs = weight.shape
    missing = -num_outputs % COLUMNS
    # The last input fills its group: what it is multiplied by is zero, and no range grows by it.
    filled = torch.cat([weight, weight[:, -1:].expand(-1, -num_inputs % GROUP)], 1)
    scale, minimum, q = _fit(filled.view(num_outputs, -1, GROUP))
    scale, minimum, q = (
        F.pad(each, (0, 0) * (each.dim() - 1) + (0, missing)) for each in (scale, minimum, q)
    )
    pairs = q.view(-1, COLUMNS, q.shape[1], GROUP // 8, 2, 2, 2).permute(0, 2, 3, 5, 1, 6, 4)
    halves = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).flatten(2)
    numbers = [
        each.view(-1, COLUMNS, each.shape[1]).transpose(1, 2).contiguous() for each in (scale, minimum)
    ]
    groups = torch.cat([*(each.view(torch.uint8) for each in numbers), halves], 2)
    head = F.pad(bias, (0, missing)).view(torch.uint8).view(len(groups), -1)
    return torch.cat([head, groups.flatten(1)], 1)


def _fit(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and minima [out, groups] float16 and q [out, groups, GROUP] uint8 of weights [out, groups,
    GROUP]: of those tried, the ones with the least sum of squared errors."""
    low, high = weight.aminmax(dim=2, keepdim=True)
    minimum, tried = (
        low.half(),
        ((high - low) / torch.tensor(_TRIED, dtype=weight.dtype, device=weight.device)).half(),
    )
    arrays = (weight.numpy(), minimum.float().numpy()[:, :, 0], tried.float().numpy())
    best = torch.from_numpy(_find_best(*arrays))
    scale = tried.gather(2, best[:, :, None])
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    q = ((weight - minimum.float()) * inverse).round_().clamp_(0, _TRIED[0])
    return scale[:, :, 0], minimum[:, :, 0], q.to(torch.uint8)


@njit
def _find_best(weight: Any, minima: Any, tried: Any) -> Any:
    """Which of the scales tried [out, groups, tries] is off least, of each group."""
    best = np.zeros(minima.shape, np.int64)
    inverses, errors = np.empty(tried.shape[2], np.float32), np.empty(tried.shape[2], np.float32)
    for output in range(len(weight)):
        for group in range(weight.shape[1]):
            minimum, scales = minima[output, group], tried[output, group]
            for i in range(len(errors)):
                inverses[i] = np.float32(1) / scales[i] if scales[i] > 0 else np.float32(0)
                errors[i] = 0
            for number in weight[output, group]:
                for i in range(len(errors)):
                    q = ((number - minimum) * inverses[i] + ROUNDS) - ROUNDS
                    off = scales[i] * min(max(q, np.float32(0)), np.float32(15)) + minimum - number
                    errors[i] += off * off
            best[output, group] = errors.argmin()
    return best


_LARGEST_K = np.float32(32767)


@njit
def split(x: int, num_inputs: int, to: int, groups: int) -> None:
    """Of a token [in] at the address x: at the address `to` its numbers [groups, GROUP] int16, the sum of
    each group, float32, and its scale, NaN where it has a number that is not finite."""
    numbers = carray(pointer(x), num_inputs, np.float32)
    whole = carray(pointer(to), groups * GROUP, np.int16)
    sums = carray(pointer(to + 2 * groups * GROUP), groups + 1, np.float32)
    peak = largest(x, num_inputs)
    inverse = _LARGEST_K / peak if peak > 0 else np.float32(0)
    is_finite = peak < np.inf
    for i in range(num_inputs):
        is_finite &= numbers[i] == numbers[i]
        whole[i] = np.int16(np.int32((numbers[i] * inverse + ROUNDS) - ROUNDS))
    for i in range(num_inputs, groups * GROUP):
        whole[i] = 0
    for group in range(groups):
        total = np.int32(0)
        for i in range(group * GROUP, (group + 1) * GROUP):
            total += np.int32(whole[i])
        sums[group] = total
    sums[groups] = peak / _LARGEST_K if is_finite else np.float32(np.nan)


def _dot(builder: Any, total: Any, x: Any, y: Any) -> None:
    """total [WIDTH] int32, a place in memory, += the products of pairs of 16 bits of x by those of y."""
    after = builder.load(total)
    if numba_int8.DOT == "plain":
        up = ir.Constant(WHOLE, [16] * WIDTH)
        for down in (
            lambda each: builder.ashr(builder.shl(each, up), up),
            lambda each: builder.ashr(each, up),
        ):
            after = builder.add(after, builder.mul(down(x), down(y)))
    else:  # which LLVM takes together with the addition where the CPU can
        pairs = ir.VectorType(ir.IntType(16), 2 * WIDTH)
        name = "llvm.x86.avx512.pmaddw.d.512" if WIDTH == 16 else "llvm.x86.avx2.pmadd.wd"
        kind = ir.FunctionType(WHOLE, [pairs] * 2)
        add_products = cgutils.get_or_insert_function(builder.module, kind, name)
        products = builder.call(add_products, [builder.bitcast(each, pairs) for each in (x, y)])
        after = builder.add(after, products)
    builder.store(after, total)


def _multiply_tile_intrinsic(
    _context: Any, num_tokens: Any, terms: Any, num_groups: Any, panel: Any, out: Any, ahead: Any
) -> Any:
    """out[t, :COLUMNS] = bias + terms[t] . panel for 1 to TOKENS tokens t; arguments are those of
    numba_int8's."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        num_tokens, *inputs = args
        for_count(builder, num_tokens, TOKENS, lambda count: _tile(builder, count, *inputs))
        return NONE

    return types.none(types.intp, ROWS, types.intp, types.intp, ROWS, ROWS), generate


def _tile(builder: Any, count: int, terms: Any, num_groups: Any, panel: Any, out: Any, ahead: Any) -> None:
    columns = [INT(4 * WIDTH * i) for i in range(COLUMNS // WIDTH)]
    rows = rows_of(builder, terms, count)
    sums = builder.mul(num_groups, INT(2 * GROUP))
    zero, mask = (ir.Constant(WHOLE, [each] * WIDTH) for each in (0, 0x000F000F))
    totals = [[cgutils.alloca_once_value(builder, _alike(0.0)) for _ in columns] for _ in rows]
    wholes = [[cgutils.alloca_once(builder, WHOLE) for _ in columns] for _ in rows]
    with cgutils.for_range(builder, num_groups) as loop:
        group = builder.add(builder.add(panel, INT(HEAD)), builder.mul(loop.index, INT(GROUP_BYTES)))
        asked, step = (builder.extract_value(ahead, i) for i in range(2))
        for line in range(0, GROUP_BYTES, LINE):
            prefetch(builder, asked, builder.add(builder.mul(loop.index, step), INT(line)))
        for whole in (whole for of_token in wholes for whole in of_token):
            builder.store(zero, whole)
        with cgutils.for_range(builder, INT(GROUP // 8)) as eight:
            place = builder.add(group, builder.mul(builder.add(eight.index, INT(1)), INT(4 * COLUMNS)))
            parts = [load(builder, place, column, WHOLE) for column in columns]
            first = builder.mul(builder.add(builder.mul(loop.index, INT(GROUP // 8)), eight.index), INT(16))
            for pair in range(4):
                down = ir.Constant(WHOLE, [4 * pair] * WIDTH)
                q = [builder.and_(builder.lshr(part, down), mask) for part in parts]
                for row, of_token in zip(rows, wholes, strict=True):
                    two = load(builder, row, builder.add(first, INT(4 * pair)), INT32)
                    alike = spread(builder, two)
                    for own, whole in zip(q, of_token, strict=True):
                        _dot(builder, whole, own, alike)
        for i in range(len(columns)):
            scale, minimum = (load_half(builder, group, INT(2 * (COLUMNS * k + WIDTH * i))) for k in range(2))
            for row, of_token, total in zip(rows, wholes, totals, strict=True):
                add_product(builder, total[i], scale, builder.sitofp(builder.load(of_token[i]), VECTOR))
                of_group = builder.add(sums, builder.mul(loop.index, INT(4)))
                add_product(builder, total[i], minimum, spread(builder, load(builder, row, of_group, FLOAT)))
    scale = builder.add(sums, builder.mul(num_groups, INT(4)))
    for row, to, total in zip(rows, rows_of(builder, out, count), totals, strict=True):
        of_token = spread(builder, load(builder, row, scale, FLOAT))
        for i, column in enumerate(columns):
            product = builder.fmul(builder.load(total[i]), of_token)
            store(builder, builder.fadd(product, load(builder, panel, column)), to, column)


def _alike(number: float) -> Any:
    return ir.Constant(VECTOR, [number] * WIDTH)


multiply_tile: Any = intrinsic(_multiply_tile_intrinsic)
