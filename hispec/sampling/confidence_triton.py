"""The logarithm of a softmax's denominator on a GPU: reads logits once, as they are, and makes no tensor of
their shape."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _NUM_WARPS = 4096, 8


@triton.jit
def _log_sum_exp(
    logits: tl.tensor,
    out: tl.tensor,
    vocab_size: int,
    row_stride: int,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    # Each lane keeps the largest logit that it has seen, and its sum relative to that; the lanes are merged
    # last.
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(NUM_BLOCKS):
        token = block * BLOCK + lane
        x = tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=-float("inf")).to(
            tl.float32
        )
        larger = tl.maximum(largest, x)
        # Where all was -inf so far, there is nothing to scale: -inf - -inf would be NaN.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.exp(x - base)
        largest = larger
    best = tl.max(largest, axis=0)
    base = tl.where(best == -float("inf"), 0.0, best)
    tl.store(out + row, base + tl.log(tl.sum(total * tl.exp(largest - base), axis=0)))


def log_sum_exp(logits: Tensor) -> Tensor:
    """log(sum(exp(logits [n, vocab]))) -> [n] float32, of any float dtype; -inf entries are tokens that
    cannot be."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _log_sum_exp[(num_rows,)](
        logits,
        out,
        vocab_size,
        logits.stride(0),
        triton.cdiv(vocab_size, _BLOCK),
        _BLOCK,
        num_warps=_NUM_WARPS,
    )
    return out
