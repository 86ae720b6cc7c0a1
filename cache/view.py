"""BatchView: positions and KV slots of the tokens of one pass. It is passed as an argument, never global."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchView:
    """Addresses of the tokens of one pass, packed row after row: a row's tokens are neighbours, in order of
    position.

    positions        [tokens] int64, absolute position in the row's sequence
    slots            [tokens] int64, KV address block * block_size + offset; -1 = padding, written nowhere
    block_tables     [rows, max_blocks] int64
    cu_q_lens        [rows + 1] int64, row r's tokens are cu_q_lens[r] to cu_q_lens[r + 1] - 1
    max_q_len        int, tokens of the longest row
    max_context_len  int, at least 1 + the largest position
    paths            [tokens, depth] int64 or None: KV slots of the last positions that each token sees; for
                     passes over trees
    path_starts      [tokens] int64 or None: the position that paths[:, 0] stands for

    A token attends to positions 0 up to its own in its row, so the pass must write its own KV before it
    attends.

    In a pass over token trees a row's tokens are nodes, in any order: siblings have one position, but each a
    slot of its own. Token t sees position p at slot paths[t, p - path_starts[t]] from path_starts[t] on, and
    through the block table below; what stands in paths past the token's own position is not read. Without
    paths the row is a chain, and the block table tells every slot.
    """

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    cu_q_lens: Tensor
    max_q_len: int
    max_context_len: int
    paths: Tensor | None = None
    path_starts: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_rows(self) -> int:
        return self.block_tables.shape[0]

    def row_ids(self) -> Tensor:
        """[tokens] int64: the row of each token."""
        q_lens = self.cu_q_lens.diff()
        return torch.repeat_interleave(
            torch.arange(self.num_rows, device=q_lens.device), q_lens, output_size=self.num_tokens
        )


def slots_of(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """KV slots [rows, n] of `positions` [rows, n], through `block_tables` [rows, max_blocks]."""
    return block_tables.gather(1, positions // block_size) * block_size + positions % block_size


def packed_slots_of(block_tables: Tensor, row_ids: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """KV slots [tokens] of `positions` [tokens] in the rows `row_ids` [tokens] of `block_tables` [rows,
    max_blocks]."""
    return block_tables[row_ids, positions // block_size] * block_size + positions % block_size
