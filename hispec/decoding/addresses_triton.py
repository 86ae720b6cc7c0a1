"""The addresses of a static pass on a GPU, by one kernel instead of a dozen: a draft pass of a small model
takes little longer than these."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit
def _address(
    live: tl.tensor,
    first: tl.tensor,
    starts: tl.tensor,
    nodes: tl.tensor,
    tables: tl.tensor,
    out: tl.tensor,
    num_places: int,
    q_len: int,
    window: int,
    block_size: int,
    table_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < num_places
    row = place // q_len
    alive = tl.load(live + place, mask=is_place, other=0) != 0
    begin = tl.load(first + row, mask=is_place, other=0)
    column = begin + tl.load(nodes + place % q_len, mask=is_place, other=0)
    position = tl.where(alive, tl.load(starts + row, mask=is_place, other=0) + column, 0)
    block = tl.load(
        tables + row.to(tl.int64) * table_stride + position // block_size, mask=is_place & alive, other=0
    )
    tl.store(out + place, begin, mask=is_place)
    tl.store(out + num_places + place, column, mask=is_place)
    tl.store(
        out + 2 * num_places + place, tl.where(alive, row.to(tl.int64) * window + column, -1), mask=is_place
    )
    tl.store(out + 3 * num_places + place, position, mask=is_place)
    tl.store(
        out + 4 * num_places + place,
        tl.where(alive, block * block_size + position % block_size, -1),
        mask=is_place,
    )


def addresses(
    live: Tensor,
    first: Tensor,
    starts: Tensor,
    nodes: Tensor,
    block_tables: Tensor,
    block_size: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of all places of live [rows, q_len] bool, row after row: first [rows] of its row, column = first +
    nodes [q_len], flat place in the window and KV slot (-1 where not live), position = starts [rows] + column
    (0 where not live); [rows * q_len] int64 each.
    """
    rows, q_len = live.shape
    out = torch.empty(5, rows * q_len, dtype=torch.int64, device=live.device)
    assert (
        live.is_contiguous()
        and first.is_contiguous()
        and starts.is_contiguous()
        and nodes.is_contiguous()
        and block_tables.stride(1) == 1
    )
    _address[(triton.cdiv(rows * q_len, _BLOCK),)](
        live,
        first,
        starts,
        nodes,
        block_tables,
        out,
        rows * q_len,
        q_len,
        window,
        block_size,
        block_tables.stride(0),
        _BLOCK,
        num_warps=1,
    )
    begin, column, flat, position, slot = out
    return begin, column, flat, position, slot
