"""Float32 arithmetic for numba kernels that LLVM can vectorise.

Each operation is a plain IEEE float32 one, and multiply-adds are fused where the code says so, so a value's
bits do not depend on where in a vector, or in which loop's remainder, it was computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .numba_vectors import multiply_add

_f = np.float32
ZERO, ONE = _f(0.0), _f(1.0)
_LOWEST, _HIGHEST, _LOG2_E = (float(_f(number)) for number in (-87.0, 88.0, 1.44269504))
# Their sum is ln 2: a two-step reduction keeps the low bits.
_LN2_HIGH, _LN2_LOW = (float(_f(number)) for number in (0.693359375, -2.12194440e-4))
# Minimax polynomial for (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 (Cephes).
_POLYNOMIAL = [
    float(_f(number))
    for number in (
        *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
        *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
    )
]


def exp(builder: Any, x: Any) -> Any:
    """LLVM code for exp32 of a float, or of each in a vector."""
    kind = x.type
    size = getattr(kind, "count", 0)
    whole_kind = ir.VectorType(ir.IntType(32), size) if size else ir.IntType(32)

    def every(number: Any, of: Any = kind) -> Any:
        return ir.Constant(of, [number] * size if size else number)

    def add_product(p: Any, q: Any, r: Any) -> Any:
        return multiply_add(builder, p, q, r)

    given, x = x, builder.select(builder.fcmp_ordered(">", x, every(_LOWEST)), x, every(_LOWEST))
    x = builder.select(builder.fcmp_ordered("<", x, every(_HIGHEST)), x, every(_HIGHEST))
    name = f"llvm.floor.v{size}f32" if size else "llvm.floor.f32"
    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name)
    whole = builder.call(floor, [add_product(x, every(_LOG2_E), every(0.5))])
    r = add_product(whole, every(-_LN2_HIGH), x)
    r = add_product(whole, every(-_LN2_LOW), r)
    p = every(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = add_product(p, r, every(coefficient))
    p = builder.fadd(add_product(builder.fmul(p, r), r, r), every(1.0))
    # 2 ** whole, by building its bits.
    bits = builder.add(builder.fptosi(whole, whole_kind), every(127, whole_kind))
    found = builder.fmul(p, builder.bitcast(builder.shl(bits, every(23, whole_kind)), kind))
    return builder.select(builder.fcmp_unordered("uno", given, given), given, found)  # the limits lose a NaN


def _exp32_intrinsic(_context: Any, x: Any) -> Any:
    """exp(x) in float32, within 2 units in the last place; clamped to [exp(-87), exp(88)]; NaN of NaN."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return exp(builder, args[0])

    return types.float32(types.float32), generate


exp32: Any = intrinsic(_exp32_intrinsic)
