"""A linear layer on a GPU whose rows keep their bits: a Triton product that adds up a row's terms in one
order, however many rows there are.

Libraries choose a kernel by the number of rows, and with it the order of sums. Here the tile is 16 rows
always, and where the inputs are cut into parts follows from the weight's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear import num_bytes
from .triton_math import INTERPRETED, cast

# of the smallest matrix instruction: decoding is bound by reading the weight, not by the rows that this
# wastes
_BLOCK_ROWS = 16
_PROGRAMS = 256  # that read enough of a weight at once: about two per multiprocessor of an A100 or H100
_MIN_PART = 512  # inputs of a part: fewer would not pay for adding the parts up
_MAX_PARTS = 16
# Rows up to which each part has programs of its own; from there on row tiles keep the GPU busy, and a program
# takes all parts in turn.
_MAX_ROWS_IN_PARTS = 64
_SUM_BLOCK = 1024


@dataclass(frozen=True)
class Launch:
    """How the product with a weight [out, in] is cut up: never by the number of rows."""

    block_out: int
    block_in: int
    part: int  # inputs of one part, a multiple of block_in
    num_parts: int
    num_stages: int


def launch_of(out_features: int, in_features: int, dtype: torch.dtype) -> Launch:
    """dtype: that of the terms, which narrower weights are widened to."""
    narrow = dtype.itemsize == 2
    block_out, block_in = (64, 128) if narrow else (32, 64)  # 256 bytes of a weight's row at a time
    wanted = min(_PROGRAMS // triton.cdiv(out_features, block_out), in_features // _MIN_PART, _MAX_PARTS)
    part = triton.cdiv(in_features, max(wanted, 1) * block_in) * block_in
    return Launch(block_out, block_in, part, triton.cdiv(in_features, part), num_stages=4)


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    out_features: int,
    in_features: int,
    x_stride: int,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS_APART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> None:
    """A tile of (x @ weight.T) * scales + bias; with PARTS_APART of one part's sums, to out
    [parts, rows, out] without scales and bias. Without scales they are 1; with them weight is int8.

    Row tiles come first in the grid, so that those which read the same weights run at the same time."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)).to(tl.int64)
    i = tl.arange(0, BLOCK_IN)
    is_row, is_column = (row < num_rows)[:, None], (column < out_features)[None, :]
    x_tile, weight_tile = (
        x + row[:, None] * x_stride + i[None, :],
        weight + column[None, :] * in_features + i[:, None],
    )
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for own in range(1 if PARTS_APART else NUM_PARTS):
        begin = (tl.program_id(2) + own) * PART
        sums = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
        for block in range(PART // BLOCK_IN):
            at = begin + block * BLOCK_IN
            inside = i < in_features - at
            a = tl.load(x_tile + at, mask=is_row & inside[None, :], other=0.0)
            b = tl.load(weight_tile + at, mask=is_column & inside[:, None], other=0.0)
            if INTERPRETED:
                a, b = a.to(tl.float32), b.to(tl.float32)
            elif scales is not None:
                b = b.to(a.dtype)  # which holds whole numbers up to 256
            sums = tl.dot(a, b, sums, input_precision="ieee")
        total += sums
    if PARTS_APART:
        row += tl.program_id(2).to(tl.int64) * num_rows
        is_row = is_row & (row < (tl.program_id(2).to(tl.int64) + 1) * num_rows)[:, None]
    else:
        if scales is not None:
            total *= tl.load(scales + column, mask=column < out_features, other=0.0)[None, :]
        if bias is not None:
            total += tl.load(bias + column, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * out_features + column[None, :],
        cast(total, out.dtype.element_ty),
        mask=is_row & is_column,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts(
    parts: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    out_features: int,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out [rows, out] of parts [parts, rows, out], added up as `_product` does by itself."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < out_features
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(NUM_PARTS):
        total += tl.load(
            parts + (part * tl.cast(num_rows, tl.int64) + row) * out_features + column, mask=live, other=0.0
        )
    if scales is not None:
        total *= tl.load(scales + column, mask=live, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + column, cast(total, out.dtype.element_ty), mask=live)


class InvariantLinear:
    """x [rows, in] @ weight [out, in].T + bias [out], summed in float32. Float32, bfloat16 or float16, of one
    dtype."""

    row_invariant = True
    holds_copy = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), None if bias is None else bias.contiguous()
        self._launch = launch_of(weight.shape[0], weight.shape[1], weight.dtype)
        self.num_bytes = num_bytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(self._launch, x, self._weight, None, self._bias)


def multiply(launch: Launch, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [rows, in] @ weight [out, in].T, times scales [out], + bias [out] -> [rows, out] of x's dtype.

    scales: None = the weight has x's dtype; else it is int8, and they are float32.
    """
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    assert x.stride(1) == 1 or in_features == 1
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    apart = launch.num_parts > 1 and num_rows <= _MAX_ROWS_IN_PARTS
    parts = (
        torch.empty((launch.num_parts, num_rows, out_features), dtype=torch.float32, device=x.device)
        if apart
        else out
    )
    grid = (
        triton.cdiv(num_rows, _BLOCK_ROWS),
        triton.cdiv(out_features, launch.block_out),
        launch.num_parts if apart else 1,
    )
    _product[grid](
        x,
        weight,
        scales,
        bias,
        parts,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        launch.part,
        launch.num_parts,
        apart,
        _BLOCK_ROWS,
        launch.block_out,
        launch.block_in,
        num_warps=4,
        num_stages=launch.num_stages,
    )
    if apart:
        sum_grid = (num_rows, triton.cdiv(out_features, _SUM_BLOCK))
        _add_parts[sum_grid](
            parts, scales, bias, out, num_rows, out_features, launch.num_parts, _SUM_BLOCK, num_warps=4
        )
    return out
