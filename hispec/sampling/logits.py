"""Logits of a pass, of all tokens or of those that an exit has."""

from __future__ import annotations

from torch import Tensor

from ee_models.kernels import select_kernels

from . import confidence


class Logits:
    """Logits `values` [tokens, n]: column i is of token vocabulary[i]; without a vocabulary of token i, and n
    = vocab.

    best, sums         what the pass has found out already: the likeliest token of each [tokens] int64, and
                       the sum of exp(logit - its logit) [tokens]; None = they are looked for when they are
                       asked for
    asks_probability   whether the likeliest tokens' probability will be asked for: then it may be found along
                       with them
    """

    def __init__(
        self,
        values: Tensor,
        vocab_size: int,
        vocabulary: Tensor | None = None,
        best: Tensor | None = None,
        sums: Tensor | None = None,
        asks_probability: bool = False,
    ) -> None:
        self.values, self.vocabulary, self._asks_probability = values, vocabulary, asks_probability
        self._vocab_size, self._best, self._sums = vocab_size, best, sums
        self._wide: Tensor | None = None

    def wide(self) -> Tensor:
        """[tokens, vocab]: what a choice by noise, penalties and acceptance by probabilities ask for; -inf of
        tokens that the exit does not have."""
        if self.vocabulary is None:
            return self.values
        if self._wide is None:
            kernels = select_kernels(self.values.device, self.values.dtype)
            self._wide = kernels.widen(self.values, self.vocabulary, self._vocab_size)
        return self._wide

    def likeliest(self) -> Tensor:
        """The likeliest token of each [tokens] int64; of equal ones the first that the exit has."""
        if self._best is None:
            both = confidence.likeliest_and_sum(self.values) if self._asks_probability else None
            if both is None:
                column = confidence.likeliest(self.values)
            else:
                column, self._sums = both
            self._best = column if self.vocabulary is None else self.vocabulary[column]
        return self._best

    def max_probability(self, rows: Tensor | None = None) -> Tensor:
        """Probability [n] float32 of the likeliest token, of all or of rows [n] int64."""
        if self._sums is None:
            return confidence.max_probability(self.values, rows)
        return (self._sums if rows is None else self._sums[rows]).reciprocal()

    def probability_of(self, token_ids: Tensor) -> Tensor:
        """Probabilities [tokens] float32 of token_ids [tokens]."""
        best = self._best
        if self._sums is not None and best is not None and best.shape == token_ids.shape:
            is_best = best.data_ptr() == token_ids.data_ptr()  # it is asked of what was chosen
            if is_best:
                return self.max_probability()
        return confidence.probability_of(self.wide(), token_ids.unsqueeze(-1)).squeeze(-1)
