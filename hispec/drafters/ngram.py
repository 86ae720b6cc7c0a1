"""Prompt lookup: what followed the last tokens when they last stood in the text is proposed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import NgramConfig
from ..decoding.acceptance import Judge, Proposals
from ..decoding.batch import RoundBatch
from ..decoding.draft_tree import DraftTree
from ..decoding.drafter import Draft, Source, Stateless, by, room
from .lookup import make_lookup


class NgramDrafter(Stateless):
    """Looks up to K tokens up in each request's own prompt and output, and in earlier outputs if it keeps any
    (`datastore_tokens`).

    The index of a request stays in one place of the lookup while rows move; `follow` brings it up to date.
    """

    def __init__(
        self, config: NgramConfig, judge: Judge, max_num_seqs: int, max_len: int, device: torch.device
    ) -> None:
        self._judge = judge
        sizes = config.min_size, config.max_size, config.datastore_tokens, config.tokens_per_match
        self._lookup = make_lookup(device, max_num_seqs, max_len, *sizes)
        self._keeps_outputs = config.datastore_tokens > 0
        self._place_of: dict[int, int] = {}  # number of a request -> its place in the lookup
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._is_ahead = False  # whether texts were extended by what the host has not read
        self._places = torch.zeros(
            max_num_seqs, dtype=torch.int64, device=device
        )  # of each row; a graph reads it where it lies

    @property
    def num_bytes(self) -> int:
        return self._lookup.num_bytes

    def follow(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        gone = self._place_of.keys() - {number for number, _ in rows}
        self._free += [self._place_of.pop(number) for number in gone]
        places = []
        for number, token_ids in rows:
            place, is_new = self._place_of.get(number, -1), number not in self._place_of
            if is_new:
                place = self._place_of[number] = self._free.pop()
            if is_new or self._is_ahead:  # ahead of what the host knew: a round may have been lost since
                self._lookup.reset(place, token_ids)
            elif (length := self._lookup.length(place)) < len(token_ids):
                self._lookup.append(place, token_ids[length:])
            places.append(place)
        self._is_ahead = False
        self._places[: len(places)].copy_(torch.tensor(places, dtype=torch.int64))

    def finish(self, number: int, output_token_ids: Sequence[int]) -> None:
        if self._keeps_outputs and output_token_ids:
            self._lookup.store(output_token_ids)

    def advance(self, batch: RoundBatch, counts: Tensor) -> None:
        self._is_ahead = True
        self._lookup.extend(self._places[: batch.num_rows], batch.tokens, counts)

    def propose(self, batch: RoundBatch, first: Tensor, tree: DraftTree) -> Draft:
        counts = self._lookup.propose(
            self._places[: batch.num_rows],
            batch.tokens,
            first,
            room(batch, first, tree),
            batch.max_context_len,
        )
        proposals = Proposals(tree, first, counts)
        self._judge.propose(batch, proposals)
        return Draft(proposals, by(Source.LOOKED_UP, first))
