"""A linear layer on a GPU whose weights are int8, a scale per output: widened in the product's kernel, so
that a weight is read as one byte.

Few rows, as decoding has them, wait for the weights alone. Many rows, as prompts have them, are worth a
library's product over weights that are widened first; with `exact` they take the kernel too, for their bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear import num_bytes
from .triton_linear import launch_of, multiply

# Not measured yet: from about here on the tensor cores, and not the weights, set a product's time.
_MAX_ROWS = 64
_WIDENED_BYTES = 128 << 20  # of a weight that are widened at once
_LARGEST = 127


class Int8Linear:
    """x [rows, in] @ weight [out, in].T + bias [out], summed in float32; float32 or bfloat16, of the dtype of
    the weight that it was made of."""

    holds_copy = True

    def __init__(self, weight: Tensor, bias: Tensor | None, exact: bool = False) -> None:
        """exact: whether a row is to have the same bits whatever the other rows."""
        self.row_invariant = exact
        self.weight, self.scales = quantize(weight)
        self._bias = None if bias is None else bias.contiguous()
        self._launch = launch_of(weight.shape[0], weight.shape[1], weight.dtype)
        self._step = max(1, _WIDENED_BYTES // (weight.shape[1] * weight.dtype.itemsize))
        self.num_bytes = num_bytes(self.weight, self.scales, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.row_invariant or x.shape[0] <= _MAX_ROWS:
            return multiply(self._launch, x, self.weight, self.scales, self._bias)
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        for first in range(0, out.shape[1], self._step):
            part = slice(first, first + self._step)
            out[:, part] = F.linear(x, self.weight[part].to(x.dtype))
        out *= self.scales
        return out if self._bias is None else out.add_(self._bias)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> int8 [out, in] and scales [out] in float32, whose product is nearest to it. Raises
    ValueError for weights that are not finite."""
    whole, scales = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(weight.shape[0]).float()
    step = max(1, _WIDENED_BYTES // (4 * weight.shape[1]))
    for first in range(0, weight.shape[0], step):
        part = slice(first, first + step)
        exact = weight[part].float()
        scale = exact.abs().amax(1) / _LARGEST
        scales[part] = torch.where(scale > 0, scale, 1.0)  # of zeros any does
        whole[part] = (exact / scales[part, None]).round()
    if not scales.isfinite().all():
        raise ValueError("a weight is not finite, so that int8 cannot hold it; fetch the model again")
    return whole.contiguous(), scales
