"""Prompt lookup as a drafter: proposes again what followed the text's latest tokens when they last
occurred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..config import NgramConfig
from ..decoding.acceptance import Proposals, Source
from ..decoding.batch import RoundBatch
from ..decoding.draft_tree import DraftTree
from ..decoding.drafter import CompiledDrafter, Draft, Drafter, count_allowed
from ..utils.uploads import write
from .lookup import Guesses, Lookup
from .ngram_learner import NgramLearner
from .ngram_table import NgramTable


def make_lookup(
    device: torch.device,
    num_rows: int,
    max_len: int,
    min_size: int,
    max_size: int,
    store_tokens: int = 0,
    match_confidence: float | None = None,
    guesses: Guesses | None = None,
) -> Lookup:
    """The incremental index on a CPU, comparison of all positions elsewhere."""
    sizes = num_rows, max_len, min_size, max_size, store_tokens, match_confidence, guesses
    if device.type == "cpu":
        from .lookup_numba import LookupIndex  # here, since a machine with a GPU need not have numba

        return LookupIndex(*sizes)
    from .lookup_torch import TensorLookup

    return TensorLookup(device, *sizes)


class NgramDrafter(Drafter):
    """Looks up to K tokens up in each request's own prompt and output, and in earlier outputs if it keeps any
    (`datastore_tokens`); where that says nothing surer, it guesses by a table if it is to
    (`guess_confidence`), of n-grams that were counted beforehand, or that it learns from outputs that have
    ended (`learn_tokens`).

    The text of a request stays in one row of the index while its row of the batch changes; `follow` brings it
    up to date."""

    def __init__(
        self,
        config: NgramConfig,
        max_num_seqs: int,
        max_len: int,
        device: torch.device,
        tables: Sequence[NgramTable] = (),
    ) -> None:
        """tables: on `device`, the one that config names among them if it needs one."""
        self._learner: NgramLearner | None = None
        guesses = None
        if config.guess_confidence is not None:
            by_path = {table.path: table for table in tables}
            if config.learn_tokens > 0:
                known = by_path[config.guess_path] if config.needs_table else by_path.get(config.guess_path)
                self._learner = NgramLearner(known, config.learn_tokens, device)
                table = self._learner.table
            else:
                table = by_path[config.guess_path]
            guesses = Guesses(table, config.guess_confidence)
        sizes = config.min_size, config.max_size, config.datastore_tokens, config.match_confidence
        self._lookup = make_lookup(device, max_num_seqs, max_len, *sizes, guesses)
        self._keeps_outputs = config.datastore_tokens > 0
        self._num_rows = max_num_seqs
        self._index_row_of: dict[int, int] = {}  # number of a request -> its row of the index
        self._numbers: list[int | None] = []  # of the request in each row of the batch
        self._is_ahead = False  # whether texts were extended by what the host has not read
        self._known: dict[int, int] = {}  # number of a request -> tokens of it when `follow` last came
        # Of each row of the batch; captured graphs read it at its address.
        self._index_rows = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._written: list[int] = []  # what `follow` has written there, if nothing has since

    @property
    def num_bytes(self) -> int:
        return self._lookup.num_bytes + (0 if self._learner is None else self._learner.num_bytes)

    def follow(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        for number in self._index_row_of.keys() - {number for number, _ in rows}:
            del self._index_row_of[number]
        index_rows = []
        free: list[int] | None = None
        for number, token_ids in rows:
            if is_new := number not in self._index_row_of:
                free = self._free_rows() if free is None else free
                self._index_row_of[number] = free.pop()
            index_row = self._index_row_of[number]
            # Ahead of what the host knew: a round may have been lost since.
            if is_new or self._is_ahead or not self._agrees(number, index_row, token_ids):
                self._lookup.reset(index_row, token_ids)
            elif (length := self._lookup.length(index_row)) < len(token_ids):
                self._lookup.append(index_row, token_ids[length:])
            index_rows.append(index_row)
        self._known = {number: len(token_ids) for number, token_ids in rows}
        self._is_ahead = False
        self._numbers = [number for number, _ in rows]
        if index_rows != self._written:  # seldom; torch's calls are dear once a pass has filled the caches
            self._written = []  # if an interrupt comes now, nobody knows
            write(self._index_rows[: len(index_rows)], torch.tensor(index_rows, dtype=torch.int64))
            self._written = index_rows

    def _agrees(self, number: int, index_row: int, token_ids: Sequence[int]) -> bool:
        """Whether what compiled rounds have added to the text was committed."""
        known = self._known.get(number)
        if known is None:  # an interrupt came before the row had its text
            return False
        return self._lookup.length(index_row) == known or self._lookup.agrees(index_row, known, token_ids)

    def compiled(self) -> CompiledDrafter | None:
        lookup = self._lookup.compiled(self._index_rows) if type(self) is NgramDrafter else None
        return None if lookup is None else CompiledDrafter(lookup)

    def join(self, rows: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        self._written = []
        self._numbers += [None] * (max(rows) + 1 - len(self._numbers))
        for row, (number, token_ids) in rows.items():
            if number in self._numbers:  # `follow` had it in another row, which is nobody's since
                self._numbers[self._numbers.index(number)] = None
            if (gone := self._numbers[row]) is not None:
                self._index_row_of.pop(gone, None)
            if number not in self._index_row_of:
                self._index_row_of[number] = self._free_rows().pop()
            self._numbers[row], index_row = number, self._index_row_of[number]
            self._lookup.reset(index_row, token_ids)
            self._index_rows[row].fill_(index_row)

    def _free_rows(self) -> list[int]:
        """Rows of the index that no request has, the first last. Not kept: of a list of them an interrupt
        could lose one."""
        taken = set(self._index_row_of.values())
        return [row for row in reversed(range(self._num_rows)) if row not in taken]

    def finish(self, number: int, output_token_ids: Sequence[int]) -> None:
        if self._keeps_outputs and output_token_ids:
            self._lookup.store(output_token_ids)
        if self._learner is not None and output_token_ids:
            self._learner.add(output_token_ids)

    def advance(self, batch: RoundBatch, counts: Tensor) -> None:
        self._is_ahead = True
        self._lookup.extend(self._index_rows[: batch.num_rows], batch.tokens, counts)

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        counts = self._lookup.propose(
            self._index_rows[: batch.num_rows],
            batch.tokens,
            first,
            count_allowed(batch, first, tree),
            batch.max_context_len,
        )
        return Draft(Proposals(tree, first, counts), Source.LOOKED_UP)
