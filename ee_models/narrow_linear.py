"""NarrowLinear: a linear of a CPU that multiplies in narrow numbers, whose rows keep their bits."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import numpy as np
from numba import types
from numba.np.numpy_support import carray, from_dtype
from torch import Tensor, uint8

from .kernel_cache import cfunc
from .kernels.numba_narrow import (
    bytes_per_token,
    call_multiply,
    call_split,
    look_ahead,
    multiplies_bfloat16,
    multiply,
    pack,
    split_tokens,
    tiles_from,
)
from .kernels.threads import KernelThreads, address_of, take

# Multiplications of a product, and inputs to split, from which other threads are worth their 3 microseconds.
_PARALLEL_FROM, _SPLIT_FROM = 1 << 18, 1 << 15


class _Call(ctypes.Structure):
    """A product, by the addresses of its kernels and matrices; in how many shares, and the next one."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("next", "num_shares", "bits", "ahead", "tiles_from", "x", "terms", "num_tokens", "num_inputs"),
            *("panels", "out", "num_outputs", "split", "multiply"),
        )
    ]


_POINTER = types.CPointer(from_dtype(np.dtype(_Call)))


@cfunc(types.void(_POINTER))
def _split(call: Any) -> None:
    c = carray(call, 1)[0]
    share = take(address_of(call))
    while share < c.num_shares:
        first, last = share * c.num_tokens // c.num_shares, (share + 1) * c.num_tokens // c.num_shares
        call_split(c.split, (c.bits, c.x, c.num_inputs, c.terms, first, last))
        share = take(address_of(call))


@cfunc(types.void(_POINTER))
def _multiply(call: Any) -> None:
    c = carray(call, 1)[0]
    share = take(address_of(call))
    while share < c.num_shares:
        of_tokens = c.bits, c.ahead, c.tiles_from, c.terms, c.num_tokens, c.num_inputs
        call_multiply(c.multiply, (*of_tokens, c.panels, c.out, c.num_outputs, share, c.num_shares))
        share = take(address_of(call))


class NarrowLinear:
    """A product with a weight [out, in] in int8, int4 or bfloat16; of tokens, whole numbers with scales, or
    bfloat16 (see `numba_narrow`). x and output keep the weight's dtype; what lies between is float32."""

    row_invariant = True
    holds_copy = True

    def __init__(
        self, weight: Tensor, bias: Tensor | None, bits: Literal[16, 8, 4], threads: KernelThreads
    ) -> None:
        """Raises ValueError in int8 and int4 for weights that are not finite, in int4 for those too large
        for float16, too; in bfloat16 where the CPU has no products in it."""
        if bits == 16 and not multiplies_bfloat16():
            raise ValueError("there are no products in bfloat16 here; take a PanelLinear")
        self.num_outputs, self.num_inputs = weight.shape
        self.panels = pack(bits, weight.float(), None if bias is None else bias.float())
        self.num_bytes = self.panels.nbytes
        self.bits, self._dtype, self._threads = bits, weight.dtype, threads

    def __call__(self, x: Tensor) -> Tensor:
        # What follows goes by address: nothing else would notice.
        assert x.shape[1] == self.num_inputs and x.dtype == self._dtype, (x.shape, x.dtype, self.num_inputs)
        x, num_tokens = x.float().contiguous(), x.shape[0]
        terms = x.new_empty(num_tokens, bytes_per_token(self.bits, self.num_inputs), dtype=uint8)
        out = x.new_empty(num_tokens, self.num_outputs)
        call = _Call(
            split=split_tokens.address,
            multiply=multiply.address,
            bits=self.bits,
            ahead=look_ahead(),
            tiles_from=tiles_from(),
            x=x.data_ptr(),
            terms=terms.data_ptr(),
            num_tokens=num_tokens,
            num_inputs=self.num_inputs,
            panels=self.panels.data_ptr(),
            out=out.data_ptr(),
            num_outputs=self.num_outputs,
        )
        self._run(_split, call, x.numel() > _SPLIT_FROM)
        self._run(_multiply, call, x.numel() * self.num_outputs > _PARALLEL_FROM)
        return out.to(self._dtype)

    def _run(self, kernel: Any, call: _Call, is_large: bool) -> None:
        call.next, call.num_shares = 0, self._threads.count if is_large else 1
        self._threads.run(kernel, ctypes.addressof(call), call.num_shares)
