"""HugePages: memory for the weights of a CPU, side by side in pages of megabytes.

A pass of few tokens does little but read all weights. In pages of 4 kB the CPU looks up an address every 64
cache lines; in pages of 2 MB, which Linux gives out where it is asked to, it hardly ever does.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 32 << 20  # what is asked for at once; what is never written takes no memory
_LEAST = 64 << 10  # of less, a model has too little to wait for
_LINE = 64  # bytes of a cache line, where every weight begins
_MADV_HUGEPAGE = 14


class HugePages:
    """Holds weights of one model. A chunk of memory goes once the last weight in it has gone."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0  # bytes of it

    def keep(self, weight: Tensor) -> Tensor:
        """A copy of `weight`, which is contiguous and on a CPU, in huge pages; or `weight`, where it is small
        or the system has none."""
        if weight.nbytes < _LEAST or _madvise() is None:
            return weight
        size = -(-weight.nbytes // _LINE) * _LINE
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = _allocate(max(size, _CHUNK)), 0
        kept = self._chunk[self._used : self._used + weight.nbytes].view(weight.dtype).view(weight.shape)
        self._used += size
        return kept.copy_(weight)


def _allocate(num_bytes: int) -> Tensor:
    """Memory [num_bytes] uint8 that begins where a page does."""
    memory = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE
    memory = memory[start : start + num_bytes]
    # Where it is refused, pages are as they always were.
    _madvise()(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
    return memory


@cache
def _madvise() -> Any:
    """The system's madvise; None where it is not Linux."""
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None
