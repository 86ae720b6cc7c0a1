"""Which tokens of a packed pass over a chain are live, and where they lie, in one pass on a CPU: the twin of
what `stages` does by a dozen operations, which take a twentieth of a small model's check."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ee_models.kernel_cache import njit


@njit
def _locate(
    num_live: Any,
    first: Any,
    starts: Any,
    nodes: Any,
    tables: Any,
    window: Any,
    block_size: Any,
    out: Any,
    cu: Any,
) -> int:
    rows, q_len = num_live.shape[0], nodes.shape[0]
    count = 0
    for row in range(rows):
        for index in range(q_len):
            if nodes[index] < num_live[row]:
                column = first[row] + nodes[index]
                position = starts[row] + column
                out[0, count] = row * q_len + index
                out[1, count] = row
                out[2, count] = nodes[index]
                out[3, count] = first[row]
                out[4, count] = column
                out[5, count] = row * window + column
                out[6, count] = position
                out[7, count] = tables[row, position // block_size] * block_size + position % block_size
                count += 1
        cu[row + 1] = count
    return count


def addresses(
    num_live: Tensor,
    first: Tensor,
    starts: Tensor,
    nodes: Tensor,
    block_tables: Tensor,
    block_size: int,
    window: int,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Of the cells of a rectangle [rows, q_len] whose node is below num_live [rows], row after row: (cell,
    row, node of nodes [q_len], first [rows] of the row, column = first + node, row * window + column,
    position = starts [rows] + column, KV slot), int64 [tokens] each; and where each row's tokens begin [rows
    + 1]."""
    rows, q_len = num_live.shape[0], nodes.shape[0]
    out = np.empty((8, rows * q_len), np.int64)
    cu_q_lens = np.zeros(rows + 1, np.int64)
    of_rows = num_live.numpy(), first.numpy(), starts.numpy()
    tables = block_tables.numpy()
    count = _locate(*of_rows, nodes.numpy(), tables, window, block_size, out, cu_q_lens)
    return torch.from_numpy(out)[:, :count].unbind(), torch.from_numpy(cu_q_lens)
