"""Low-rank changes of a model's weights: what LoRA training leaves, and how it is merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """weight [out, in] becomes weight + scale * b @ a, with a [rank, in] and b [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it changes a weight of this shape."""
        return (
            self.a.dim() == self.b.dim() == len(shape) == 2
            and self.a.shape[0] == self.b.shape[1]
            and (self.b.shape[0], self.a.shape[1]) == tuple(shape)
        )

    def added_to(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The changed weight, in `dtype`.

        Sums run in float64 and in the order of ranks, one product and one addition at a time: the same bits
        on every machine, which a matrix product does not promise. So a merged model has one fingerprint.
        """
        total = torch.zeros(weight.shape, dtype=torch.float64)
        for a, b in zip(self.a.double(), self.b.double().unbind(1), strict=True):
            total += torch.outer(b, a)
        return (weight.double() + self.scale * total).to(dtype)
