"""Prompt lookup: proposes what followed when the text's latest tokens stood somewhere before. No model, so
nearly free.

A row's text is its committed tokens, then the `tail` of tentative ones. The longest suffix of max_size to
min_size tokens that occurred before decides; among its occurrences, those in the text itself come before
those in the store, and recent ones before old ones. Proposals are what follows it there. In the text that is
read past the end into the proposals themselves, as copies in LZ77 are, so that a period repeats; in the store
it stops where an output ends.

A longer match is a surer one: how likely a copied token is right is told by how many tokens before it are
the same in both places (`LIKELY`), be they more than max_size. With `match_confidence` copying goes on as
long as all of a row's proposals together are right with at least that probability.

The store holds outputs of earlier requests, shared by all rows: two halves, each output followed by a
separator. When one does not fit into the current half, the previous half is dropped, and the current one
takes its place.

Where nothing is copied, `guesses` are proposed, if there are any: what most often follows the text's last
tokens in answers that were counted (ngram_table.py). Where both a copy and a guess are there, a guess that
says the same makes the copy surer; one that says something else is right seldom, and takes the copy's place,
and ends the copying, only if it is more than `RIVAL` times as sure: after a match of a single token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..decoding.drafter import CompiledLookup
from .ngram_table import NgramTable

SEPARATOR = -1
# How often a copied token is right where 0, 1, 2, ... tokens before it are the same, the last for all longer
# ones: of SmolLM2-135M-Instruct's greedy answers to 140 prompts, smoothed
# (benchmarks/copies.py, results/copies-int8-zen5.json).
LIKELY = (
    *(0.0, 0.24, 0.52, 0.64, 0.70, 0.74, 0.78, 0.82, 0.84, 0.86, 0.86),
    *(0.87, 0.88, 0.90, 0.91, 0.92, 0.94),
)
MOST_MATCHED = len(LIKELY) - 1  # tokens of a match that are counted; a power of two, which Triton asks for
# From there, too: a guess that contradicts the copy after a single token is as sure as its share says from
# 0.6 on (right in 62 % of places at 0.6 to 0.8, the copy in 9 %), and less sure below (37 % at 0.4 to 0.6).
RIVAL = 2.5
_MAX_TOKEN = 2**31 - 1


class Guesses(NamedTuple):
    """Guesses from a table, chained as long as all of a row's proposals are right with at least
    `confidence`."""

    table: NgramTable
    confidence: float


class Lookup(ABC):
    """An index over `num_rows` texts of at most `max_len` committed tokens, and a store of `store_tokens`."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        min_size: int,
        max_size: int,
        store_tokens: int = 0,
        match_confidence: float | None = None,
        guesses: Guesses | None = None,
    ) -> None:
        if match_confidence is not None and not 0 < match_confidence < 1:
            raise ValueError(
                f"match_confidence={match_confidence} must be above 0 and below 1, or None for no limit"
            )
        if num_rows < 1 or max_len < 1:
            raise ValueError(f"num_rows={num_rows} and max_len={max_len} must be at least 1")
        if not 1 <= min_size <= max_size:
            raise ValueError(f"min_size={min_size} must be at least 1, and at most max_size={max_size}")
        least = 2 * (
            max_size + 2
        )  # in each half the longest n-gram, a token that follows it, and a separator
        if store_tokens != 0 and store_tokens < least:
            raise ValueError(
                f"store_tokens={store_tokens} must be 0 (no store) or at least {least} for n-grams of"
                f" {max_size} tokens"
            )
        self._num_rows, self._max_len, self._half = num_rows, max_len, store_tokens // 2
        self._min_size, self._max_size = min_size, max_size
        self._match_confidence = match_confidence or 0.0
        self._guesses = guesses

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that it keeps, without the scratch of a proposal."""

    def reset(self, row: int, token_ids: Sequence[int]) -> None:
        """Replaces the row's committed text. Raises ValueError, and changes nothing, for a row or token that
        cannot be or more than max_len tokens; so does `append`."""
        self._write(row, 0, token_ids)

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        """Adds committed tokens to the row's text."""
        self._write(row, self.length(row), token_ids)

    @abstractmethod
    def _write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Writes token_ids behind the first `start` tokens of the row, 0 or as many as it has."""

    @abstractmethod
    def extend(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """As `append` of tokens[i, 1 : counts[i] + 1] to row rows[i], without the host's knowing how many:
        before the next `append` to any of these rows comes a `reset`."""

    @abstractmethod
    def length(self, row: int) -> int:
        """Committed tokens of the row; of one that was extended, unknown."""

    def store(self, token_ids: Sequence[int]) -> None:
        """Adds an output to the store; its last tokens if it is longer than half of it, nothing if it is
        empty or the store is off."""
        kept = as_tokens(token_ids)[max(len(token_ids) - (self._half - 1), 0) :]
        if self._half > 0 and len(kept) > 0:
            self._store_output(np.append(kept, np.int32(SEPARATOR)))

    @abstractmethod
    def _store_output(self, output: Any) -> None:
        """Adds output [m] int32, at most half of the store, separator included."""

    @abstractmethod
    def propose(
        self, rows: Tensor, tokens: Tensor, tail_lens: Tensor, most: Tensor, within: int | None = None
    ) -> Tensor:
        """Writes proposals for texts `rows` [n] into `tokens` [n, window + 1] in place -> how many for each,
        [n]; all int64.

        tokens[i, 0] is the last committed token, which the index has already; the tail is tokens[i, 1 :
        tail_lens[i] + 1]. At most most[i] <= window - tail_lens[i] proposals follow it; all other columns
        stay as they are. `within`: committed tokens that no text has more of, but for those with most[i] = 0.
        """

    def compiled(self, rows: Tensor) -> CompiledLookup | None:
        """For rounds that run together, of the texts that rows [n] int64, which stays where it is, tells when
        they run; None = not compiled."""
        return None

    def agrees(self, row: int, start: int, token_ids: Sequence[int]) -> bool:
        """Whether the row's text, from token `start` on, is that of token_ids, or the beginning of it: what
        is not compiled has no tokens but the host's."""
        return True

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self._num_rows:
            raise ValueError(f"row {row} must be one of {self._num_rows}")

    def _check_tokens(self, row: int, length: int, token_ids: Sequence[int]) -> Any:
        """`token_ids` as an array [m] int32, if the row exists and they fit behind its `length` tokens."""
        self._check_row(row)
        if length + len(token_ids) > self._max_len:
            raise ValueError(
                f"row {row} would have {length} + {len(token_ids)} tokens; it holds at most"
                f" max_len={self._max_len}"
            )
        return as_tokens(token_ids)


def check_shapes(rows: Tensor, tokens: Tensor, tail_lens: Tensor, most: Tensor) -> None:
    """Raises ValueError unless the arguments of `Lookup.propose` fit together."""
    if not (
        tokens.dim() == 2
        and tokens.shape[1] > 0
        and tokens.shape[:1] == rows.shape == tail_lens.shape == most.shape
    ):
        shapes = [list(tensor.shape) for tensor in (rows, tokens, tail_lens, most)]
        raise ValueError(
            f"shapes of rows, tokens, tail_lens and most are {shapes}; they must be [n], [n, window + 1], [n]"
            " and [n]"
        )


def as_tokens(token_ids: Sequence[int]) -> Any:
    tokens = np.asarray(token_ids, np.int64)
    if tokens.size > 0 and tokens.view(np.uint64).max() > _MAX_TOKEN:  # negative ones are huge then
        raise ValueError(f"token ids from {tokens.min()} to {tokens.max()} must lie in 0 .. {_MAX_TOKEN}")
    return tokens.astype(np.int32)
