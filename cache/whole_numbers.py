"""Numbers before they are rounded to whole ones of 8 bits: how they are mixed, and which are too small."""

from __future__ import annotations

from torch import Tensor, stack

SMALLEST = 1e-30  # peak of numbers that are more than zeros: 127 / peak must have a place, too


def mixed(blocks: Tensor) -> Tensor:
    """H times each block [..., a power of two]: the fast Walsh-Hadamard transform, in the order of additions
    that kernels have."""
    size, stride = blocks.shape[-1], 1
    while stride < size:
        first, second = blocks.unflatten(-1, (size // (2 * stride), 2, stride)).unbind(-2)
        blocks = stack([first + second, first - second], -2).view(blocks.shape)
        stride *= 2
    return blocks
