"""HiddenBuffer: the hidden states that a tier hands to the next, by position within the round."""

from __future__ import annotations

import torch
from torch import Tensor


class HiddenBuffer:
    """One tensor `data` [exits, rows, window, hidden], overwritten round after round, never concatenated.

    Addressed by `index` [tokens] = row * window + position within the round. Index -1 is a scratch entry
    behind all others, for what is to be written nowhere. Holds uncommitted positions only: a round reads
    nothing that it has not written itself.
    """

    def __init__(
        self,
        num_exits: int,
        num_rows: int,
        window: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeros, not empty: padding is computed too, and must be finite.
        self._storage = torch.zeros(num_exits, num_rows * window + 1, hidden_size, dtype=dtype, device=device)
        self.data = self._storage[:, :-1].unflatten(1, (num_rows, window))

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes

    def rows(self, exit_index: int) -> Tensor:
        """[rows * window, hidden]: where the hidden state at an index of 0 or more lies."""
        return self._storage[exit_index, :-1]

    def write(self, exit_index: int, index: Tensor, hidden: Tensor) -> None:
        """Stores hidden [tokens, hidden] at index [tokens]."""
        self._storage[exit_index][index] = hidden

    def read(self, exit_index: int, index: Tensor) -> Tensor:
        """A copy [tokens, hidden] of the hidden states at index [tokens]."""
        return self._storage[exit_index][index]

    def move(self, exit_index: int, sources: Tensor, targets: Tensor) -> None:
        """Copies hidden states from index sources [n] to index targets [n], all read before any is written; a
        target of -1 is written nowhere."""
        if targets.shape[0]:
            self.write(exit_index, targets, self.read(exit_index, sources))
