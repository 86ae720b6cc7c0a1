"""Float32 arithmetic for Triton kernels whose bits do not depend on who runs them.

Each operation is a plain IEEE float32 one, and launches that use these switch off its contraction into fused
multiply-adds (`enable_fp_fusion=False`): so a GPU computes what torch's own chains of operations do, and what
Triton's interpreter does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# The interpreter runs kernels in numpy, for tests without a GPU. It has no bfloat16: it truncates where a GPU
# rounds, and its products take the bits for integers.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def unspecialised_jit(kernel: Callable[..., None]) -> Any:
    """triton.jit of a small kernel, once for all values of its arguments but constants.

    Triton compiles a kernel anew for an integer that is 1 or a multiple of 16, and for an address that is not
    one of 16 bytes, as a row of a tensor may have. That would be again and again while numbers of rows and
    lengths vary, for nothing that such a kernel gains."""
    kinds = inspect.get_annotations(kernel, eval_str=False).items()
    return triton.jit(do_not_specialize=[name for name, kind in kinds if "constexpr" not in str(kind)])(
        kernel
    )


@triton.jit
def cast(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Float32 to `dtype`, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def exp32(x: tl.tensor) -> tl.tensor:
    """exp(x) within 2 units in the last place: tl.exp is off by more the larger |x| is. As numba_math.exp32,
    but not clamped."""
    x = tl.minimum(tl.maximum(x, -104.0), 89.0)  # beyond these the result is 0 and infinity
    whole = tl.floor(x * 1.44269504 + 0.5)
    r = x - whole * 0.693359375
    r = r - whole * -2.12194440e-4  # ln 2 in two steps keeps the low bits
    p = (
        r * 1.9875691500e-4 + 1.3981999507e-3
    )  # minimax polynomial for (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 (Cephes)
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * r * r + r + 1.0
    half = (
        whole.to(tl.int32) >> 1
    )  # in two factors, since 2 ** 128 and 2 ** -150 are no float32 while their product with p may be
    return p * _power_of_two(half) * _power_of_two(whole.to(tl.int32) - half)


@triton.jit
def _power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2 ** exponent for int32 exponents of normal numbers, by building its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_rms(sum_of_squares: tl.tensor, size: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """1 / sqrt(mean + eps), with correctly rounded quotients and root."""
    mean = tl.div_rn(sum_of_squares, tl.cast(size, tl.float32))
    return tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))
