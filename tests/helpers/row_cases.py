"""Rows of random numbers for the steps of a round, and torch beside what is compiled for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hispec.decoding import batch, stages
from hispec.decoding.batch import STATIC, Execution, RoundBatch
from hispec.decoding.draft_tree import DraftTree
from hispec.sampling.sampler import Sampler

TREES = [DraftTree.chain(4), DraftTree.chain(1), DraftTree.branches(2, 3)]
Run = Callable[[RoundBatch], Any]


class Case:
    """Rows of random numbers; the same again for the same seed."""

    def __init__(
        self, rows: int, window: int, seed: int = 0, vocab: int = 50, execution: Execution = STATIC
    ) -> None:
        self.rows, self.window, self.vocab, self.execution = rows, window, vocab, execution
        on_gpu = execution.is_static and torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self._generator = torch.Generator().manual_seed(seed * 1000 + rows)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape or (self.rows,), generator=self._generator).to(self.device)

    def flags(self, *shape: int) -> Tensor:
        return self.ints(0, 2, *shape).bool()

    def batch(self, block_size: int = 16) -> RoundBatch:
        width = (40 + self.window) // block_size + 2
        wide = torch.randperm(self.rows * width * 2, generator=self._generator).view(self.rows, width * 2)
        return RoundBatch(
            self.ints(-3, self.vocab + 3, self.rows, self.window + 1),
            self.ints(0, 40),
            self.ints(0, self.window + 1),
            self.ints(0, 4),
            self.ints(1, 4),
            wide[:, :width].to(self.device),  # rows of a table may lie apart
            block_size,
            64,
            Sampler([None] * self.rows, self.vocab, self.device),
            self.execution,
        )


def assert_same(make: Callable[[], tuple[RoundBatch, Run]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """That torch and the compiled twin, Triton's or numba's, give the same bits, and leave the same tokens
    and limits -> what they give."""
    found = []
    for runs in (False, True):
        for module in (batch, stages):
            for name in ("runs_triton", "runs_numba"):
                monkeypatch.setattr(module, name, lambda device, runs=runs: runs)
        of_rows, run = make()
        result = run(of_rows)
        found.append((*result, of_rows.tokens, of_rows.limits))
    for number, (by_torch, by_twin) in enumerate(zip(*found, strict=True)):
        assert torch.equal(by_torch, by_twin) and by_torch.dtype == by_twin.dtype, number
    return found[1]
