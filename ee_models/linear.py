"""Linear layers for inference: what all have in common, and the plain one.

A pass over one token and a pass over eight must give the same bits for the token they share, or verify could
disagree with plain decoding over a rounding error. HiSpec's own products give that (`panel_linear`,
`kernels.triton_linear`); of a library's, a probe at load finds out where they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_PROBED_ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 33, 64, 128)


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

    holds_copy = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = num_bytes(weight, bias)
        self.row_invariant = keeps_rows(self, weight)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


_probes: dict[tuple[tuple[int, ...], torch.dtype, int], bool] = {}


def keeps_rows(linear: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Whether a library's product gives a row the same bits whatever the number of rows.

    Probed once per shape, dtype and number of threads; on a GPU never, and not claimed: its libraries choose
    a kernel anew for each number of rows.
    """
    if weight.device.type != "cpu":
        return False
    key = (tuple(weight.shape), weight.dtype, torch.get_num_threads())
    if key not in _probes:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(_PROBED_ROWS), weight.shape[1], generator=generator).to(weight.dtype)
        alone = torch.cat([linear(x[i : i + 1]) for i in range(min(x.shape[0], 66))])
        together = (linear(x[:rows])[: alone.shape[0]] for rows in _PROBED_ROWS)
        _probes[key] = all(torch.equal(each, alone[: each.shape[0]]) for each in together)
    return _probes[key]
