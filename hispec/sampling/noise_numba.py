"""The coupled choice on a CPU: Gumbel noise only for tokens that could still win."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ee_models.kernel_cache import njit

# No draw of 23 bits is above this: -log(-log(1 - 2**-24)).
_LARGEST_DRAW = 16.7


@njit
def _draw(token: Any, low: Any, high: Any) -> Any:
    """The noise of one token: the twin of noise.gumbel."""
    mask = np.uint64(0xFFFFFFFF)
    x = (np.uint64(token) * np.uint64(0x9E3779B1) & mask) ^ low
    for _ in range(2):
        x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & mask
        x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & mask
        x = x ^ (x >> np.uint64(16))
        x, high = x ^ high, np.uint64(0)  # the second word is mixed in once, between the two finalisers
    return -math.log(-math.log((float(x >> np.uint64(9)) + 0.5) * 2.0**-23))


@njit
def _argmax_with_noise(logits: Any, keys: Any, out: Any) -> None:
    for row in range(logits.shape[0]):
        scores = logits[row]
        low, high = np.uint64(keys[row]) & np.uint64(0xFFFFFFFF), np.uint64(keys[row]) >> np.uint64(32)
        top = np.argmax(scores)
        best, best_score = int(top), float(scores[top]) + _draw(top, low, high)
        for token in range(scores.shape[0]):
            if float(scores[token]) + _LARGEST_DRAW > best_score:
                score = float(scores[token]) + _draw(token, low, high)
                if score > best_score:
                    best, best_score = token, score
        out[row] = best


def argmax_with_noise(logits: Tensor, key: Tensor) -> Tensor:
    """argmax over the vocabulary of logits [n, vocab] + gumbel(key [n]) -> [n] int64."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _argmax_with_noise(logits.numpy(), key.numpy(), out.numpy())
    return out
