"""Randomness keyed by (request seed, position, stream): the one source of it in the runtime.

A counter-based hash, so that a draw depends on nothing but its key: not on the batch, the plan, or what was
drawn before. Streams keep draws at one position apart; `CHOICE` is shared by all tiers, which is what couples
them.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


class Stream(IntEnum):
    """What a draw at a position is for."""

    CHOICE = 0
    CHECK_ACCEPT = 1
    CHECK_TOKEN = 2
    VERIFY_ACCEPT = 3
    VERIFY_TOKEN = 4


def _splitmix64(x: Tensor) -> Tensor:
    """Steele, Lea and Flood's mixer on int64, wrapping; shifts are masked, since torch's are arithmetic."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def keys(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """One int64 key per draw: seeds and positions [...] -> [...]."""
    return _splitmix64(_splitmix64(_splitmix64(seeds) ^ positions) ^ int(stream))


def _mix32(x: Tensor) -> Tensor:
    """A 32-bit finaliser (Wellons' lowbias32) on int64 that holds 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK32
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK32
    return x ^ (x >> 16)


def uniform(key: Tensor) -> Tensor:
    """Float32 in (0, 1), one per key; 23 bits, so that both ends are excluded exactly."""
    return (((key >> 41) & 0x7FFFFF).float() + 0.5) * 2.0**-23


def gumbel(key: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [n, vocab] float32 for keys [n]: row i, token v depends on key[i] and v alone."""
    low, high = (key & _MASK32).unsqueeze(1), ((key >> 32) & _MASK32).unsqueeze(1)
    token = torch.arange(vocab_size, device=key.device)
    bits = _mix32(_mix32((token * 0x9E3779B1 & _MASK32) ^ low) ^ high)
    return -torch.log(-torch.log(((bits >> 9).float() + 0.5) * 2.0**-23))
