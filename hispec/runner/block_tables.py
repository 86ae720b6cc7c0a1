"""The block tables of all rows as one tensor, of which a step writes only what has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RowTables:
    """`tensor` [rows, max_blocks] int64: the blocks of each row. Entries beyond a row's blocks are left over
    from earlier requests and never read.

    has_changed   whether `tensor` was written since the last copy to the device; reset by whoever copies it
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.tensor = torch.zeros(num_rows, max_blocks, dtype=torch.int64)
        self._array = self.tensor.numpy()  # the same memory, which numpy is quicker to write a few numbers to
        self._written: list[list[int]] = [[] for _ in range(num_rows)]
        self.has_changed = True

    def update(self, blocks_of_rows: Sequence[Sequence[int]]) -> None:
        """Brings the first rows up to date with their blocks."""
        for row, (blocks, written) in enumerate(zip(blocks_of_rows, self._written, strict=False)):
            if blocks == written:  # nearly always
                continue
            common = min(len(blocks), len(written))
            if blocks[:common] != written[:common]:
                common = 0
            if common < len(blocks):
                self._array[row, common : len(blocks)] = blocks[common:]
                self.has_changed = True
            written[common:] = blocks[common:]
