"""The likeliest token of a row of logits on a CPU, float32, and how likely it is: torch's argmax takes seven
times as long, and a softmax writes a whole vocabulary for one number."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from ..kernel_cache import njit
from .numba_math import exp
from .numba_vectors import FLOAT, INT, INT32, VECTOR, WIDTH, highest, load, spread
from .threads import pointer

_BLOCK = 1024  # logits; where all of a block are -inf, as of an exit with few tokens, it is passed over


def _sum_of_exp_intrinsic(_context: Any, x: Any, count: Any, peak: Any) -> Any:
    """The sum of exp(number - peak) of `count` numbers at the address x, in one order wherever it is compiled
    into."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        x, count, peak = args
        parts = cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [0.0] * WIDTH))
        total = cgutils.alloca_once_value(builder, FLOAT(0.0))

        def add(to: Any, found: Any, of: Any) -> None:
            builder.store(builder.fadd(builder.load(to), exp(builder, builder.fsub(found, of))), to)

        whole, alike = builder.udiv(count, INT(WIDTH)), spread(builder, peak)
        with cgutils.for_range(builder, whole) as loop:
            add(parts, load(builder, x, builder.mul(loop.index, INT(4 * WIDTH))), alike)
        for i in range(WIDTH):
            part = builder.extract_element(builder.load(parts), INT32(i))
            builder.store(builder.fadd(builder.load(total), part), total)
        with cgutils.for_range(builder, count, start=builder.mul(whole, INT(WIDTH)), intp=INT) as loop:
            add(total, load(builder, x, builder.mul(loop.index, INT(4)), FLOAT), peak)
        return builder.load(total)

    return types.float32(types.intp, types.intp, types.float32), generate


_sum_of_exp: Any = intrinsic(_sum_of_exp_intrinsic)


@njit
def scan_row(logits: int, size: int, sums: bool) -> Any:
    """Of `size` logits at an address: which is the largest, the first of equals; and the sum of exp(logit -
    largest), 0 unless `sums`, NaN where none is above -inf."""
    num_blocks = (size + _BLOCK - 1) // _BLOCK
    peaks = np.empty(num_blocks, np.float32)
    peak, begin = np.float32(-np.inf), 0
    for i in range(num_blocks):
        peaks[i] = highest(logits + 4 * i * _BLOCK, min(_BLOCK, size - i * _BLOCK))
        if peaks[i] > peak:
            peak, begin = peaks[i], i * _BLOCK
    best, scores = begin, carray(pointer(logits), size, np.float32)
    for token in range(begin, min(begin + _BLOCK, size)):
        if scores[token] == peak:
            best = token
            break
    total = np.float32(0)
    if sums:
        for i in range(num_blocks):
            if peaks[i] > -np.inf:
                total += _sum_of_exp(logits + 4 * i * _BLOCK, min(_BLOCK, size - i * _BLOCK), peak)
        if total == 0:
            total = np.float32(np.nan)
    return best, total
