"""The index of prompt lookup on a CPU, in numba: for every size a hash table that says where each n-gram
ended last."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.np.numpy_support import carray, from_dtype
from torch import Tensor

from ee_models.kernel_cache import cfunc, njit
from ee_models.kernels.threads import address_of_cfunc, pointer

from ..decoding.drafter import CompiledLookup
from ..decoding.rounds_numba import Lookups, copy_numbers
from .lookup import LIKELY, MOST_MATCHED, RIVAL, SEPARATOR, Guesses, Lookup, check_shapes
from .ngram_table import EMPTY, FACTOR, make_table

_FACTOR = FACTOR & 0xFFFFFFFFFFFFFFFF
_LIKELY, _RIVAL, _ONE = np.array(LIKELY, np.float32), np.float32(RIVAL), np.float32(1.0)


class Texts(NamedTuple):
    """`count` texts of at most `capacity` tokens each, indexed.

    tokens   [count, capacity] int32
    lengths  [count] int64
    bases    [count] int64, grows by a text's length when it is cleared
    tables   [count, sizes, slots] int64, open addressing with linear probing: base + 1 + the last token's
             position, in the latest occurrence of an n-gram that another token follows. What is not above the
             text's base is of an earlier text, or was never written, and means empty; so clearing touches no
             table. An n-gram has one slot however often it occurs, and at most half of the slots are taken
    probes   [1] int64, slots looked at so far: the work that must not grow with the text
    """

    tokens: Any
    lengths: Any
    bases: Any
    tables: Any
    probes: Any

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self)


def make_texts(count: int, capacity: int, num_sizes: int) -> Texts:
    slots = 1 << (2 * capacity).bit_length()  # more than twice the n-grams
    # Zeros, not empty or filled: what no row uses is never mapped. A row that is used soon has all of its
    # tables, whose slots are spread by a hash.
    tokens, tables = np.zeros((count, capacity), np.int32), np.zeros((count, num_sizes, slots), np.int64)
    return Texts(tokens, np.zeros(count, np.int64), np.zeros(count, np.int64), tables, np.zeros(1, np.int64))


class _Texts(ctypes.Structure):
    """Texts, by address."""

    _fields_ = [
        (name, ctypes.c_int64) for name in (*Texts._fields, "count", "capacity", "num_sizes", "num_slots")
    ]

    @classmethod
    def of(cls, texts: Texts) -> _Texts:
        count, num_sizes, num_slots = texts.tables.shape
        addresses = (array.ctypes.data for array in texts)
        return cls(*addresses, count, texts.tokens.shape[1], num_sizes, num_slots)


class Table(NamedTuple):
    """An NgramTable, and the confidence that is asked for; max_size 0 = there is none."""

    keys: Any
    tokens: Any
    shares: Any
    slots: Any
    max_size: Any
    confidence: Any

    @classmethod
    def of(cls, guesses: Guesses | None) -> Table:
        table, confidence = guesses or (make_table(None, {}, torch.device("cpu")), 1.0)
        arrays = table.keys.numpy(), table.tokens.numpy(), table.shares.numpy()
        return cls(*arrays, table.slots, table.max_size, np.float32(confidence))


class _Table(ctypes.Structure):
    """A Table, by address; count: of its slots, those at the end included."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("keys", "tokens", "shares", "slots", "max_size", "count")),
        ("confidence", ctypes.c_float),
    ]

    @classmethod
    def of(cls, table: Table) -> _Table:
        addresses = (array.ctypes.data for array in table[:3])
        return cls(*addresses, table.slots, table.max_size, len(table.keys), float(table.confidence))


class _Index(ctypes.Structure):
    """An index, for compiled rounds; rows: the address of the text of each row of the batch, int64."""

    _fields_ = [
        ("texts", _Texts),
        ("store", _Texts),
        ("table", _Table),
        *((name, ctypes.c_int64) for name in ("current", "min_size", "rows")),
        ("match_confidence", ctypes.c_float),
    ]


