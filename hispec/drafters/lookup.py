"""Prompt lookup: proposes what followed when the text's latest tokens stood somewhere before. No model, so
nearly free.

A row's text is its committed tokens, then the `tail` of tentative ones. The longest suffix of max_size to
min_size tokens that occurred before decides; among its occurrences, those in the text itself come before
those in the store, and recent ones before old ones. Proposals are what follows it there. In the text that is
read past the end into the proposals themselves, as copies in LZ77 are, so that a period repeats; in the store
it stops where an output ends.

A longer match is a surer one: with `per_match` a row gets at most so many proposals for each token that is
the same before both ends, be they more than max_size.

The store holds outputs of earlier requests, shared by all rows: two halves, each output followed by a
separator. When one does not fit into the current half, the previous half is dropped, and the current one
takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

SEPARATOR = -1
MOST_MATCHED = 16  # tokens of a match that are counted for `per_match`
_MAX_TOKEN = 2**31 - 1


class Lookup(Protocol):
    """An index over `num_rows` texts of at most `max_len` committed tokens."""

    @property
    def num_bytes(self) -> int: ...

    def reset(self, row: int, token_ids: Sequence[int]) -> None:
        """The row's committed text anew. ValueError, and nothing changed, beyond max_len; as for `append`."""

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        """Further committed tokens."""

    def extend(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """As `append` of tokens[i, 1 : counts[i] + 1] to row rows[i], without the host's knowing how many:
        before the next `append` to any of these rows comes a `reset`."""

    def length(self, row: int) -> int:
        """Committed tokens of the row; of one that was extended, unknown."""

    def store(self, token_ids: Sequence[int]) -> None:
        """An output joins the store; its last tokens if it is longer than half of it, nothing if it is empty
        or the store is off."""

    def propose(
        self, rows: Tensor, tokens: Tensor, tail_lens: Tensor, most: Tensor, within: int | None = None
    ) -> Tensor:
        """Writes proposals for texts `rows` [n] into `tokens` [n, window + 1] in place -> how many for each,
        [n]; all int64.

        tokens[i, 0] is the last committed token, which the index has already; the tail is tokens[i, 1 :
        tail_lens[i] + 1]. At most most[i] <= window - tail_lens[i] proposals follow it; all other places stay
        as they are. `within`: committed tokens that no text has more of, but for those with most[i] = 0.
        """


class LookupIndex:
    """On a CPU: incremental, so that neither a proposal's cost nor that of a committed token grows with the
    text."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        min_size: int,
        max_size: int,
        store_tokens: int = 0,
        per_match: int | None = None,
    ) -> None:
        from . import lookup_numba  # here, since a machine with a GPU need not have numba

        check_sizes(num_rows, max_len, min_size, max_size, store_tokens, per_match)
        self._per_match = per_match or 0
        self._num_rows, self._max_len, self._min_size, self._half = (
            num_rows,
            max_len,
            min_size,
            store_tokens // 2,
        )
        self._kernels = lookup_numba
        self._texts = lookup_numba.make_texts(num_rows, max_len, max_size - min_size + 1)
        self._store = lookup_numba.make_texts(2, self._half, max_size - min_size + 1)
        self._current = 0

    @property
    def num_bytes(self) -> int:
        """Memory reserved; the system maps what texts reach."""
        return self._texts.num_bytes + self._store.num_bytes

    @property
    def num_probes(self) -> int:
        """Places of hash tables looked at so far, by all methods."""
        return int(self._texts.probes[0] + self._store.probes[0])

    def reset(self, row: int, token_ids: Sequence[int]) -> None:
        added = checked_tokens(row, self._num_rows, 0, token_ids, self._max_len)
        self._kernels.clear(self._texts, row)
        self._kernels.append(self._texts, row, added, self._min_size)

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        added = checked_tokens(row, self._num_rows, self.length(row), token_ids, self._max_len)
        self._kernels.append(self._texts, row, added, self._min_size)

    def extend(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
        for row, token_ids, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            room = self._max_len - self.length(row)
            self.append(row, token_ids[1 : min(count, room) + 1])

    def length(self, row: int) -> int:
        check_row(row, self._num_rows)
        return int(self._texts.lengths[row])

    def store(self, token_ids: Sequence[int]) -> None:
        output = output_to_store(token_ids, self._half)
        if len(output) == 0:
            return
        if self._store.lengths[self._current] + len(output) > self._half:
            self._current = 1 - self._current
            self._kernels.clear(self._store, self._current)
        self._kernels.append(self._store, self._current, output, self._min_size)

    def propose(
        self, rows: Tensor, tokens: Tensor, tail_lens: Tensor, most: Tensor, within: int | None = None
    ) -> Tensor:
        check_shapes(rows, tokens, tail_lens, most)
        counts = torch.empty_like(rows)
        wrong = self._kernels.propose(
            self._texts,
            self._store,
            self._current,
            self._min_size,
            self._per_match,
            rows.numpy(),
            tokens.numpy(),
            tail_lens.numpy(),
            most.numpy(),
            counts.numpy(),
        )
        if wrong >= 0:
            raise ValueError(
                f"proposal {wrong}: row {int(rows[wrong])} of {self._num_rows}, {int(tail_lens[wrong])}"
                f" tentative tokens and {int(most[wrong])} proposals in a window of {tokens.shape[1] - 1};"
                " the row must exist, and both counts be at least 0 and fit into the window"
            )
        return counts


def make_lookup(
    device: torch.device,
    num_rows: int,
    max_len: int,
    min_size: int,
    max_size: int,
    store_tokens: int = 0,
    per_match: int | None = None,
) -> Lookup:
    """The incremental index on a CPU, comparison of all positions elsewhere."""
    if device.type == "cpu":
        return LookupIndex(num_rows, max_len, min_size, max_size, store_tokens, per_match)
    from .lookup_torch import TensorLookup

    return TensorLookup(device, num_rows, max_len, min_size, max_size, store_tokens, per_match)


def check_sizes(
    num_rows: int, max_len: int, min_size: int, max_size: int, store_tokens: int, per_match: int | None
) -> None:
    if per_match is not None and per_match < 1:
        raise ValueError(f"per_match={per_match} must be at least 1, or None for no limit")
    if num_rows < 1 or max_len < 1:
        raise ValueError(f"num_rows={num_rows} and max_len={max_len} must be at least 1")
    if not 1 <= min_size <= max_size:
        raise ValueError(f"min_size={min_size} must be at least 1, and at most max_size={max_size}")
    least = 2 * (max_size + 2)  # in each half the longest n-gram, a token that follows it, and a separator
    if store_tokens != 0 and store_tokens < least:
        raise ValueError(
            f"store_tokens={store_tokens} must be 0 (no store) or at least {least} for n-grams of {max_size}"
            " tokens"
        )


def check_row(row: int, num_rows: int) -> None:
    if not 0 <= row < num_rows:
        raise ValueError(f"row {row} must be one of {num_rows}")


def check_shapes(rows: Tensor, tokens: Tensor, tail_lens: Tensor, most: Tensor) -> None:
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


def checked_tokens(row: int, num_rows: int, length: int, token_ids: Sequence[int], max_len: int) -> Any:
    """`token_ids` as an array [m] int32, if the row exists and they fit behind its `length` tokens."""
    check_row(row, num_rows)
    if length + len(token_ids) > max_len:
        raise ValueError(
            f"row {row} would have {length} + {len(token_ids)} tokens; it holds at most max_len={max_len}"
        )
    return _as_tokens(token_ids)


def output_to_store(token_ids: Sequence[int], half: int) -> Any:
    """What the store takes of an output, an array [m + 1] int32 with its separator, or [0] if nothing."""
    kept = _as_tokens(token_ids)[max(len(token_ids) - (half - 1), 0) :]
    return np.append(kept, np.int32(SEPARATOR)) if half > 0 and len(kept) > 0 else kept[:0]


def _as_tokens(token_ids: Sequence[int]) -> Any:
    tokens = np.asarray(token_ids, np.int64)
    if tokens.size > 0 and tokens.view(np.uint64).max() > _MAX_TOKEN:  # negative ones are huge then
        raise ValueError(f"token ids from {tokens.min()} to {tokens.max()} must lie in 0 .. {_MAX_TOKEN}")
    return tokens.astype(np.int32)
