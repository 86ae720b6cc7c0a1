"""The coupled choice, and the smallest logit that filters keep, on a GPU: both read logits as they are, and
make no tensor of their shape.

The noise is `noise.gumbel`'s, by the same operations. Shapes are static and nothing is copied to the host, so
that a CUDA graph can hold both.
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
_FLOOR_BLOCK, _FLOOR_WARPS = 4096, 16  # tokens at a time of the one program that a row has
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
    vocab_size: int,
    row_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    """A block of the vocabulary, after one token of a pass."""
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


@triton.jit
def _best_of_row(
    scores: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    num_blocks: int,
    vocab_size: int,
    BLOCKS: tl.constexpr,
) -> None:
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    live = block < num_blocks
    score = tl.load(scores + row * num_blocks + block, mask=live, other=-float("inf"))
    _, token = _best(score, tl.load(tokens + row * num_blocks + block, mask=live, other=_LARGEST_INT32))
    # NaN wins nowhere: better any token than none.
    tl.store(out + row, tl.minimum(token, vocab_size - 1).to(tl.int64))


def argmax_with_noise(logits: Tensor, draws: Draws | None, floor: Tensor | None = None) -> Tensor:
    """argmax over the vocabulary of logits [n, vocab] / temperature + gumbel(key) -> [n] int64, the lowest
    token of several.

    Any float dtype; computed in float32. Rows of temperature 0, and all of them without draws, are greedy: no
    noise, no floor. floor [n] float32: tokens whose tempered logit is below it are out; None: no token is.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab_size, _CHOICE_BLOCK)
    scores = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _best_of_block[(num_rows, num_blocks)](
        logits,
        draws.rows if draws is not None else None,
        draws.fed if draws is not None else None,
        draws.seeds if draws is not None else None,
        draws.temperatures if draws is not None else None,
        floor,
        scores,
        tokens,
        vocab_size,
        logits.stride(0),
        _CHOICE_BLOCK,
        num_warps=_CHOICE_WARPS,
        enable_fp_fusion=False,
    )
    _best_of_row[(num_rows,)](
        scores, tokens, out, num_blocks, vocab_size, triton.next_power_of_2(num_blocks), num_warps=1
    )
    return out


