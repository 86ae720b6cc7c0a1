"""Prompt lookup on a GPU by two kernels, instead of operations over all that is searched: the
twin of `TensorLookup.propose`.

What is searched is one line of columns: the store, then the row's text, then the tail. The first kernel finds
the best match within each chunk of it, the second takes the best of these and writes what follows it, or
what is guessed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ee_models.kernels.triton_math import unspecialised_jit

from .lookup import MOST_MATCHED, RIVAL, SEPARATOR, Guesses
from .ngram_table import EMPTY, FACTOR, HALF

_CHUNK, _NUM_WARPS = 1024, 4
_SEPARATOR, _MOST_MATCHED = tl.constexpr(SEPARATOR), tl.constexpr(MOST_MATCHED)
_NO_MATCH, _RIVAL = tl.constexpr(-1), tl.constexpr(RIVAL)
_EMPTY, _FACTOR, _HALF = tl.constexpr(EMPTY), tl.constexpr(FACTOR), tl.constexpr(HALF)
_SIZE_BITS = tl.constexpr(32)  # a match's rank is its size above these, and its column below


@triton.jit
def _read(
    column: tl.tensor,
    wanted: tl.tensor,
    store: tl.tensor,
    text: tl.tensor,
    tail: tl.tensor,
    num_stored: tl.tensor,
    length: tl.tensor,
    total: tl.tensor,
) -> tl.tensor:
    """The tokens in these columns, where wanted; the separator elsewhere, and where there are none."""
    position = column - num_stored
    in_store, in_text = position < 0, (position >= 0) & (position < length)
    in_tail = (position >= length) & (position < total)
    stored = tl.load(store + column, mask=wanted & in_store & (column >= 0), other=_SEPARATOR)
    written = tl.load(text + position, mask=wanted & in_text, other=_SEPARATOR)
    tentative = tl.load(tail + position - length, mask=wanted & in_tail, other=_SEPARATOR).to(tl.int32)
    return tl.where(in_store, stored, tl.where(in_text, written, tentative))


@unspecialised_jit
def _search(
    rows: tl.tensor,
    lengths: tl.tensor,
    texts: tl.tensor,
    store: tl.tensor,
    tokens: tl.tensor,
    tail_lens: tl.tensor,
    best: tl.tensor,
    num_stored: int,
    max_len: int,
    within: int,
    width: int,
    num_chunks: int,
    MAX_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The best match of a row that ends in one chunk of columns."""
    at, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + at)
    length = tl.minimum(tl.load(lengths + row), within).to(tl.int32)
    total = length + tl.load(tail_lens + at).to(tl.int32)
    last, first = num_stored + total - 1, chunk * CHUNK
    text, tail = texts + row * max_len, tokens + at * width + 1
    rank = tl.full((), _NO_MATCH, tl.int64)
    if first < last:
        column = first + tl.arange(0, CHUNK)
        follows = _read(column + 1, column + 1 < num_stored, store, text, tail, num_stored, length, total)
        same = tl.where(column < num_stored, follows != _SEPARATOR, column < last)
        size = tl.zeros((CHUNK,), tl.int64)
        for back in tl.static_range(MAX_SIZE):
            token = _read(last - back, total > back + 1, store, text, tail, num_stored, length, total)
            before = _read(column - back, same, store, text, tail, num_stored, length, total)
            same = same & (before == token) & (total > back + 1)
            size += same
        rank = tl.max(tl.where(size > 0, (size << _SIZE_BITS) + column, _NO_MATCH), axis=0)
    tl.store(best + at * num_chunks + chunk, rank)


