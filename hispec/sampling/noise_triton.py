"""The coupled choice on a GPU: it reads logits as they are, and makes no tensor of their shape.

The noise is `noise.gumbel`'s, by the same operations. Shapes are static and nothing is copied to the host, so
that a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import Stream

# Tokens of the vocabulary per program: so many programs that one row keeps a whole GPU busy.
_CHOICE_BLOCK, _CHOICE_WARPS = 1024, 4
_LARGEST_INT32 = tl.constexpr(2**31 - 1)
_CHOICE_STREAM = tl.constexpr(int(Stream.CHOICE))


@dataclass(frozen=True)
class Draws:
    """How the tokens of a pass are drawn.

    rows, fed             [n] int64: the row of each, and the position of the token before it
    seeds, temperatures   [rows] int64 and float32
    """

    rows: Tensor
    fed: Tensor
    seeds: Tensor
    temperatures: Tensor


@triton.jit
def _splitmix64(x: tl.tensor) -> tl.tensor:
    """As noise._splitmix64, on uint64, which wraps by itself."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _choice_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """As noise.keys of Stream.CHOICE, for one int64 seed and position."""
    key = _splitmix64(_splitmix64(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    return _splitmix64(key ^ _CHOICE_STREAM)


@triton.jit
def _mix32(x: tl.tensor) -> tl.tensor:
    """As noise._mix32, on uint32, which wraps by itself."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniform(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """What noise.gumbel takes the logarithms of, for one key of 64 bits and tokens [block] int32."""
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bits = _mix32(_mix32((token.to(tl.uint32) * 0x9E3779B1) ^ low) ^ high)
    return ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _best(score: tl.tensor, token: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The largest score and the lowest token that has it."""
    largest = tl.max(score, axis=0)
    return largest, tl.min(tl.where(score == largest, token, _LARGEST_INT32), axis=0)


# Rows and positions lie anywhere in a tensor of all that is known of a pass's tokens.
@triton.jit(do_not_specialize=["rows", "fed", "seeds", "temperatures", "floors"])
def _best_of_block(
    logits: tl.tensor,
    rows: tl.tensor,
    fed: tl.tensor,
    seeds: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    scores: tl.tensor,
    tokens: tl.tensor,
    sums: tl.tensor,
    vocab_size: int,
    row_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    """A block of the vocabulary, after one token of a pass; sums of exp(logit - the block's largest), unless
    they are None."""
    at, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + at * row_stride + token, mask=token < vocab_size, other=-float("inf")).to(
        tl.float32
    )
    if rows is not None:
        row = tl.load(rows + at)
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            score = tl.div_rn(score, tl.broadcast_to(temperature, score.shape))
            if floors is not None:
                score = tl.where(score < tl.load(floors + at), -float("inf"), score)
            key = _choice_key(tl.load(seeds + row), tl.load(fed + at) + 1)
            score = score + -tl.log(-tl.log(_uniform(key, token)))
    best_score, best_token = _best(score, token)
    place = at * tl.num_programs(1) + block
    tl.store(scores + place, best_score)
    tl.store(tokens + place, best_token)
    if sums is not None:
        # In a block of nothing but -inf there is nothing to scale: -inf - -inf would be NaN.
        base = tl.where(best_score == -float("inf"), 0.0, best_score)
        tl.store(sums + place, tl.sum(tl.exp(score - base), axis=0))


@triton.jit
def _best_of_row(
    scores: tl.tensor,
    tokens: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    out_sums: tl.tensor,
    num_blocks: int,
    vocab_size: int,
    BLOCKS: tl.constexpr,
) -> None:
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    live = block < num_blocks
    score = tl.load(scores + row * num_blocks + block, mask=live, other=-float("inf"))
    largest, token = _best(score, tl.load(tokens + row * num_blocks + block, mask=live, other=_LARGEST_INT32))
    # NaN wins nowhere: better any token than none.
    tl.store(out + row, tl.minimum(token, vocab_size - 1).to(tl.int64))
    if sums is not None:
        of_block = tl.load(sums + row * num_blocks + block, mask=live, other=0.0)
        scaled = tl.where(score == -float("inf"), 0.0, of_block * tl.exp(score - largest))
        total = tl.where(largest == -float("inf"), float("nan"), tl.sum(scaled, axis=0))
        tl.store(out_sums + row, total)


def argmax_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmax over the vocabulary of logits [n, vocab] -> [n] int64, the lowest token of several, and the sum
    of exp(logit - its logit) over the vocabulary [n] float32: one over its probability. -inf entries are
    tokens that cannot be; where all are, the sum is NaN."""
    sums = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    return argmax_with_noise(logits, None, sums=sums), sums


def argmax_with_noise(
    logits: Tensor, draws: Draws | None, floor: Tensor | None = None, *, sums: Tensor | None = None
) -> Tensor:
    """argmax over the vocabulary of logits [n, vocab] / temperature + gumbel(key) -> [n] int64, the lowest
    token of several.

    Any float dtype; computed in float32. Rows of temperature 0, and all of them without draws, are greedy: no
    noise, no floor. floor [n] float32: tokens whose tempered logit is below it are out; None: no token is.
    sums [n] float32: takes what `argmax_and_sum` says of them, without draws alone.
    """
    assert sums is None or draws is None
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab_size, _CHOICE_BLOCK)
    scores = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    of_blocks = None if sums is None else torch.empty_like(scores)
    _best_of_block[(num_rows, num_blocks)](
        logits,
        draws.rows if draws is not None else None,
        draws.fed if draws is not None else None,
        draws.seeds if draws is not None else None,
        draws.temperatures if draws is not None else None,
        floor,
        scores,
        tokens,
        of_blocks,
        vocab_size,
        logits.stride(0),
        _CHOICE_BLOCK,
        num_warps=_CHOICE_WARPS,
        enable_fp_fusion=False,
    )
    _best_of_row[(num_rows,)](
        scores,
        tokens,
        of_blocks,
        out,
        sums,
        num_blocks,
        vocab_size,
        triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return out
