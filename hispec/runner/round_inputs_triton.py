"""What a static launcher does with the inputs of rows between rounds and at the beginning of one, on a GPU: a
kernel each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ee_models.kernels.triton_math import unspecialised_jit

_BLOCK = 128


@unspecialised_jit
def _advance(
    inputs: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    num_rows: int,
    input_stride: int,
    width: int,
    TOKEN: tl.constexpr,
    START: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_row = row < num_rows
    count = tl.load(counts + row, mask=is_row, other=0)
    token = tl.load(tokens + row * width + count, mask=is_row, other=0)
    start, room = inputs + START * input_stride + row, inputs + ROOM * input_stride + row
    tl.store(inputs + TOKEN * input_stride + row, token, mask=is_row)
    tl.store(start, tl.load(start, mask=is_row, other=0) + count, mask=is_row)
    tl.store(room, tl.load(room, mask=is_row, other=0) - count, mask=is_row)


def advance(inputs: Tensor, tokens: Tensor, counts: Tensor, token: int, start: int, room: int) -> None:
    """As `round_inputs.advance`; token, start, room: their lines in inputs."""
    (rows,) = counts.shape
    assert inputs.stride(1) == 1 and tokens.is_contiguous() and counts.is_contiguous()
    _advance[(triton.cdiv(rows, _BLOCK),)](
        inputs,
        tokens,
        counts,
        rows,
        inputs.stride(0),
        tokens.shape[1],
        token,
        start,
        room,
        _BLOCK,
        num_warps=1,
    )


@unspecialised_jit
def _begin(
    inputs: tl.tensor,
    tokens: tl.tensor,
    limits: tl.tensor,
    num_rows: int,
    input_stride: int,
    width: int,
    TOKEN: tl.constexpr,
    CAP: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_row = row < num_rows
    token = tl.load(inputs + TOKEN * input_stride + row, mask=is_row, other=0)
    cap = tl.load(inputs + CAP * input_stride + row, mask=is_row, other=0)
    room = tl.load(inputs + ROOM * input_stride + row, mask=is_row, other=0)
    tl.store(tokens + row * width, token, mask=is_row)
    tl.store(limits + row, tl.minimum(cap, room), mask=is_row)


def begin(inputs: Tensor, tokens: Tensor, limits: Tensor, token: int, cap: int, room: int) -> None:
    """As `round_inputs.begin`; token, cap, room: their lines in inputs."""
    (rows,) = limits.shape
    assert inputs.stride(1) == 1 and tokens.is_contiguous() and limits.is_contiguous()
    _begin[(triton.cdiv(rows, _BLOCK),)](
        inputs,
        tokens,
        limits,
        rows,
        inputs.stride(0),
        tokens.shape[1],
        token,
        cap,
        room,
        _BLOCK,
        num_warps=1,
    )
