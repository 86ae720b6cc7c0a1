"""The sampler's inputs: the parameters of a row, and where in a round the logits of a pass stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sampling_params import SamplingParams


@dataclass(frozen=True)
class RowSampling:
    """What the sampler needs to know of one request. `stop_ids`: tokens that min_tokens forbids."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class SamplingInput:
    """Where the logits of a pass stand, for each of its tokens.

    rows, columns      [tokens]: row, and column in the round's window of the token that was fed
    fed                [tokens]: absolute position of that token
    window_tokens      [rows, window + 1]: the round's tokens so far, whose first is the last committed one
    first, paths       in a tree: [tokens], the column after which it begins; [tokens, depth], the columns on
                       the way to the token that was fed
    """

    rows: Tensor
    columns: Tensor
    fed: Tensor
    window_tokens: Tensor
    first: Tensor | None = None
    paths: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """[tokens]: absolute position of the token to be chosen."""
        return self.fed + 1

    def tentative(self) -> Tensor:
        """[tokens, window + 1] bool: the uncommitted tokens of the window that stand before the token to be
        chosen."""
        columns = torch.arange(self.window_tokens.shape[1], device=self.rows.device)
        if self.first is None or self.paths is None:
            return (columns >= 1) & (columns <= self.columns.unsqueeze(-1))
        before = (columns <= self.first.unsqueeze(-1)).scatter(1, self.paths, True)
        before[:, 0].fill_(False)
        return before
