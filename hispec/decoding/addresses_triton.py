"""Columns, positions and KV slots of a static pass on a GPU, by one kernel instead of a dozen operations: a
draft pass of a small model takes little longer than these."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit
def _locate(
    live: tl.tensor,
    first: tl.tensor,
    starts: tl.tensor,
    nodes: tl.tensor,
    tables: tl.tensor,
    out: tl.tensor,
    num_cells: int,
    q_len: int,
    window: int,
    block_size: int,
    table_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_cell = cell < num_cells
    row = cell // q_len
    alive = tl.load(live + cell, mask=is_cell, other=0) != 0
    begin = tl.load(first + row, mask=is_cell, other=0)
    column = begin + tl.load(nodes + cell % q_len, mask=is_cell, other=0)
    position = tl.where(alive, tl.load(starts + row, mask=is_cell, other=0) + column, 0)
    block = tl.load(
        tables + row.to(tl.int64) * table_stride + position // block_size, mask=is_cell & alive, other=0
    )
    tl.store(out + cell, begin, mask=is_cell)
    tl.store(out + num_cells + cell, column, mask=is_cell)
    tl.store(
        out + 2 * num_cells + cell, tl.where(alive, row.to(tl.int64) * window + column, -1), mask=is_cell
    )
    tl.store(out + 3 * num_cells + cell, position, mask=is_cell)
    tl.store(
        out + 4 * num_cells + cell,
        tl.where(alive, block * block_size + position % block_size, -1),
        mask=is_cell,
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
    """Of all cells of live [rows, q_len] bool, row after row: first [rows] of its row, column = first +
    nodes [q_len], row * window + column and KV slot (-1 where not live), position = starts [rows] + column
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
    _locate[(triton.cdiv(rows * q_len, _BLOCK),)](
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
