"""Linear layers for inference: weights packed once at load where the CPU's library offers it, plain
otherwise.

A pass over one token and a pass over eight must give the same bits for the token they share, or verify could
disagree with plain decoding over a rounding error. Packed oneDNN kernels give that; a probe at load finds out
where they do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows that the weight's layout is chosen for; with 1, a row's bits would depend on how many there are.
_PACKING_HINT = 16
_PROBED_ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 33, 64, 128)


class Linear(Protocol):
    """A matrix product x [tokens, in] -> [tokens, out]. `row_invariant`: whether a row's bits are the same
    whatever the other rows; `num_bytes`: size of weight and bias as they are held."""

    row_invariant: bool
    num_bytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


def num_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class PlainLinear:
    """`F.linear` over the weight as it is [out, in]."""

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


class PackedLinear(ProbedLinear):
    """oneDNN over a weight [out, in] that was reordered once; the packed copy replaces the original."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_HINT)
        self._bias = bias
        self._op = torch.ops.mkldnn._linear_pointwise.default  # resolving the overload costs 2 µs a call
        self.num_bytes = num_bytes(weight, bias)
        self._min_rows, self.row_invariant = probe_rows(self, "packed", weight)

    def _run(self, x: Tensor) -> Tensor:
        return self._op(x, self._packed, self._bias, "none", [], "")


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


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed linears work here, found out by trying one."""
    if device.type != "cpu" or dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    try:
        weight, x = torch.randn(32, 32), torch.randn(2, 32)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_HINT)
        got = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return bool(torch.allclose(got, F.linear(x, weight), atol=1e-4))
