"""HiddenBuffer: hidden states that one tier leaves for the next, by position within the round."""
from __future__ import annotations

import torch
from torch import Tensor

from .view import live_moves


class HiddenBuffer:
    """One tensor [exits, rows, window, hidden], overwritten round after round, never concatenated.

    Addressed by `index` [tokens] = row * window + position within the round. Holds uncommitted positions only: a
    round reads nothing that it has not written itself.
    """

    def __init__(self, num_exits: int, num_rows: int, window: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window = window
        self.data = torch.empty(num_exits, num_rows, window, hidden_size, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def write(self, exit_index: int, index: Tensor, hidden: Tensor) -> None:
        """Stores hidden [tokens, hidden] at index [tokens]."""
        self.data[exit_index].view(-1, self.data.shape[-1]).index_copy_(0, index, hidden)

    def read(self, exit_index: int, index: Tensor) -> Tensor:
        """A copy [tokens, hidden] of what stands at index [tokens]."""
        return self.data[exit_index].view(-1, self.data.shape[-1]).index_select(0, index)

    def move(self, exit_index: int, sources: Tensor, targets: Tensor) -> None:
        """Copies what stands at index sources [n] to index targets [n], all of it read before any is written; a target of -1 is nowhere."""
        if targets.shape[0]:
            sources, targets = live_moves(sources, targets)
            self.write(exit_index, targets, self.read(exit_index, sources))
