"""N-grams counted beforehand, as a hash table on the device: what most often follows the last few tokens.

A guess is that of the longest context which the table has. Guesses are chained, each taken as the text of the
next, as long as the product of their shares is at least the confidence that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ee_models.checkpoint.ngram_file import SHARES, Ngrams

EMPTY = 0
_FACTOR = 0x9E3779B97F4A7C15
FACTOR = _FACTOR - (1 << 64)  # the same bits, as a signed number
HALF = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class NgramTable:
    """One table for contexts of all sizes, in open addressing with linear probing.

    path        the folder, as plans name it; None = the one that comes with the model
    max_size    tokens of the longest contexts
    keys        [slots + num_probes] int64: the hash of a context, EMPTY where there is none. A context stands
                in one of the num_probes slots from hash & (slots - 1) on, with no empty one before it
    tokens      [slots + num_probes] int32: what follows it
    shares      [slots + num_probes] float32: how often it does, 0 to 1
    slots       a power of two
    vocab_size  one more than the largest token that is guessed
    """

    path: str | None
    max_size: int
    keys: Tensor
    tokens: Tensor
    shares: Tensor
    slots: int
    num_probes: int
    vocab_size: int

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.tokens.nbytes + self.shares.nbytes


def make_table(path: str | None, ngrams: Mapping[int, Ngrams], device: torch.device) -> NgramTable:
    """The table of n-grams that are given by size."""
    hashed = [hash_contexts(np.asarray(each.contexts, np.int64)) for each in ngrams.values()]
    keys = np.concatenate([np.zeros(0, np.int64), *hashed])
    tokens = np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in ngrams.values())])
    shares = np.concatenate([np.zeros(0, np.uint8), *(each.shares for each in ngrams.values())])
    slots = 1 << (2 * len(keys)).bit_length()
    # In the order of where they would be, each goes there or behind the one before.
    home = keys & (slots - 1)
    order = np.argsort(home, kind="stable")
    steps = np.arange(len(keys))
    places = np.maximum.accumulate(home[order] - steps) + steps if len(keys) else steps
    num_probes = int((places - home[order]).max(initial=0)) + 1

    def spread(values: Any, dtype: torch.dtype) -> Tensor:
        made = torch.zeros(slots + num_probes, dtype=dtype)
        made[torch.from_numpy(places)] = torch.from_numpy(values[order].astype(np.int64)).to(dtype)
        return made

    return NgramTable(
        path,
        max(ngrams, default=0),
        spread(keys, torch.int64).to(device),
        spread(tokens, torch.int32).to(device),
        (spread(shares, torch.float32) / SHARES).to(device),
        slots,
        num_probes,
        int(tokens.max(initial=-1)) + 1,
    )


def hash_contexts(contexts: Any) -> Any:
    """[n] int64, of contexts [n, size] int64; never EMPTY. Beginning with the last token, so that one more
    before it goes on from there."""
    hashed = np.zeros(len(contexts), np.uint64)
    for back in range(contexts.shape[1] - 1, -1, -1):
        hashed = (hashed + contexts[:, back].astype(np.uint64) + np.uint64(1)) * np.uint64(_FACTOR)
        hashed ^= hashed >> np.uint64(32)
    keys = hashed.view(np.int64)
    return np.where(keys == EMPTY, 1, keys)


def guess(
    table: NgramTable, texts: Tensor, ends: Tensor, most: Tensor, confidence: float, num_steps: int
) -> Tensor:
    """Chains guesses after the first ends[i] tokens of texts[i], at most most[i] <= num_steps of them, and
    writes them there -> how many, [n] int64. In operations of fixed shape.

    texts   [n, width] int64; ends[i] + most[i] is at most the width
    ends    [n] int64, as is most
    """
    counts, sure = torch.zeros_like(ends), torch.ones(len(texts), device=texts.device)
    probes, last = torch.arange(table.num_probes, device=texts.device), texts.shape[1] - 1
    for _ in range(num_steps):
        at, hashed = ends + counts, torch.zeros_like(ends)
        token, share = torch.zeros_like(ends), torch.zeros_like(sure)
        for back in range(table.max_size):
            before = texts.gather(1, (at - 1 - back).clamp(0, last).unsqueeze(1)).squeeze(1)
            hashed = (hashed + before + 1) * FACTOR
            hashed = hashed ^ ((hashed >> 32) & HALF)
            key = torch.where(hashed == EMPTY, 1, hashed)
            places = (key & (table.slots - 1)).unsqueeze(1) + probes
            same = table.keys[places] == key.unsqueeze(1)
            is_there = same.any(1) & (at > back)
            place = places.gather(1, same.to(torch.int8).argmax(1, keepdim=True)).squeeze(1)
            # Of a longer context: the better guess.
            token = torch.where(is_there, table.tokens[place].long(), token)
            share = torch.where(is_there, table.shares[place], share)
        sure = sure * share
        goes_on = (sure >= confidence) & (counts < most)
        column = at.clamp(max=last).unsqueeze(1)
        kept = texts.gather(1, column)
        texts.scatter_(1, column, torch.where(goes_on.unsqueeze(1), token.unsqueeze(1), kept))
        counts = counts + goes_on
    return counts
