"""PanelLinear: a linear of a CPU, float32, whose rows keep their bits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numba import types
from numba.np.numpy_support import carray, from_dtype
from torch import Tensor

from .kernel_cache import cfunc
from .kernels.numba_gemm import call_multiply, multiply, pack, pad_bias
from .kernels.threads import KernelThreads, address_of, take

# Multiplications of a product from which other threads are worth their 3 microseconds.
_PARALLEL_FROM = 1 << 16


class _Call(ctypes.Structure):
    """A product, by the addresses of its kernel and matrices; in how many shares, and the next one."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("next", "num_shares", "x", "num_tokens", "num_inputs", "panels", "size", "bias", "out"),
            *("num_outputs", "multiply"),
        )
    ]


@cfunc(types.void(types.CPointer(from_dtype(np.dtype(_Call)))))
def _multiply(call: Any) -> None:
    c = carray(call, 1)[0]
    share = take(address_of(call))
    while share < c.num_shares:
        matrices = c.x, c.num_tokens, c.num_inputs, c.panels, c.size, c.bias, c.out, c.num_outputs
        call_multiply(c.multiply, (*matrices, share, c.num_shares))
        share = take(address_of(call))


class PanelLinear:
    """A product with a weight [out, in], of which only panels (`numba_gemm.pack`) are kept."""

    row_invariant = True
    holds_copy = True

    def __init__(self, weight: Tensor, bias: Tensor | None, threads: KernelThreads) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.panels, self.bias = pack(weight), pad_bias(bias, weight)
        self.num_bytes = self.panels.nbytes + self.bias.nbytes
        self._threads = threads

    def __call__(self, x: Tensor) -> Tensor:
        # What follows goes by address: nothing else would notice.
        assert x.shape[1] == self.num_inputs and x.dtype == torch.float32, (x.shape, x.dtype, self.num_inputs)
        x, num_tokens = x.contiguous(), x.shape[0]
        out = x.new_empty(num_tokens, self.num_outputs)
        is_large = num_tokens * self.num_inputs * self.num_outputs > _PARALLEL_FROM
        num_shares = self._threads.count if is_large else 1
        call = _Call(
            multiply=multiply.address,
            num_shares=num_shares,
            x=x.data_ptr(),
            num_tokens=num_tokens,
            num_inputs=self.num_inputs,
            panels=self.panels.data_ptr(),
            size=self.panels.itemsize,
            bias=self.bias.data_ptr(),
            out=out.data_ptr(),
            num_outputs=self.num_outputs,
        )
        self._threads.run(_multiply, ctypes.addressof(call), num_shares)
        return out
