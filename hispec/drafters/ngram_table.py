"""N-grams as a hash table on the device: what most often follows the last few tokens.

A guess is that of the longest context which the table has (`look_up`); lookup.py chains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ee_models.checkpoint.ngram_file import SHARES, Ngrams

EMPTY = 0
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number without a pattern, as a signed one
HALF = 0xFFFFFFFF


class Entries(NamedTuple):
    """What a table says: keys [n] int64 of contexts, each once, tokens [n] that follow them, shares [n]."""

    keys: Tensor
    tokens: Tensor
    shares: Tensor


@dataclass(frozen=True, eq=False)
class NgramTable:
    """One table for contexts of all sizes, in open addressing with linear probing.

    path        the folder, as plans name it; None = the one that comes with the model, or none
    max_size    tokens of the longest contexts
    keys        [slots + num_probes] int64: the hash of a context, EMPTY where there is none. A context stands
                in one of the num_probes slots from hash & (slots - 1) on, with no empty one before it
    tokens      [slots + num_probes] int32: what follows it
    shares      [slots + num_probes] float32: how often it does, 0 to 1
    slots       a power of two
    vocab_size  one more than the largest token that is guessed; of a table that learns, than that of the one
                whose entries it begins with
    """

    path: str | None
    max_size: int
    keys: Tensor
    tokens: Tensor
    shares: Tensor
    slots: int
    num_probes: int
    vocab_size: int

    @classmethod
    def empty(
        cls,
        path: str | None,
        max_size: int,
        slots: int,
        num_probes: int,
        vocab_size: int,
        device: torch.device,
    ) -> NgramTable:
        keys = torch.full((slots + num_probes,), EMPTY, dtype=torch.int64, device=device)
        tokens = torch.zeros_like(keys, dtype=torch.int32)
        shares = torch.zeros_like(keys, dtype=torch.float32)
        return cls(path, max_size, keys, tokens, shares, slots, num_probes, vocab_size)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.tokens.nbytes + self.shares.nbytes

    @property
    def entries(self) -> Entries:
        is_there = self.keys != EMPTY
        return Entries(self.keys[is_there], self.tokens[is_there], self.shares[is_there])

    def fill(self, entries: Entries) -> bool:
        """Replaces what the table says, in place, since captured graphs read it at its address -> whether
        there was room; else nothing has changed."""
        order, places, num_probes = _places(entries.keys, self.slots)
        if num_probes > self.num_probes:
            return False
        self.keys.zero_()  # first, and keys last: whatever an interrupt leaves can be read
        self.tokens[places] = entries.tokens[order].to(torch.int32)
        self.shares[places] = entries.shares[order].to(torch.float32)
        self.keys[places] = entries.keys[order]
        return True


def make_table(path: str | None, ngrams: Mapping[int, Ngrams], device: torch.device) -> NgramTable:
    """The table of n-grams that are given by size."""
    none = np.zeros(0, np.int64)
    tokens, shares = (
        torch.from_numpy(np.concatenate([none, *(getattr(each, name) for each in ngrams.values())]))
        for name in ("tokens", "shares")
    )
    contexts = (torch.from_numpy(np.asarray(each.contexts, np.int64)) for each in ngrams.values())
    keys = torch.cat([torch.from_numpy(none), *(hash_contexts(each) for each in contexts)])
    slots = 1 << (2 * len(keys)).bit_length()
    _, _, num_probes = _places(keys, slots)
    vocab_size = 1 + (int(tokens.max()) if len(keys) else -1)
    table = NgramTable.empty(path, max(ngrams, default=0), slots, num_probes, vocab_size, device)
    table.fill(Entries(keys.to(device), tokens.to(device), (shares / SHARES).to(device)))
    return table


def _places(keys: Tensor, slots: int) -> tuple[Tensor, Tensor, int]:
    """Where keys stand, keys[order[i]] at places[i], and how many slots are probed for one. In the order of
    where they would be, each goes there or behind the one before."""
    home, order = (keys & (slots - 1)).sort(stable=True)
    steps = torch.arange(len(keys), device=keys.device)
    places = (home - steps).cummax(0).values + steps
    return order, places, 1 + (int((places - home).max()) if len(keys) else 0)


def hash_contexts(contexts: Tensor) -> Tensor:
    """The keys [n] of contexts [n, size] int64."""
    hashed = torch.zeros_like(contexts[:, 0])
    for back in range(contexts.shape[1] - 1, -1, -1):
        hashed = hash_on(hashed, contexts[:, back])
    return as_keys(hashed)


def hash_on(hashed: Tensor, token: Tensor) -> Tensor:
    """The hash of a context with one more token before it; both [n] int64. A context of none has 0."""
    hashed = (hashed + token + 1) * FACTOR
    return hashed ^ ((hashed >> 32) & HALF)


def as_keys(hashed: Tensor) -> Tensor:
    return torch.where(hashed == EMPTY, 1, hashed)


def look_up(table: NgramTable, texts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """What most often follows the first ends[i] tokens of texts[i], by the longest context that the table
    has, and in which share of places: [n] int64 and float32; a share of 0 where it has none. In operations of
    fixed shape.

    texts   [n, width] int64
    ends    [n] int64, at most the width
    """
    probes, last = torch.arange(table.num_probes, device=texts.device), texts.shape[1] - 1
    token = torch.zeros_like(ends)
    share = torch.zeros(len(ends), dtype=torch.float32, device=texts.device)
    hashed = torch.zeros_like(ends)
    for back in range(table.max_size):
        before = texts.gather(1, (ends - 1 - back).clamp(0, last).unsqueeze(1)).squeeze(1)
        hashed = hash_on(hashed, before)
        key = as_keys(hashed)
        places = (key & (table.slots - 1)).unsqueeze(1) + probes
        same = table.keys[places] == key.unsqueeze(1)
        is_there = same.any(1) & (ends > back)
        place = places.gather(1, same.to(torch.int8).argmax(1, keepdim=True)).squeeze(1)
        # Of a longer context: the better guess.
        token = torch.where(is_there, table.tokens[place].long(), token)
        share = torch.where(is_there, table.shares[place], share)
    return token, share
