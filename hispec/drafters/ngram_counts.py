"""Counts n-grams: what follows the last few tokens most often, and how often it does.

In torch, where the texts lie, since a job that learns from its own outputs counts again and again
(ngram_learner.py): by sorting hashes, a size of context at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .lookup import SEPARATOR
from .ngram_table import as_keys, hash_on

_LEAST_SHARE = 0.1  # of what is worth knowing
_SAME_SHARE = 0.05  # a longer context that differs by less tells nothing new
_UNSEEN = 2  # added to how often a context was seen: of few, none is sure


class Counts(NamedTuple):
    """N-grams, shorter contexts first; each context stands there once.

    keys    [n] int64: of the contexts, as NgramTable has them
    tokens  [n] int64: what follows most often; of equals the smallest
    shares  [n] float64: in which share of places it does
    totals  [n] int64: places that the context was seen before
    sizes   [n] int64: tokens of the context
    places  [n] int64: a place of the text that the context stands before
    """

    keys: Tensor
    tokens: Tensor
    shares: Tensor
    totals: Tensor
    sizes: Tensor
    places: Tensor


def count(
    text: Tensor, is_counted: Tensor, max_size: int, least_count: int, wanted: Tensor | None = None
) -> Counts:
    """What stands at the places of `text` [n] int64 where is_counted [n] holds, by the context of 1 to
    max_size tokens before it; contexts end at a SEPARATOR.

    Contexts seen less than least_count times are left out, and those that tell nothing beside the next
    shorter one that is not, unless their keys are among `wanted` [m] int64.
    """
    found = Counts(*(text.new_zeros(0, dtype=kind) for kind in _KINDS))
    # Of each place: what the longest context found so far says of it.
    known, hashed = torch.full_like(text, -1), torch.zeros_like(text)
    known_share = torch.zeros_like(text, dtype=torch.float64)
    places = (is_counted & (text != SEPARATOR)).nonzero().squeeze(1)
    places = places[text[places].argsort(stable=True)]
    for size in range(1, max_size + 1):
        places = places[places >= size]
        before = text[places - size]
        places, before = places[before != SEPARATOR], before[before != SEPARATOR]
        if not len(places):
            break
        hashed[places] = hash_on(hashed[places], before)
        # What has a context in common is together, in the order of what follows.
        keys, order = as_keys(hashed[places]).sort(stable=True)
        at = places[order]
        follows = text[at]
        is_context = _differs(keys)
        is_ngram = is_context | _differs(follows)
        context = is_context.cumsum(0) - 1
        totals = torch.bincount(context)
        first, most = _most_frequent(is_ngram, context, len(totals))
        places_of, tokens, shares = at[first], follows[first], most.double() / (totals + _UNSEEN)
        shorter, shorter_share = known[places_of], known_share[places_of]
        is_known = (tokens == shorter) & ((shares - shorter_share).abs() <= _SAME_SHARE)
        is_often = totals >= least_count
        if wanted is not None:
            is_known &= ~torch.isin(keys[first], wanted)
        is_kept = is_often & ~is_known & (torch.maximum(shares, shorter_share) >= _LEAST_SHARE)
        sizes = torch.full_like(totals, size)
        made = Counts(keys[first], tokens, shares, totals, sizes, places_of)
        found = Counts(*(torch.cat((old, new[is_kept])) for old, new in zip(found, made, strict=True)))
        among = is_kept[context]
        known[at[among]], known_share[at[among]] = tokens[context[among]], shares[context[among]]
        # A longer context is no more frequent.
        goes_on = torch.zeros(len(text), dtype=torch.bool, device=text.device)
        goes_on[at[is_often[context]]] = True
        places = places[goes_on[places]]
    return found


_KINDS = torch.int64, torch.int64, torch.float64, torch.int64, torch.int64, torch.int64


def _differs(values: Tensor) -> Tensor:
    """Where a value differs from the one before, the first included: [n] bool."""
    return torch.cat((values.new_ones(1, dtype=torch.bool), values[1:] != values[:-1]))


def _most_frequent(is_ngram: Tensor, context: Tensor, num_contexts: int) -> tuple[Tensor, Tensor]:
    """Of each context: where its most frequent n-gram begins, the first of equals, and how often that is."""
    begins = is_ngram.nonzero().squeeze(1)
    counts = torch.diff(begins, append=begins.new_tensor([len(context)]))
    of = context[begins]
    most = of.new_zeros(num_contexts).scatter_reduce(0, of, counts, "amax")
    is_best = counts == most[of]
    first = torch.full_like(most, len(context)).scatter_reduce(0, of[is_best], begins[is_best], "amin")
    return first, most
