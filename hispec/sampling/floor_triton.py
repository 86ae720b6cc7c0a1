"""The smallest logit that top_k, top_p and min_p leave, on a GPU: a radix selection by many programs per row,
which reads logits as they are and sorts nothing.

All float32 have ranks in their order, and the rank that is looked for is found digit by digit: what each
value of a digit weighs, 1 a token or its probability mass, is added up in a histogram per chunk of the
vocabulary; the next pass adds the chunks up and goes on with the value in which the limit is reached. Chunks
and their order are constants, so that a row's floor does not depend on what else is in a pass. bfloat16 has
half the digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens of the vocabulary per program, and of those at a time; neither was measured yet.
_CHUNK, _BLOCK, _NUM_WARPS = 4096, 256, 4
_BINS = tl.constexpr(256)  # values of a digit
_MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def _rank(x: tl.tensor) -> tl.tensor:
    """The rank (uint32) of float32 x in the order of all float32; both zeros have one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _float_at(rank: tl.tensor, LOW_BITS: tl.constexpr) -> tl.tensor:
    """The float32 of a rank whose lowest LOW_BITS bits are not known, but 0 in the number; -inf below the
    rank of -inf."""
    bits = tl.where(rank >> 31 != 0, rank ^ 0x80000000, rank ^ 0xFFFFFFFF) >> LOW_BITS << LOW_BITS
    return tl.where(rank < 0x007FFFFF, _MINUS_INF, bits.to(tl.float32, bitcast=True))


