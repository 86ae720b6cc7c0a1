"""Which tokens of a static pass are live, where they lie and what they are, on a GPU, by one kernel instead
of two dozen operations: a draft pass of a small model takes little longer than these."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ee_models.kernels.triton_math import unspecialised_jit

_BLOCK = 128


@unspecialised_jit
def _locate(
    first: tl.tensor,
    num_live: tl.tensor,
    starts: tl.tensor,
    nodes: tl.tensor,
    tables: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    live: tl.tensor,
    num_cells: int,
    q_len: int,
    window: int,
    table_stride: int,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_cell = cell < num_cells
    row = (cell // q_len).to(tl.int64)
    node = tl.load(nodes + cell % q_len, mask=is_cell, other=0)
    alive = is_cell & (node < tl.load(num_live + row, mask=is_cell, other=0))
    begin = tl.load(first + row, mask=is_cell, other=0)
    column = begin + node
    position = tl.where(alive, tl.load(starts + row, mask=is_cell, other=0) + column, 0)
    block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=alive, other=0)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    token = tl.load(tokens + row * (window + 1) + column, mask=alive, other=0)
    tl.store(out + cell, begin, mask=is_cell)
    tl.store(out + num_cells + cell, node, mask=is_cell)
    tl.store(out + 2 * num_cells + cell, column, mask=is_cell)
    tl.store(out + 3 * num_cells + cell, tl.where(alive, row * window + column, -1), mask=is_cell)
    tl.store(out + 4 * num_cells + cell, position, mask=is_cell)
    tl.store(out + 5 * num_cells + cell, tl.where(alive, slot, -1), mask=is_cell)
    tl.store(out + 6 * num_cells + cell, token, mask=is_cell)
    tl.store(live + cell, alive, mask=is_cell)


def addresses(
    first: Tensor,
    num_live: Tensor,
    starts: Tensor,
    nodes: Tensor,
    block_tables: Tensor,
    block_size: int,
    tokens: Tensor,
) -> tuple[Tensor, ...]:
    """As `stages._addresses`: of all cells of [rows, q_len], row after row: first [rows] of its row, node of
    nodes [q_len], column = first + node, row * window + column (-1 where not live), position = starts [rows]
    + column (0 there), KV slot (-1), token of tokens [rows, window + 1] (0), int64 [rows * q_len] each; and
    which are live, those whose node is below num_live [rows]."""
    (rows,), (q_len,), window = first.shape, nodes.shape, tokens.shape[1] - 1
    out = torch.empty((7, rows * q_len), dtype=torch.int64, device=first.device)
    live = torch.empty(rows * q_len, dtype=torch.bool, device=first.device)
    assert block_tables.stride(1) == 1
    assert all(each.is_contiguous() for each in (first, num_live, starts, nodes, tokens))
    _locate[(triton.cdiv(rows * q_len, _BLOCK),)](
        first,
        num_live,
        starts,
        nodes,
        block_tables,
        tokens,
        out,
        live,
        rows * q_len,
        q_len,
        window,
        block_tables.stride(0),
        block_size,
        _BLOCK,
        num_warps=1,
    )
    return *out, live
