"""How kernels mix numbers and round them to whole ones with a scale, vector by vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cache.int8_kv import MOST_MIXED, MULTIPLE
from cache.whole_numbers import SMALLEST

from .numba_vectors import FLOAT, INT, INT32, NONE, VECTOR, WIDTH, load, shuffle, spread, store

WHOLE = ir.VectorType(INT32, WIDTH)
# Added to a float32 of less than 2 ** 22 and taken away again, it leaves the nearest whole number.
ROUNDS = np.float32(1.5 * 2**23)
INFINITE = 0x7F800000  # bits of a float32


def mix(builder: Any, parts: Sequence[Any]) -> list[Any]:
    """H times the numbers of `parts`, vectors side by side, a power of two of them."""
    parts, stride = list(parts), 1
    while stride < len(parts) * WIDTH:
        if stride < WIDTH:
            order = [lane ^ stride for lane in range(WIDTH)]
            signs = ir.Constant(WHOLE, [-(1 << 31) if lane & stride else 0 for lane in range(WIDTH)])
            for i, part in enumerate(parts):
                signed = builder.bitcast(builder.xor(builder.bitcast(part, WHOLE), signs), VECTOR)
                parts[i] = builder.fadd(shuffle(builder, part, part, order), signed)
        else:
            between = stride // WIDTH
            for i in (i for i in range(len(parts)) if not i & between):
                first, second = parts[i], parts[i + between]
                parts[i], parts[i + between] = builder.fadd(first, second), builder.fsub(first, second)
        stride *= 2
    return parts


def reduce_whole(builder: Any, how: str, vector: Any) -> Any:
    """All numbers of a vector of int32 as one, by LLVM's name of a reduction."""
    kind = ir.FunctionType(INT32, [WHOLE])
    name = f"llvm.vector.reduce.{how}.v{WIDTH}i32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector])


def keep_largest(builder: Any, largest: Any, part: Any) -> None:
    """Of the sizes of a vector's numbers the largest by lane, in a place of memory, as bits: their order is
    that of sizes, NaN above all."""
    size = builder.and_(builder.bitcast(part, WHOLE), ir.Constant(WHOLE, [0x7FFFFFFF] * WIDTH))
    peak = builder.load(largest)
    builder.store(builder.select(builder.icmp_signed(">", size, peak), size, peak), largest)


def find_scale(builder: Any, largest: Any, steps: int) -> tuple[Any, Any, Any]:
    """Of the largest sizes by lane -> the scale of `steps` steps for numbers up to them, NaN where one is not
    finite; its inverse; whether they are more than zeros."""
    peak = reduce_whole(builder, "smax", builder.load(largest))
    is_finite = builder.icmp_signed("<", peak, INT32(INFINITE))
    number = builder.bitcast(peak, FLOAT)
    is_more = builder.fcmp_ordered(">", number, FLOAT(float(np.float32(SMALLEST))))
    is_some = builder.and_(is_finite, is_more)
    inverse = builder.select(is_some, builder.fdiv(FLOAT(float(steps)), number), FLOAT(0.0))
    scale = builder.fmul(number, FLOAT(float(np.float32(1 / steps))))
    scale = builder.select(is_more, scale, FLOAT(0.0))
    return builder.select(is_finite, scale, FLOAT(float("nan"))), inverse, is_some


def to_whole(builder: Any, part: Any, inverse: Any, is_some: Any) -> Any:
    """The nearest whole numbers of a vector times the inverse of its scale, both spread; int32."""
    zero, rounds = (ir.Constant(VECTOR, [float(number)] * WIDTH) for number in (0, ROUNDS))
    part = builder.select(is_some, part, zero)
    nearest = builder.fsub(builder.fadd(builder.fmul(part, inverse), rounds), rounds)
    return builder.fptosi(nearest, WHOLE)


def _mix_intrinsic(_context: Any, x: Any, count: Any) -> Any:
    """Mixes `count` numbers at the address x, where they are, by blocks of so many as `num_mixed` says."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        x, count = args

        def mix_blocks(size: int) -> None:
            with cgutils.for_range(builder, builder.udiv(count, INT(size))) as loop:
                start = builder.mul(loop.index, INT(4 * size))
                at = [builder.add(start, INT(4 * i)) for i in range(0, size, WIDTH)]
                for part, place in zip(mix(builder, [load(builder, x, i) for i in at]), at, strict=True):
                    store(builder, part, x, place)

        is_narrow = builder.icmp_unsigned("!=", builder.urem(count, INT(MOST_MIXED)), INT(0))
        with builder.if_else(is_narrow) as (narrow, wide):
            with narrow:
                mix_blocks(MULTIPLE)
            with wide:
                mix_blocks(MOST_MIXED)
        return NONE

    return types.none(types.intp, types.intp), generate


def _narrow_intrinsic(_context: Any, x: Any, count: Any, to: Any) -> Any:
    """Writes the whole numbers of `count` numbers at the address x, a multiple of MULTIPLE, to the address
    `to` -> their scale."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        x, count, to = args
        largest = cgutils.alloca_once_value(builder, ir.Constant(WHOLE, [0] * WIDTH))
        num_parts = builder.udiv(count, INT(WIDTH))
        with cgutils.for_range(builder, num_parts) as loop:
            keep_largest(builder, largest, load(builder, x, builder.mul(loop.index, INT(4 * WIDTH))))
        scale, inverse, is_some = find_scale(builder, largest, 127)
        inverse, is_some = spread(builder, inverse), spread(builder, is_some)
        with cgutils.for_range(builder, num_parts) as loop:
            part = load(builder, x, builder.mul(loop.index, INT(4 * WIDTH)))
            whole = to_whole(builder, part, inverse, is_some)
            numbers = builder.trunc(whole, ir.VectorType(ir.IntType(8), WIDTH))
            store(builder, numbers, to, builder.mul(loop.index, INT(WIDTH)))
        return scale

    return types.float32(*(types.intp,) * 3), generate


mix_numbers: Any = intrinsic(_mix_intrinsic)
narrow: Any = intrinsic(_narrow_intrinsic)
