"""Float32 arithmetic for numba kernels that LLVM can vectorise.

Each operation is a plain IEEE float32 one with a fixed contraction into fused multiply-adds, so a value's
bits do not depend on where in a vector, or in which loop's remainder, it was computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from . import stale  # noqa: F401 - before any kernel is loaded

_f = np.float32
ZERO, ONE = _f(0.0), _f(1.0)
_LOWEST, _HIGHEST = _f(-87.0), _f(88.0)
_LOG2_E, _HALF = _f(1.44269504), _f(0.5)
_LN2_HIGH, _LN2_LOW = (
    _f(0.693359375),
    _f(-2.12194440e-4),
)  # their sum is ln 2: a two-step reduction keeps the low bits
# Minimax polynomial for (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 (Cephes).
_P0, _P1, _P2 = _f(1.9875691500e-4), _f(1.3981999507e-3), _f(8.3334519073e-3)
_P3, _P4, _P5 = _f(4.1665795894e-2), _f(1.6666665459e-1), _f(5.0000001201e-1)


def _power_of_two_intrinsic(_context: Any, exponent: Any) -> Any:
    """2 ** exponent for a whole float32 exponent, by building its bits."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        int32 = ir.IntType(32)
        bits = builder.add(builder.fptosi(args[0], int32), ir.Constant(int32, 127))
        return builder.bitcast(builder.shl(bits, ir.Constant(int32, 23)), ir.FloatType())

    return types.float32(types.float32), generate


_power_of_two: Any = intrinsic(_power_of_two_intrinsic)


@njit(inline="always", fastmath={"contract"})
def exp32(x: Any) -> Any:
    """exp(x) in float32, within 2 units in the last place; clamped to [exp(-87), exp(88)]."""
    x = min(max(x, _LOWEST), _HIGHEST)
    whole = np.floor(x * _LOG2_E + _HALF)
    r = x - whole * _LN2_HIGH
    r = r - whole * _LN2_LOW
    p = _P0
    p = p * r + _P1
    p = p * r + _P2
    p = p * r + _P3
    p = p * r + _P4
    p = p * r + _P5
    p = p * r * r + r + ONE
    return p * _power_of_two(whole)