class LookupIndex(Lookup):
    """On a CPU: incremental, so that neither a proposal's cost nor that of a committed token grows with the
    text."""

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
        super().__init__(num_rows, max_len, min_size, max_size, store_tokens, match_confidence, guesses)
        self._texts = make_texts(num_rows, max_len, max_size - min_size + 1)
        self._store = make_texts(2, self._half, max_size - min_size + 1)
        self._table = Table.of(guesses)
        self._current = 0
        self._index = _Index(
            _Texts.of(self._texts),
            _Texts.of(self._store),
            _Table.of(self._table),
            current=0,
            min_size=self._min_size,
            match_confidence=self._match_confidence,
        )

    def compiled(self, rows: Tensor) -> CompiledLookup:
        assert rows.dtype is torch.int64 and rows.is_contiguous()
        self._index.rows, self._index.current = rows.data_ptr(), self._current
        return CompiledLookup(
            address_of_cfunc(propose), address_of_cfunc(extend), self._index, held=(self, rows)
        )

    def agrees(self, row: int, start: int, token_ids: Sequence[int]) -> bool:
        length = self.length(row)
        if length > len(token_ids):
            return False
        return self._texts.tokens[row, start:length].tolist() == list(token_ids[start:length])

    @property
    def num_bytes(self) -> int:
        """Memory reserved; the system maps what rows use."""
        return self._texts.num_bytes + self._store.num_bytes

    @property
    def num_probes(self) -> int:
        """Slots of hash tables looked at so far, by all methods."""
        return int(self._texts.probes[0] + self._store.probes[0])

    def _write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        added = self._check_tokens(row, start, token_ids)
        if start == 0:
            _clear(self._texts, row)
        _append(self._texts, row, added, self._min_size)

    def extend(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
        for row, token_ids, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            room = self._max_len - self.length(row)
            self.append(row, token_ids[1 : min(count, room) + 1])

    def length(self, row: int) -> int:
        self._check_row(row)
        return int(self._texts.lengths[row])

    def _store_output(self, output: Any) -> None:
        if self._store.lengths[self._current] + len(output) > self._half:
            self._current = 1 - self._current
            _clear(self._store, self._current)
        _append(self._store, self._current, output, self._min_size)

    def propose(
        self, rows: Tensor, tokens: Tensor, tail_lens: Tensor, most: Tensor, within: int | None = None
    ) -> Tensor:
        check_shapes(rows, tokens, tail_lens, most)
        counts = torch.empty_like(rows)
        wrong = _propose(
            self._texts,
            self._store,
            self._table,
            self._current,
            self._min_size,
            np.float32(self._match_confidence),
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


@njit
def _same(text: Any, end: Any, other: Any, other_end: Any, size: Any) -> Any:
    """Whether the n-grams that end at text[end] and other[other_end] are the same tokens."""
    for back in range(size):  # noqa: SIM110 - all() of a generator is not numba
        if text[end - back] != other[other_end - back]:
            return False
    return True


@njit
def _find(texts: Any, row: Any, index: Any, size: Any, other: Any, end: Any) -> Any:
    """(slot, position) of the n-gram that ends at other[end]: where it last ended in text `row`, or -1 and
    the slot that would say so."""
    hashed = np.uint64(0)
    for back in range(size):
        hashed = (hashed + np.uint64(other[end - back]) + np.uint64(1)) * np.uint64(_FACTOR)
        hashed ^= hashed >> np.uint64(32)
    text, table, base = texts.tokens[row], texts.tables[row, index], texts.bases[row]
    mask = table.shape[0] - 1
    slot = np.int64(hashed & np.uint64(mask))
    texts.probes[0] += 1
    while table[slot] > base:
        position = table[slot] - base - 1
        if _same(text, position, other, end, size):
            return slot, position
        slot = (slot + 1) & mask
        texts.probes[0] += 1
    return slot, np.int64(-1)


@njit
def _clear(texts: Any, row: Any) -> None:
    texts.bases[row] += texts.lengths[row]
    texts.lengths[row] = 0


@njit
def _append(texts: Any, row: Any, token_ids: Any, min_size: Any) -> None:
    """Adds `token_ids` (which must fit) to text `row`, and indexes the n-grams that a token follows now.

    Those that span a separator are indexed too: no text has one, so that none is ever looked for.
    """
    text, tables = texts.tokens[row], texts.tables[row]
    max_size = min_size + tables.shape[0] - 1
    start, stop = texts.lengths[row], texts.lengths[row] + token_ids.shape[0]
    copy_numbers(token_ids, text[start:stop])
    texts.lengths[row] = stop
    for end in range(max(start - 1, 0), stop - 1):
        if text[end + 1] == SEPARATOR:
            continue
        for size in range(min_size, min(max_size, end + 1) + 1):
            slot, _ = _find(texts, row, size - min_size, size, text, end)
            tables[size - min_size, slot] = texts.bases[row] + end + 1


@njit
def _latest(
    texts: Any, row: Any, store: Any, current: Any, near: Any, num_near: Any, num_own: Any, min_size: Any
) -> Any:
    """(source, position) of the first token to propose: source 0 the text itself, 1 + h half h of the store,
    -1 nothing found.

    near[:num_near] is the end of the text, of which all but the first num_own lies in the tail.
    """
    length, last = texts.lengths[row], num_near - 1
    before = length - num_own  # the position of near[0] in the text
    for index in range(texts.tables.shape[1] - 1, -1, -1):
        size = min_size + index
        if num_near <= size:
            continue
        # What ends in the tail, or at the last committed token, is indexed nowhere, and more recent than all
        # that is.
        for end in range(last - 1, max(num_own - 1, size - 1) - 1, -1):
            if _same(near, end, near, last, size):
                return 0, before + end + 1
        _, position = _find(texts, row, index, size, near, last)
        if position >= 0:
            return 0, position + 1
        for half in (current, 1 - current):
            _, position = _find(store, half, index, size, near, last)
            if position >= 0:
                return 1 + half, position + 1
    return -1, np.int64(0)


@njit
def _num_matched(source: Any, length: Any, tail: Any, end: Any, near: Any, num_near: Any) -> Any:
    """Tokens that are the same up to `end` of a source and up to the text's end; the source goes on with
    `tail` after `length` tokens."""
    matched = 0
    while matched < min(MOST_MATCHED, num_near) and end - matched >= 0:
        position = end - matched
        if (source[position] if position < length else tail[position - length]) != near[
            num_near - 1 - matched
        ]:
            break
        matched += 1
    return matched


@njit
def _guess(table: Any, near: Any, num_near: Any) -> Any:
    """(token, share) of the longest context that ends near[:num_near]; a share of 0 where there is none."""
    token, share, hashed = np.int32(0), np.float32(0.0), np.uint64(0)
    for back in range(min(table.max_size, num_near)):
        hashed = (hashed + np.uint64(near[num_near - 1 - back]) + np.uint64(1)) * np.uint64(_FACTOR)
        hashed ^= hashed >> np.uint64(32)
        key = np.int64(hashed)
        if key == EMPTY:
            key = np.int64(1)
        slot = key & (table.slots - 1)
        while table.keys[slot] != EMPTY:
            if table.keys[slot] == key:
                token, share = table.tokens[slot], table.shares[slot]
                break
            slot += 1
    return token, share


@njit
def _propose(
    texts: Any,
    store: Any,
    table: Any,
    current: Any,
    min_size: Any,
    match_confidence: Any,
    rows: Any,
    tokens: Any,
    tail_lens: Any,
    most: Any,
    counts: Any,
) -> Any:
    """As Lookup.propose. Returns the first i whose arguments are out of range, before anything is written, or
    -1."""
    window = tokens.shape[1] - 1
    for i in range(rows.shape[0]):
        if (
            rows[i] < 0
            or rows[i] >= texts.lengths.shape[0]
            or tail_lens[i] < 0
            or most[i] < 0
            or tail_lens[i] + most[i] > window
        ):
            return i
    # One token more than the longest n-gram: a text of more than `size` tokens shows as such.
    deep = max(min_size + texts.tables.shape[1], MOST_MATCHED)
    near = np.empty(deep + window, np.int32)
    for i in range(rows.shape[0]):
        row, tail, count = rows[i], tail_lens[i], 0
        text, length = texts.tokens[row], texts.lengths[row]
        num_own = min(length, deep)
        copy_numbers(text[length - num_own : length], near[:num_own])
        copy_numbers(tokens[i, 1 : tail + 1], near[num_own : num_own + tail])
        source, position = (
            (-1, np.int64(0))
            if most[i] == 0
            else _latest(texts, row, store, current, near, num_own + tail, num_own, min_size)
        )
        # What is copied: the text itself, or one half of the store, whose outputs each end with a separator.
        copied, end = (text, length) if source <= 0 else (store.tokens[source - 1], store.lengths[source - 1])
        copies, matched, sure = source >= 0, 0, _ONE
        if copies:
            matched = _num_matched(copied, end, tokens[i, 1:], position - 1, near, num_own + tail)
        while count < most[i]:
            token, share, least, right = np.int32(0), np.float32(0.0), table.confidence, np.float32(0.0)
            if table.max_size > 0:
                token, share = _guess(table, near, num_own + tail + count)
            copy = np.int32(SEPARATOR)
            if copies:
                # Proposals follow the tail, so that reading past the text's end goes on with them.
                at = position + count
                copy = copied[at] if at < end else np.int32(tokens[i, 1 + at - end])
                copies = copy != SEPARATOR
            if copies:
                right, least = _LIKELY[min(matched + count, MOST_MATCHED)], match_confidence
                if share > 0 and token == copy:
                    right = right + share - right * share
                elif share > _RIVAL * right:
                    copies, least = False, table.confidence
            sure *= right if copies else share
            if sure < least:
                break
            near[num_own + tail + count] = tokens[i, tail + 1 + count] = copy if copies else token
            count += 1
        counts[i] = count
    return -1


_INDEX, _LOOKUPS = np.dtype(_Index), np.dtype(Lookups)
_LINK = types.void(types.CPointer(from_dtype(_LOOKUPS)), types.CPointer(from_dtype(_INDEX)))


@njit
def _texts_at(at: Any) -> Any:
    return Texts(
        carray(pointer(at.tokens), (at.count, at.capacity), np.int32),
        carray(pointer(at.lengths), at.count, np.int64),
        carray(pointer(at.bases), at.count, np.int64),
        carray(pointer(at.tables), (at.count, at.num_sizes, at.num_slots), np.int64),
        carray(pointer(at.probes), 1, np.int64),
    )


@njit
def _table_at(at: Any) -> Any:
    return Table(
        carray(pointer(at.keys), at.count, np.int64),
        carray(pointer(at.tokens), at.count, np.int32),
        carray(pointer(at.shares), at.count, np.float32),
        at.slots,
        at.max_size,
        at.confidence,
    )


@cfunc(_LINK)
def propose(lookups: Any, index: Any) -> None:
    """As LookupIndex.propose."""
    asked, at = carray(lookups, 1)[0], carray(index, 1)[0]
    n = asked.num_rows
    _propose(
        _texts_at(at.texts),
        _texts_at(at.store),
        _table_at(at.table),
        at.current,
        at.min_size,
        at.match_confidence,
        carray(pointer(at.rows), n, np.int64),
        carray(pointer(asked.tokens), (n, asked.window + 1), np.int64),
        carray(pointer(asked.first), n, np.int64),
        carray(pointer(asked.most), n, np.int64),
        carray(pointer(asked.counts), n, np.int64),
    )


@cfunc(_LINK)
def extend(lookups: Any, index: Any) -> None:
    """As LookupIndex.extend."""
    asked, at = carray(lookups, 1)[0], carray(index, 1)[0]
    n = asked.num_rows
    texts, rows = _texts_at(at.texts), carray(pointer(at.rows), n, np.int64)
    tokens = carray(pointer(asked.tokens), (n, asked.window + 1), np.int64)
    counts = carray(pointer(asked.counts), n, np.int64)
    for i in range(n):
        room = texts.tokens.shape[1] - texts.lengths[rows[i]]
        _append(texts, rows[i], tokens[i, 1 : min(counts[i], room) + 1].astype(np.int32), at.min_size)
