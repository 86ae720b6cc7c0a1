"""PanelLinear: a linear of a CPU, float32, whose rows keep their bits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, from_dtype, types  # type: ignore[attr-defined]
from torch import Tensor

from .kernels.numba_gemm import multiply, pack, pad_bias
from .kernels.threads import KernelThreads, address_of, take
from .linear import num_bytes

# Multiplications of a product from which other threads are worth their 3 microseconds.
_PARALLEL_FROM = 1 << 16


class _Call(ctypes.Structure):
    """A product, by the addresses of its matrices, and the number of the next thread."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("next", "num_threads", "x", "num_tokens", "num_inputs", "panels", "bias", "out", "num_outputs"),
        )
    ]


@cfunc(types.void(types.CPointer(from_dtype(np.dtype(_Call)))), cache=True, error_model="numpy")
def _multiply(call: Any) -> None:
    c = carray(call, 1)[0]
    share = take(address_of(call))
    multiply(c.x, c.num_tokens, c.num_inputs, c.panels, c.bias, c.out, c.num_outputs, share, c.num_threads)


class PanelLinear:
    """A product with a weight [out, in], of which only panels (`numba_gemm.pack`) are kept."""

    row_invariant = True
    holds_copy = True

    def __init__(self, weight: Tensor, bias: Tensor | None, threads: KernelThreads) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.panels, self.bias = pack(weight), pad_bias(bias, self.num_outputs)
        self.num_bytes = num_bytes(weight, bias)
        self._threads = threads
        self._call = _Call(
            num_inputs=self.num_inputs,
            num_outputs=self.num_outputs,
            panels=self.panels.data_ptr(),
            bias=self.bias.data_ptr(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        x, num_tokens, call = x.contiguous(), x.shape[0], self._call
        out = torch.empty(num_tokens, self.num_outputs)
        is_large = num_tokens * self.num_inputs * self.num_outputs > _PARALLEL_FROM
        call.next, call.num_threads = 0, self._threads.count if is_large else 1
        call.x, call.num_tokens, call.out = x.data_ptr(), num_tokens, out.data_ptr()
        self._threads.run(_multiply, ctypes.addressof(call), call.num_threads)
        return out
