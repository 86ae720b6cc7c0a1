"""What products in bfloat16 read on a CPU that has instructions for them: of tokens rounded to it with
weights in it, added up in float32, by matrix tiles (`numba_tiles`) or by vectors of pairs (`numba_pairs`).

A panel holds COLUMNS outputs: their biases, float32; then, two inputs after two inputs, the weights [in / 2,
COLUMNS, 2], and zeros where inputs are missing from a group of GROUP. A token has its numbers in the same
order, and a line more, so that not all of a tile's tokens lie in the same places of a cache.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numba.np.numpy_support import carray
from torch import Tensor

from ..kernel_cache import njit
from .numba_vectors import LINE, copy_numbers
from .threads import pointer

GROUP, COLUMNS = 32, 32
# Bytes of a panel ahead of its groups, and of one of them.
HEAD, GROUP_BYTES = 4 * COLUMNS, 2 * GROUP * COLUMNS


def make_panels(weight: Tensor, bias: Tensor) -> Tensor:
    """A weight [out, in], rounded to bfloat16, and its bias [out], float32, as panels [out / COLUMNS rounded
    up, bytes] uint8."""
    num_outputs, num_inputs = weight.shape
    missing = -num_outputs % COLUMNS
    padded = F.pad(weight.bfloat16(), (0, -num_inputs % GROUP, 0, missing))
    pairs = padded.view(-1, COLUMNS, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()
    head = F.pad(bias, (0, missing)).view(torch.uint8).view(len(pairs), -1)
    return torch.cat([head, pairs.view(len(pairs), -1).view(torch.uint8)], 1)


@njit
def bytes_of_token(groups: int) -> int:
    return groups * 2 * GROUP + LINE


@njit
def split(x: int, num_inputs: int, to: int, groups: int) -> None:
    """A token [in] at the address x: at the address `to` in bfloat16, and zeros up to a whole group."""
    copy_numbers(x, num_inputs, to, 2)
    missing = groups * GROUP - num_inputs
    rest = carray(pointer(to + 2 * num_inputs), missing, np.int16)
    for i in range(missing):
        rest[i] = 0