@triton.jit
def _float_at(rank: tl.tensor, LOW_BITS: tl.constexpr) -> tl.tensor:
    """The float32 of a rank (uint32) in the order of all float32, the lowest LOW_BITS bits cleared; -inf
    below the rank of -inf."""
    bits = tl.where(rank >> 31 != 0, rank ^ 0x80000000, rank ^ 0xFFFFFFFF) >> LOW_BITS << LOW_BITS
    return tl.where(rank < 0x007FFFFF, -float("inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _smallest_floor(
    row: tl.tensor,
    vocab_size: int,
    kept: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    limit: tl.tensor,
    BY_MASS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The smallest value such that the tokens of logits [vocab] at `row` above it count less than `limit`, by
    `_weights`: one each, or BY_MASS their probability mass.

    The count falls as the value rises. So the last rank whose count reaches the limit is found digit by digit
    (base 4, three values per pass over the vocabulary), and the floor is the rank after it. The count only
    changes at a logit, so the floor is one. bfloat16 needs half the digits.
    """
    LOW_BITS: tl.constexpr = 16 if row.dtype.element_ty == tl.bfloat16 else 0
    rank = tl.full((), 0, tl.uint32)
    for step in range((32 - LOW_BITS) // 2):
        unit = tl.full((), 1, tl.uint32) << (30 - 2 * step)
        first = _float_at(rank + unit, LOW_BITS)
        second = _float_at(rank + 2 * unit, LOW_BITS)
        third = _float_at(rank + 3 * unit, LOW_BITS)
        above_first = tl.zeros((BLOCK,), tl.float32)
        above_second = tl.zeros((BLOCK,), tl.float32)
        above_third = tl.zeros((BLOCK,), tl.float32)
        for block in range(NUM_BLOCKS):
            x, weight = _weights(row, block, vocab_size, kept, largest, rate, BY_MASS, BLOCK)
            above_first += tl.where(x > first, weight, 0.0)
            above_second += tl.where(x > second, weight, 0.0)
            above_third += tl.where(x > third, weight, 0.0)
        digit = (tl.sum(above_first, axis=0) >= limit).to(tl.uint32)
        digit += (tl.sum(above_second, axis=0) >= limit).to(tl.uint32)
        digit += (tl.sum(above_third, axis=0) >= limit).to(tl.uint32)
        rank += digit * unit
    return _float_at(rank + (tl.full((), 1, tl.uint32) << LOW_BITS), LOW_BITS)


@triton.jit
def _weights(
    row: tl.tensor,
    block: tl.tensor,
    vocab_size: int,
    kept: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Logits [BLOCK], and what each counts: 1, or BY_MASS exp2((logit - largest) * rate) if it is `kept` or
    more."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    if BY_MASS:
        return x, tl.where(x >= kept, tl.exp2((x - largest) * rate), 0.0)
    else:
        return x, tl.where(token < vocab_size, 1.0, 0.0)


@triton.jit(do_not_specialize=["rows", "temperatures", "top_ks", "top_ps", "min_ps"])
def _filter_floor(
    logits: tl.tensor,
    rows: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    floors: tl.tensor,
    vocab_size: int,
    row_stride: int,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """After one token of a pass. Dividing by a temperature keeps the order, so that logits are searched as
    they are, and only what is found is divided."""
    program = tl.program_id(0).to(tl.int64)
    at = tl.load(rows + program)
    row, temperature = logits + program * row_stride, tl.load(temperatures + at)
    top_k, top_p, min_p = tl.load(top_ks + at), tl.load(top_ps + at), tl.load(min_ps + at)
    floor = tl.full((), -float("inf"), tl.float32)
    if temperature > 0.0:
        kept, one = floor, tl.full((), 1.0, tl.float32)
        if top_k > 0:
            kept = _smallest_floor(
                row,
                vocab_size,
                floor,
                floor,
                one,
                tl.minimum(top_k, vocab_size).to(tl.float32),
                False,
                NUM_BLOCKS,
                BLOCK,
            )
            floor = tl.div_rn(kept, temperature)
        if (top_p < 1.0) | (min_p > 0.0):
            largest_at = tl.full((BLOCK,), -float("inf"), tl.float32)
            for block in range(NUM_BLOCKS):
                token = block * BLOCK + tl.arange(0, BLOCK)
                largest_at = tl.maximum(
                    largest_at,
                    tl.load(row + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32),
                )
            largest = tl.max(largest_at, axis=0)
            if top_p < 1.0:
                rate = tl.div_rn(one * 1.4426950408889634, temperature)
                mass = tl.zeros((BLOCK,), tl.float32)
                for block in range(NUM_BLOCKS):
                    _, weight = _weights(row, block, vocab_size, kept, largest, rate, True, BLOCK)
                    mass += weight
                # Above 0, so that the largest is always left.
                limit = tl.maximum(top_p * tl.sum(mass, axis=0), 1e-30)
                nucleus = _smallest_floor(
                    row, vocab_size, kept, largest, rate, limit, True, NUM_BLOCKS, BLOCK
                )
                floor = tl.maximum(floor, tl.div_rn(nucleus, temperature))
            if min_p > 0.0:
                floor = tl.maximum(floor, tl.div_rn(largest, temperature) + tl.log(min_p))
    tl.store(floors + program, floor)


def nucleus_floor(
    logits: Tensor, rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """What a tempered logit must reach to be left by top_k, then top_p, then min_p, as `Sampler._filtered`
    has them -> [n] float32.

    logits [n, vocab] of any float dtype, rows [n] int64; of each row temperature, top_p, min_p [rows]
    float32, top_k [rows] int64. -inf for greedy rows, and where no filter is on (top_k 0, top_p 1, min_p
    0)."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    floors = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(vocab_size), _FLOOR_BLOCK)
    _filter_floor[(num_rows,)](
        logits,
        rows,
        temperature,
        top_k,
        top_p,
        min_p,
        floors,
        vocab_size,
        logits.stride(0),
        triton.cdiv(vocab_size, block),
        block,
        num_warps=_FLOOR_WARPS,
        enable_fp_fusion=False,
    )
    return floors
