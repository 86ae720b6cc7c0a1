"""Learns while a job runs what to guess: n-grams of the outputs that have ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..utils.uploads import write
from .lookup import SEPARATOR, as_tokens
from .ngram_counts import count
from .ngram_table import Entries, NgramTable, make_table

_MAX_SIZE = 5  # tokens of a context
_LEAST_COUNT = 3  # places that a context was seen before
_OVERRULES = 10  # such places from which it tells more than what was counted beforehand, in many more answers
_FIRST_TOKENS = 2048  # fewer tell nothing
_GROWTH = 0.25  # outputs are counted again when so many more have come: often enough, and nearly free
_TOKENS_PER_CONTEXT = 8  # places of the table are for that many fewer contexts than tokens
_NUM_PROBES = 32


class NgramLearner:
    """The latest `num_tokens` tokens of outputs, and a table of what follows what in them; where they do not
    say, or after contexts that they have seldom, of what was counted beforehand.

    The table is written in place, between rounds, so that captured graphs read what is learnt.
    """

    def __init__(self, known: NgramTable | None, num_tokens: int, device: torch.device) -> None:
        """known: what was counted beforehand."""
        known = known or make_table(None, {}, device)
        self._known, self._most = known.entries, max(num_tokens // _TOKENS_PER_CONTEXT, _FIRST_TOKENS)
        slots = 1 << (4 * (len(self._known.keys) + self._most)).bit_length()
        self._max_size = max(_MAX_SIZE, known.max_size)
        self.table = NgramTable.empty(
            known.path, self._max_size, slots, _NUM_PROBES, known.vocab_size, device
        )
        self._fill(self._known)
        self._outputs = torch.full((num_tokens,), SEPARATOR, dtype=torch.int32, device=device)
        self._end = self._used = 0  # where the latest output ends, and what was written so far
        self._num_new, self._due = 0, _FIRST_TOKENS

    @property
    def num_bytes(self) -> int:
        known = sum(each.nbytes for each in self._known)
        return self.table.num_bytes + self._outputs.nbytes + known

    def add(self, output_token_ids: Sequence[int]) -> None:
        """Keeps an output, its last tokens if it is longer than all that is kept, in place of the oldest
        ones; learns from all of them, if enough is new."""
        size = len(self._outputs)
        kept = np.append(as_tokens(output_token_ids[-(size - 1) :]), np.int32(SEPARATOR))
        if self._end + len(kept) > size:
            self._outputs[self._end :] = SEPARATOR  # else what is there could stay for ever
            self._end = 0
        write(self._outputs[self._end : self._end + len(kept)], torch.from_numpy(kept))
        self._end += len(kept)
        self._used = max(self._used, self._end)
        self._num_new += len(kept)
        if self._num_new >= self._due:
            self._num_new, self._due = 0, max(int(_GROWTH * self._used), _FIRST_TOKENS)
            self._learn()

    def _learn(self) -> None:
        outputs = self._outputs[: self._used].long()
        known = self._known.keys
        counts = count(outputs, outputs != SEPARATOR, self._max_size, _LEAST_COUNT, wanted=known)
        tells = (counts.totals >= _OVERRULES) | ~torch.isin(counts.keys, known)
        often = counts.totals[tells].argsort(stable=True)[-self._most :]
        learnt = Entries(*(each[tells][often] for each in (counts.keys, counts.tokens, counts.shares)))
        others = ~torch.isin(known, learnt.keys)
        entries = [torch.cat((old[others], new)) for old, new in zip(self._known, learnt, strict=True)]
        self._fill(Entries(*entries))

    def _fill(self, entries: Entries) -> None:
        """Writes the table; without the first of them, should there be no room for all."""
        while not self.table.fill(entries):
            entries = Entries(*(each[1 + len(each) // 8 :] for each in entries))
