"""Linear layers for inference: what all have in common, and the plain one.

A pass over one token and a pass over eight must give the same bits for the token they share, or verify could
disagree with plain decoding over a rounding error. HiSpec's own products give that (`panel_linear`,
`kernels.triton_linear`); of a library's, a probe at load finds out where they do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
        self.row_invariant = probe_rows(self, "plain", weight) == (1, True)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class ProbedLinear(ABC):
    """Base of linears whose products, by `_run`, keep a row's bits from `_min_rows` rows on."""

    _min_rows = 1

    def __call__(self, x: Tensor) -> Tensor:
        # A single row would take a kernel of its own, with another order of sums.
        if x.shape[0] < self._min_rows:
            return self._run(torch.cat((x, x)))[:1]
        return self._run(x)

    @abstractmethod
    def _run(self, x: Tensor) -> Tensor:
        """The product, of at least `_min_rows` rows."""


_probes: dict[tuple[str, tuple[int, ...], torch.dtype, int], tuple[int, bool]] = {}


def probe_rows(linear: Callable[[Tensor], Tensor], kind: str, weight: Tensor) -> tuple[int, bool]:
    """(fewest rows to compute at once so that bits do not depend on their number, whether such a number was
    found).

    Probed once per kind, shape, dtype and number of threads; on a GPU never, and not claimed: its libraries
    choose a kernel anew for each number of rows.
    """
    if weight.device.type != "cpu":
        return 1, False
    key = (kind, tuple(weight.shape), weight.dtype, torch.get_num_threads())
    if key not in _probes:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(_PROBED_ROWS), weight.shape[1], generator=generator).to(weight.dtype)
        _probes[key] = next(((rows, True) for rows in (1, 2) if _invariant_from(linear, x, rows)), (1, False))
    return _probes[key]


def _invariant_from(linear: Callable[[Tensor], Tensor], x: Tensor, min_rows: int) -> bool:
    """Whether every pass of `min_rows` rows or more gives the same bits per row."""
    alone = torch.cat(
        [linear(x[i : i + 1].expand(min_rows, -1).contiguous())[:1] for i in range(min(x.shape[0], 66))]
    )
    for rows in _PROBED_ROWS:
        if rows < min_rows:
            continue
        together = linear(x[:rows])
        if not torch.equal(together[: alone.shape[0]], alone[:rows]):
            return False
    return True