@triton.jit
def _guess(
    recent: tl.tensor,
    place: tl.tensor,
    probe: tl.tensor,
    end: tl.tensor,
    keys: tl.tensor,
    table_tokens: tl.tensor,
    shares: tl.tensor,
    slots: int,
    num_probes: int,
    MAX_SIZE: tl.constexpr,
    RING: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(token, share) of the longest context before position `end`; a share of 0 where there is none."""
    token, share, hashed = tl.full((), 0, tl.int64), tl.full((), 0, tl.float32), tl.full((), 0, tl.int64)
    for back in tl.static_range(MAX_SIZE):
        last = end - 1 - back
        before = tl.sum(tl.where(place == (last & (RING - 1)), recent, 0), axis=0)
        hashed = (hashed + before + 1) * _FACTOR
        hashed = hashed ^ ((hashed >> 32) & _HALF)
        key = tl.where(hashed == _EMPTY, 1, hashed)
        slot = (key & (slots - 1)) + probe
        same = tl.load(keys + slot, mask=probe < num_probes, other=_EMPTY) == key
        # A context has one slot. Of a longer one: the better guess.
        is_there = tl.max(same.to(tl.int32), axis=0) > 0
        follows = tl.sum(tl.load(table_tokens + slot, mask=same, other=0).to(tl.int64), axis=0)
        token = tl.where(is_there, follows, token)
        share = tl.where(is_there, tl.sum(tl.load(shares + slot, mask=same, other=0.0), axis=0), share)
    return token, share


@unspecialised_jit
def _propose(
    rows: tl.tensor,
    lengths: tl.tensor,
    texts: tl.tensor,
    store: tl.tensor,
    tokens: tl.tensor,
    tail_lens: tl.tensor,
    most: tl.tensor,
    best: tl.tensor,
    counts: tl.tensor,
    likely: tl.tensor,
    keys: tl.tensor,
    table_tokens: tl.tensor,
    shares: tl.tensor,
    num_stored: int,
    max_len: int,
    within: int,
    width: int,
    num_chunks: int,
    slots: int,
    num_probes: int,
    match_confidence: float,
    guess_confidence: float,
    MIN_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    MAX_SIZE: tl.constexpr,
    RING: tl.constexpr,
    PROBES: tl.constexpr,
) -> None:
    """Proposals of a row, written after its tail: what follows its best match, and guesses of contexts of up
    to MAX_SIZE tokens, 0 = there are none. RING: a power of two from MAX_SIZE on."""
    at, chunk, step = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS), tl.arange(0, STEPS)
    row, tail_len = tl.load(rows + at), tl.load(tail_lens + at).to(tl.int32)
    length = tl.minimum(tl.load(lengths + row), within).to(tl.int32)
    total = length + tail_len
    last, text, tail = num_stored + total - 1, texts + row * max_len, tokens + at * width + 1
    rank = tl.max(tl.load(best + at * num_chunks + chunk, mask=chunk < num_chunks, other=_NO_MATCH), axis=0)
    copies = (rank >> _SIZE_BITS) >= MIN_SIZE
    end = tl.where(copies, rank & 0xFFFFFFFF, 0).to(tl.int32)
    limit = tl.minimum(tl.load(most + at), width - 1 - tail_len).to(tl.int32)
    back = tl.arange(0, _MOST_MATCHED)
    is_there = (back < total) & (back <= end)
    ours = _read(last - back, is_there, store, text, tail, num_stored, length, total)
    theirs = _read(end - back, is_there, store, text, tail, num_stored, length, total)
    matched = tl.min(tl.where(is_there & (ours == theirs), _MOST_MATCHED, back), axis=0)
    # In the text its end repeats with the period of the copy; in the store a separator comes before that.
    period = tl.maximum(last - end, 1)
    source = end + 1 + step % period
    follows = _read(source, step < width - 1, store, text, tail, num_stored, length, total)
    # The token at position p of the text, of the last RING ones, is at p modulo RING; before the first one
    # there are separators, which no context has.
    place, probe = tl.arange(0, RING), tl.arange(0, PROBES)
    column = num_stored + total - 1 - ((total - 1 - place) & (RING - 1))
    recent = _read(column, column >= num_stored, store, text, tail, num_stored, length, total).to(tl.int64)
    count, sure, goes_on = tl.full((), 0, tl.int32), tl.full((), 1, tl.float32), limit > 0
    while goes_on:
        token, share = tl.full((), 0, tl.int64), tl.full((), 0, tl.float32)
        if MAX_SIZE > 0:
            token, share = _guess(
                recent,
                place,
                probe,
                total + count,
                keys,
                table_tokens,
                shares,
                slots,
                num_probes,
                MAX_SIZE,
                RING,
            )
        copy = tl.sum(tl.where(step == count, follows, 0), axis=0).to(tl.int64)
        copies = copies & (copy != _SEPARATOR)
        right = tl.load(likely + tl.minimum(matched + count, _MOST_MATCHED))
        agrees = (share > 0) & (token == copy)
        right = tl.where(agrees, right + share - right * share, right)
        copies = copies & (agrees | (share <= right * _RIVAL))
        sure = sure * tl.where(copies, right, share)
        least = tl.where(copies, match_confidence, guess_confidence)
        is_sure: tl.tensor = sure >= least
        token = tl.where(copies, copy, token)
        tl.store(tokens + at * width + tail_len + 1 + count, token, mask=is_sure)
        recent = tl.where(place == ((total + count) & (RING - 1)), token, recent)
        count += is_sure.to(tl.int32)
        goes_on = is_sure & (count < limit)
    tl.store(counts + at, count.to(tl.int64))


def propose(
    rows: Tensor,
    lengths: Tensor,
    texts: Tensor,
    store: Tensor,
    tokens: Tensor,
    tail_lens: Tensor,
    most: Tensor,
    within: int,
    n_grams: tuple[int, int],
    likely: Tensor,
    match_confidence: float,
    guesses: Guesses | None = None,
) -> Tensor:
    """As `Lookup.propose`, of lengths [num_rows] tokens of texts [num_rows, max_len] int32 and store [stored]
    int32; n_grams: sizes of the smallest and the largest; likely: LIKELY, float32."""
    (num,), width, num_stored = rows.shape, tokens.shape[1], store.numel()
    num_chunks = triton.cdiv(num_stored + within + width - 1, _CHUNK)
    best = torch.empty((num, num_chunks), dtype=torch.int64, device=tokens.device)
    counts = torch.empty(num, dtype=torch.int64, device=tokens.device)
    assert all(each.is_contiguous() for each in (rows, lengths, texts, store, tokens, tail_lens, most))
    given = rows, lengths, texts, store, tokens, tail_lens
    where = num_stored, texts.shape[1], within, width, num_chunks
    _search[(num, num_chunks)](*given, best, *where, n_grams[1], _CHUNK, num_warps=_NUM_WARPS)
    # Without a table nobody reads the addresses in its place.
    arrays, max_size, slots, num_probes = (counts, counts, likely), 0, 1, 1
    if guesses is not None and guesses.table.max_size > 0:
        table = guesses.table
        arrays, max_size = (table.keys, table.tokens, table.shares), table.max_size
        slots, num_probes = table.slots, table.num_probes
    _propose[(num,)](
        *(*given, most, best, counts, likely, *arrays, *where, slots, num_probes),
        match_confidence,
        1.0 if guesses is None else guesses.confidence,
        n_grams[0],
        triton.next_power_of_2(num_chunks),
        triton.next_power_of_2(width),
        max_size,
        triton.next_power_of_2(max(max_size, 1)),
        triton.next_power_of_2(num_probes),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return counts


@unspecialised_jit
def _extend(
    rows: tl.tensor,
    lengths: tl.tensor,
    texts: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    max_len: int,
    width: int,
    STEPS: tl.constexpr,
) -> None:
    at, step = tl.program_id(0).to(tl.int64), tl.arange(0, STEPS)
    row, count = tl.load(rows + at), tl.load(counts + at)
    if count > 0:  # a row without a request may have another's text
        length = tl.load(lengths + row)
        is_new = (step < count) & (step < width - 1) & (length + step < max_len)
        token = tl.load(tokens + at * width + 1 + step, mask=is_new, other=0)
        tl.store(texts + row * max_len + length + step, token.to(tl.int32), mask=is_new)
        tl.store(lengths + row, tl.minimum(length + count, max_len))


def extend(rows: Tensor, lengths: Tensor, texts: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """As `Lookup.extend`; of several equal rows one has a count at most."""
    width = tokens.shape[1]
    assert all(each.is_contiguous() for each in (rows, lengths, texts, tokens, counts))
    _extend[(len(rows),)](
        rows,
        lengths,
        texts,
        tokens,
        counts,
        texts.shape[1],
        width,
        triton.next_power_of_2(width),
        num_warps=1,
    )
