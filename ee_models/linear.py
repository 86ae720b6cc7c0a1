"""Linear layers for inference: what all have in common, and the plain one.

A pass over one token and a pass over eight must give the same bits for the token they share, or verify could
disagree with plain decoding over a rounding error. HiSpec's own products give that (`panel_linear`,
`narrow_linear`, `kernels.triton_linear`); a library's, which choose a kernel anew for each number of rows, do
not.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """A matrix product x [tokens, in] -> [tokens, out]. `row_invariant`: whether a row's bits are the same
    whatever the other rows; `num_bytes`: size of weight and bias as they are held; `holds_copy`: whether that
    is another tensor than the weight that it was made of."""

    row_invariant: bool
    num_bytes: int
    holds_copy: bool

    def __call__(self, x: Tensor) -> Tensor: ...


def num_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class PlainLinear:
    """`F.linear` over the weight as it is [out, in]."""

    row_invariant = False
    holds_copy = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = num_bytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)