@triton.jit
def _largest(peaks: tl.tensor, num_chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """Of a row's peaks [num_chunks]."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + chunk, mask=chunk < num_chunks, other=_MINUS_INF), axis=0)


@triton.jit(do_not_specialize=["num_chunks"])
def _find_peaks(
    logits: tl.tensor,
    peaks: tl.tensor,
    vocab_size: int,
    row_stride: int,
    num_chunks: int,
    CHUNK: tl.constexpr,
) -> None:
    at, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + at * row_stride + token, mask=token < vocab_size, other=_MINUS_INF)
    tl.store(peaks + at * num_chunks + chunk, tl.max(x.to(tl.float32), axis=0))


@triton.jit
def _take_digit(
    histograms: tl.tensor,
    num_chunks: tl.tensor,
    rank: tl.tensor,
    above: tl.tensor,
    limit: tl.tensor,
    share: tl.tensor,
    SHIFT: tl.constexpr,
) -> tl.tuple:
    """A row's rank with its digit at SHIFT, what the tokens above that weigh, and the limit: of a row that
    has none yet (0) a share of all. histograms [num_chunks, _BINS]."""
    value = tl.arange(0, _BINS)
    weight = tl.zeros((_BINS,), tl.float32)
    for chunk in range(num_chunks):
        weight += tl.load(histograms + chunk * _BINS + value)
    # Above 0, so that the largest is always left.
    limit = tl.where(limit > 0.0, limit, tl.maximum(share * tl.sum(weight, axis=0), 1e-30))
    reached = above + tl.cumsum(weight, axis=0, reverse=True)
    digit = tl.max(tl.where(reached >= limit, value, -1), axis=0)
    # By rounding alone the limit may not be reached: then all that is left is.
    lowest = tl.min(tl.where(weight > 0.0, value, _BINS), axis=0)
    digit = tl.where(digit >= 0, digit, tl.where(lowest < _BINS, lowest, 0))
    above += tl.sum(tl.where(value > digit, weight, 0.0), axis=0)
    return rank | (digit.to(tl.uint32) << SHIFT), above, limit


@triton.jit(do_not_specialize=["rows", "temperatures", "tops", "num_chunks", "num"])
def _weigh_digits(
    logits: tl.tensor,
    rows: tl.tensor,
    temperatures: tl.tensor,
    tops: tl.tensor,
    kept: tl.tensor,
    peaks: tl.tensor,
    ranks: tl.tensor,
    sums: tl.tensor,
    histograms: tl.tensor,
    vocab_size: int,
    row_stride: int,
    num_chunks: int,
    num: int,
    STEP: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One chunk's histogram of digit STEP, of the tokens that have the digits found so far; those of all
    chunks in the step before say the last of these. By probability mass of tokens that are `kept` if there
    are peaks, else by number.

    ranks [steps, num], sums [steps, 2, num], of which the second is the limit; histograms [steps, num,
    num_chunks, _BINS].
    """
    at, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + at)
    temperature, top = tl.load(temperatures + row), tl.load(tops + row)
    by_mass: tl.constexpr = peaks is not None
    is_on = (top < 1.0) if by_mass else (top > 0)
    if (temperature > 0.0) & is_on:
        rank, above = tl.full((), 0, tl.uint32), tl.full((), 0.0, tl.float32)
        limit, least = above, above + _MINUS_INF
        largest, rate, share = above, above, above
        if by_mass:
            largest = _largest(peaks + at * num_chunks, num_chunks, CHUNKS)
            rate, share = tl.div_rn(above + 1.4426950408889634, temperature), top
            if kept is not None:
                least = tl.load(kept + at)
        else:
            limit = tl.minimum(top, vocab_size).to(tl.float32)
        if STEP > 0:
            if STEP > 1:
                rank = tl.load(ranks + (STEP - 1) * num + at).to(tl.uint32)
                above = tl.load(sums + (STEP - 1) * 2 * num + at)
                limit = tl.load(sums + (STEP - 1) * 2 * num + num + at)
            before = histograms + (((STEP - 1) * num + at) * num_chunks) * _BINS
            rank, above, limit = _take_digit(before, num_chunks, rank, above, limit, share, 32 - 8 * STEP)
            if chunk == 0:
                tl.store(ranks + STEP * num + at, rank.to(tl.int64))
                tl.store(sums + STEP * 2 * num + at, above)
                tl.store(sums + STEP * 2 * num + num + at, limit)
        # A digit is two of 16 values each, and the histogram a product of matrices.
        half = tl.arange(0, 16)[None, :]
        found = tl.zeros((16, 16), tl.float32)
        for block in range(CHUNK // BLOCK):
            token = chunk * CHUNK + block * BLOCK + tl.arange(0, BLOCK)
            is_token = token < vocab_size
            x = tl.load(logits + at * row_stride + token, mask=is_token, other=_MINUS_INF).to(tl.float32)
            weight = tl.where(is_token, 1.0, 0.0)
            if by_mass:
                weight = tl.where(is_token & (x >= least), tl.exp2((x - largest) * rate), 0.0)
            own = _rank(x)
            if STEP > 0:
                weight = tl.where((own >> (32 - 8 * STEP)) == (rank >> (32 - 8 * STEP)), weight, 0.0)
            digit = ((own >> (24 - 8 * STEP)) & 255).to(tl.int32)
            high = tl.where((digit >> 4)[:, None] == half, weight[:, None], 0.0)
            low = tl.where((digit & 15)[:, None] == half, 1.0, 0.0)
            found += tl.dot(tl.trans(high), low, input_precision="ieee")
        value = tl.arange(0, 16)[:, None] * 16 + half
        tl.store(histograms + ((STEP * num + at) * num_chunks + chunk) * _BINS + value, found)


@triton.jit(do_not_specialize=["rows", "temperatures", "tops", "min_ps", "num_chunks", "num"])
def _finish(
    rows: tl.tensor,
    temperatures: tl.tensor,
    tops: tl.tensor,
    kept: tl.tensor,
    peaks: tl.tensor,
    min_ps: tl.tensor,
    ranks: tl.tensor,
    sums: tl.tensor,
    histograms: tl.tensor,
    out: tl.tensor,
    vocab_size: int,
    num_chunks: int,
    num: int,
    BY_MASS: tl.constexpr,
    TEMPERED: tl.constexpr,
    STEPS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """The logit whose rank was looked for; if TEMPERED the floor: the largest of that one, of what is `kept`
    and of min_p's, by temperature. -inf where nothing is filtered."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    temperature, floor = tl.load(temperatures + row), tl.full((), _MINUS_INF, tl.float32)
    if temperature > 0.0:
        if tops is not None:
            top, zero = tl.load(tops + row), tl.full((), 0.0, tl.float32)
            is_on = (top < 1.0) if BY_MASS else (top > 0)
            if is_on:
                rank = tl.load(ranks + (STEPS - 1) * num + at).to(tl.uint32)
                above = tl.load(sums + (STEPS - 1) * 2 * num + at)
                limit = tl.load(sums + (STEPS - 1) * 2 * num + num + at)
                last = histograms + ((STEPS - 1) * num + at) * num_chunks * _BINS
                rank, above, limit = _take_digit(last, num_chunks, rank, above, limit, zero, 32 - 8 * STEPS)
                floor = _float_at(rank, LOW_BITS)
        if TEMPERED:
            if kept is not None:
                floor = tl.maximum(floor, tl.load(kept + at))
            floor = tl.div_rn(floor, temperature)
            if min_ps is not None:
                min_p = tl.load(min_ps + row)
                if min_p > 0.0:
                    largest = _largest(peaks + at * num_chunks, num_chunks, CHUNKS)
                    floor = tl.maximum(floor, tl.div_rn(largest, temperature) + tl.log(min_p))
    tl.store(out + at, floor)


class _Search:
    """What all kernels of one call have in common."""

    def __init__(self, logits: Tensor, rows: Tensor, temperature: Tensor) -> None:
        assert logits.stride(1) == 1
        self._logits, self._rows, self._temperature = logits, rows, temperature
        self._num, self._vocab_size = logits.shape
        self._num_chunks = triton.cdiv(self._vocab_size, _CHUNK)
        self._low_bits = 16 if logits.dtype == torch.bfloat16 else 0
        self._steps = (32 - self._low_bits) // 8
        self._chunks = triton.next_power_of_2(self._num_chunks)
        self._peaks: Tensor | None = None

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._logits.device)

    def find_peaks(self) -> None:
        """The largest logit of each chunk, which mass and min_p are relative to."""
        self._peaks = self._empty(self._num, self._num_chunks)
        _find_peaks[(self._num, self._num_chunks)](
            self._logits,
            self._peaks,
            self._vocab_size,
            self._logits.stride(0),
            self._num_chunks,
            _CHUNK,
            num_warps=_NUM_WARPS,
        )

    def run(
        self, top: Tensor | None, by_mass: bool, kept: Tensor | None, min_p: Tensor | None, tempered: bool
    ) -> Tensor:
        """[n] float32 as `_finish` has it, of top_k or top_p [rows]; None = no search."""
        num, num_chunks, steps = self._num, self._num_chunks, self._steps
        shapes = ((steps, num), (steps, 2, num), (steps, num, num_chunks, _BINS.value))
        ranks, sums, histograms = None, None, None
        if top is not None:
            ranks = self._empty(*shapes[0], dtype=torch.int64)
            sums, histograms = self._empty(*shapes[1]), self._empty(*shapes[2])
            for step in range(steps):
                _weigh_digits[(num, num_chunks)](
                    self._logits,
                    self._rows,
                    self._temperature,
                    top,
                    kept,
                    self._peaks if by_mass else None,
                    ranks,
                    sums,
                    histograms,
                    self._vocab_size,
                    self._logits.stride(0),
                    num_chunks,
                    num,
                    step,
                    self._chunks,
                    _CHUNK,
                    _BLOCK,
                    num_warps=_NUM_WARPS,
                    enable_fp_fusion=False,
                )
        out = self._empty(num)
        _finish[(num,)](
            self._rows,
            self._temperature,
            top,
            kept,
            self._peaks,
            min_p,
            ranks,
            sums,
            histograms,
            out,
            self._vocab_size,
            num_chunks,
            num,
            by_mass,
            tempered,
            steps,
            self._low_bits,
            self._chunks,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
        return out


def nucleus_floor(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """What a tempered logit must reach to be left by top_k, then top_p, then min_p, as `Sampler._filtered`
    has them -> [n] float32.

    logits [n, vocab] of any float dtype, rows [n] int64; of each row temperature, top_p, min_p [rows]
    float32, top_k [rows] int64; None = no row has that filter. -inf for greedy rows, and where no filter is
    on (top_k 0, top_p 1, min_p 0)."""
    search, kept = _Search(logits, rows, temperature), None
    if top_k is not None:
        kept = search.run(top_k, False, None, None, tempered=top_p is None and min_p is None)
        if top_p is None and min_p is None:
            return kept
    search.find_peaks()
    return search.run(top_p, True, kept, min_p, tempered=True)
