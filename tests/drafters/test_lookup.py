"""Prompt lookup: the incremental index and its tensor twin against a search that is written as the rule
reads."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ee_models.checkpoint.ngram_file import SHARES, Ngrams
from hispec.drafters.lookup import LIKELY, MOST_MATCHED, RIVAL, SEPARATOR, Guesses, Lookup
from hispec.drafters.lookup_numba import LookupIndex
from hispec.drafters.lookup_torch import TensorLookup
from hispec.drafters.ngram import make_lookup
from hispec.drafters.ngram_table import NgramTable, make_table

CPU = torch.device("cpu")
NUM_ROWS, MAX_LEN, WINDOW = 3, 24, 7
Known = dict[tuple[int, ...], tuple[int, int]]  # context -> (what follows, in how many 256ths)
UNTOUCHED = 77  # in every column of tokens that is not to be read; never to be proposed

MAKERS: dict[str, Callable[..., Any]] = {
    "index": LookupIndex,
    "tensors": lambda *sizes: TensorLookup(CPU, *sizes),
}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


class Naive:
    """The rule, by linear search."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        min_size: int,
        max_size: int,
        store_tokens: int = 0,
        match_confidence: float | None = None,
        known: Known | None = None,
        confidence: float = 1.0,
    ) -> None:
        self.match_confidence = np.float32(match_confidence or 0)
        self.known, self.confidence = known or {}, np.float32(confidence)
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]
        self.sizes = range(max_size, min_size - 1, -1)
        self.half = store_tokens // 2
        self.current: list[int] = []
        self.previous: list[int] = []

    def store(self, output: list[int]) -> None:
        if not output or not self.half:
            return
        entry = [*output[-(self.half - 1) :], -1]
        if len(self.current) + len(entry) > self.half:
            self.previous, self.current = self.current, []
        self.current += entry

    def propose(self, row: int, tail: list[int], most: int) -> list[int]:
        text = self.texts[row] + tail
        source, position, matched = self.find(text)
        proposals: list[int] = []
        sure = np.float32(1)
        while len(proposals) < most:
            line = text + proposals
            copied = line if source is text else source
            copy = copied[position] if copied and copied[position] != SEPARATOR else None
            token, share = self.guess(line)
            right = np.float32(0 if copy is None else LIKELY[min(matched, MOST_MATCHED)])
            if copy is not None and copy == token:
                right = right + share - right * share
            elif share > RIVAL * right:
                copy, right = None, share
            sure *= right
            if sure < (self.confidence if copy is None else self.match_confidence):
                break
            proposals.append(token if copy is None else copy)
            source, position, matched = (None, 0, 0) if copy is None else (source, position + 1, matched + 1)
        return proposals

    def find(self, text: list[int]) -> tuple[list[int] | None, int, int]:
        """(what is copied, from where on, how many tokens before are the same)."""
        for size in self.sizes:
            if len(text) <= size:
                continue
            for source in (text, self.current, self.previous):
                for j in range(len(source) - 2, size - 2, -1):
                    if source[j - size + 1 : j + 1] == text[-size:] and source[j + 1] != SEPARATOR:
                        same = zip(reversed(source[: j + 1]), reversed(text), strict=False)
                        return source, j + 1, len(list(takewhile(lambda pair: pair[0] == pair[1], same)))
        return None, 0, 0

    def guess(self, line: list[int]) -> tuple[int | None, np.float32]:
        contexts = (tuple(line[start:]) for start in range(len(line)))
        found = (self.known[context] for context in contexts if context in self.known)
        token, share = next(found, (None, 0))
        return token, np.float32(share / SHARES)


def propose(
    lookup: Lookup,
    queries: Sequence[tuple[int, list[int], int]],
    last: Callable[[int], int],
    window: int = WINDOW,
) -> list[list[int]]:
    """Asks for (row, tail, most) in one call, and checks that nothing but the proposals was written."""
    tokens = torch.full((len(queries), window + 1), UNTOUCHED)
    for i, (row, tail, _) in enumerate(queries):
        tokens[i, : len(tail) + 1] = torch.tensor([last(row), *tail])
    before = tokens.clone()
    rows, tail_lens, most = torch.tensor(
        [[row, len(tail), most] for row, tail, most in queries], dtype=torch.int64
    ).T.contiguous()
    counts = lookup.propose(rows, tokens, tail_lens, most)
    assert counts.dtype == torch.int64 and counts.shape == rows.shape
    proposals = []
    for i, (_, tail, _) in enumerate(queries):
        columns = slice(len(tail) + 1, len(tail) + 1 + int(counts[i]))
        before[i, columns] = tokens[i, columns]
        proposals.append(tokens[i, columns].tolist())
    assert torch.equal(tokens, before)
    return proposals


def guesses_of(known: Known, confidence: float) -> Guesses:
    sized = {}
    for size in sorted({len(context) for context in known}):
        those = {context: follows for context, follows in known.items() if len(context) == size}
        tokens, shares = (np.array(each) for each in zip(*those.values(), strict=True))
        sized[size] = Ngrams(np.array(list(those)), tokens, shares.astype(np.uint8))
    return Guesses(make_table(None, sized, CPU), confidence)


def replay(
    make: Callable[..., Any],
    sizes: tuple[Any, ...],
    steps: list[Any],
    max_len: int = MAX_LEN,
    known: tuple[Known, float] | None = None,
) -> int:
    """Runs steps on an index and on the naive one, comparing all proposals -> how many tokens were
    proposed."""
    if known is None:
        lookup, naive = make(NUM_ROWS, max_len, *sizes), Naive(NUM_ROWS, max_len, *sizes)
    else:
        lookup = make(NUM_ROWS, max_len, *sizes, guesses_of(*known))
        naive = Naive(NUM_ROWS, max_len, *sizes, *known)
    num_proposed = 0
    for name, *arguments in steps:
        if name == "propose":
            queries = arguments[0]
            expected = [naive.propose(*query) for query in queries]
            assert propose(lookup, queries, lambda row: (naive.texts[row] or [UNTOUCHED])[-1]) == expected
            num_proposed += sum(map(len, expected))
        elif name == "store":
            lookup.store(arguments[0])
            naive.store(arguments[0])
        else:
            row, token_ids = arguments
            old = [] if name == "reset" else naive.texts[row]
            token_ids = token_ids[: max_len - len(old)]
            getattr(lookup, name)(row, token_ids)
            naive.texts[row] = old + token_ids
            assert lookup.length(row) == len(naive.texts[row])
    return num_proposed


@st.composite
def scripts(draw: st.DrawFn) -> tuple[tuple[Any, ...], list[Any]]:
    """((min_size, max_size, store_tokens), steps) over an alphabet so small that nearly everything
    matches."""
    min_size = draw(st.integers(1, 3))
    max_size = min_size + draw(st.integers(0, 2))
    store_tokens = draw(st.one_of(st.just(0), st.integers(2 * (max_size + 2), 30)))
    token = st.integers(0, draw(st.sampled_from([0, 1, 1, 2, 9])))
    rows = st.integers(0, NUM_ROWS - 1)
    query = st.integers(0, WINDOW).flatmap(
        lambda n: st.tuples(rows, st.lists(token, min_size=n, max_size=n), st.integers(0, WINDOW - n))
    )
    step = st.one_of(
        st.tuples(st.just("reset"), rows, st.lists(token, max_size=MAX_LEN)),
        st.tuples(st.just("append"), rows, st.lists(token, max_size=6)),
        st.tuples(st.just("store"), st.lists(token, max_size=20)),
        st.tuples(st.just("propose"), st.lists(query, min_size=1, max_size=4)),
    )
    match_confidence = draw(st.sampled_from([None, None, 0.1, 0.5]))
    return (min_size, max_size, store_tokens, match_confidence), draw(st.lists(step, min_size=2, max_size=25))


@both
@settings(max_examples=120, deadline=None)
@given(script=scripts())
# What stands in the tail is more recent than the same in the committed text; what was in a tail is gone with
# the round.
@example(
    script=(
        (2, 2, 0),
        [("reset", 0, [1, 2, 3, 1]), ("propose", [(0, [2, 5, 1, 2], 3)]), ("propose", [(0, [2], 6)])],
    )
)
# An occurrence may neither span a separator nor run on behind one, and the previous half comes after the
# current one.
@example(
    script=(
        (2, 2, 16),
        [
            ("store", [1, 2]),
            ("store", [3, 4]),
            ("reset", 0, [0, 2, 3]),
            ("propose", [(0, [], 5), (0, [1, 2], 5)]),
        ],
    )
)
@example(
    script=(
        (1, 2, 8),
        [
            ("store", [1, 2, 3]),
            ("store", [1, 2, 4]),
            ("store", [5, 1, 6]),
            ("reset", 0, [0, 1]),
            ("propose", [(0, [], 5), (0, [2], 5)]),
        ],
    )
)
# The text itself before the store, but a longer match in the store before a shorter one in the text.
@example(
    script=(
        (1, 2, 16),
        [("store", [1, 2, 9]), ("reset", 0, [2, 8, 0, 2]), ("propose", [(0, [], 3), (0, [1, 2], 3)])],
    )
)
# A text as short as the n-gram has none to look up, not even in the store.
@example(
    script=(
        (2, 2, 16),
        [
            ("store", [1, 2, 3]),
            ("reset", 0, [1, 2]),
            ("propose", [(0, [], 3)]),
            ("append", 1, []),
            ("propose", [(1, [0, 1, 2], 3)]),
        ],
    )
)
# Another text in the same row finds nothing of the former.
@example(
    script=(
        (1, 1, 0),
        [
            ("reset", 0, [1, 2, 3, 4]),
            ("reset", 0, [9, 1]),
            ("propose", [(0, [], 3)]),
            ("append", 0, [5, 1]),
            ("propose", [(0, [], 3)]),
        ],
    )
)
def test_proposals_are_those_of_the_rule(
    make: Callable[..., Any], script: tuple[tuple[Any, ...], list[Any]]
) -> None:
    replay(make, *script)


CHAINED: dict[str, Any] = {
    "script": (
        (2, 2, 0, None),
        [("reset", 0, [1, 2, 3]), ("propose", [(0, [], 7), (0, [1, 2], 5), (0, [8], 5)])],
    ),
    "known": {(3,): (9, 200), (2, 3): (4, 128), (4,): (5, 250), (5,): (6, 100), (8,): (1, 50)},
    "confidence": 0.2,
}
known_ngrams = st.dictionaries(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.tuples(st.integers(0, 9), st.integers(1, SHARES - 1)),
    max_size=40,
)


@both
@settings(max_examples=120, deadline=None)
@given(script=scripts(), known=known_ngrams, confidence=st.sampled_from([0.01, 0.2, 0.6]))
# Guesses come where nothing surer matches; the longest context is the better guess, and a chain ends where
# all of it is less sure than asked for.
@example(**CHAINED)
# A text that is shorter than a context, one with no token at all, and a context at the window's end.
@example(
    script=(
        (1, 1, 0, 0.2),
        [("reset", 0, [7]), ("propose", [(0, [], 7), (1, [], 7), (0, [5, 4, 3, 2, 1, 0], 1)])],
    ),
    known={(0, 7): (1, 255), (7,): (2, 255), (7, 2): (3, 255), (1, 0): (4, 255)},
    confidence=0.01,
)
def test_guesses_are_those_of_the_rule(
    make: Callable[..., Any], script: tuple[tuple[Any, ...], list[Any]], known: Known, confidence: float
) -> None:
    replay(make, *script, known=(known, confidence))


@both
@settings(max_examples=150, deadline=None)
@given(
    store_tokens=st.integers(8, 26),
    outputs=st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=2, max_size=12),
    tails=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), min_size=1, max_size=4),
)
@example(
    store_tokens=12, outputs=[[2, 2, 1, 0, 0], [1, 2]], tails=[[1]]
)  # the half that is begun holds nothing of the one before
def test_the_store_is_that_of_the_rule(
    make: Callable[..., Any], store_tokens: int, outputs: list[list[int]], tails: list[list[int]]
) -> None:
    """Asked by texts that match little themselves."""
    asked = ("propose", [(0, tail, WINDOW - len(tail)) for tail in tails])
    replay(
        make,
        (1, 2, store_tokens),
        [("reset", 0, [9]), *(step for output in outputs for step in (("store", output), asked))],
    )


@both
@pytest.mark.parametrize("num_tokens", [3, 1000])
def test_long_texts_grow_as_in_decoding(make: Callable[..., Any], num_tokens: int) -> None:
    """Rounds of a few tokens up to max_len, rows out of step, a tail that is partly kept, finished outputs
    into the store."""
    draw = random.Random(num_tokens)
    steps: list[Any] = []
    lengths = [0] * NUM_ROWS
    output: list[list[int]] = [[] for _ in range(NUM_ROWS)]
    for _ in range(400):
        row = draw.randrange(NUM_ROWS)
        tail = [draw.randrange(num_tokens) for _ in range(draw.randrange(WINDOW + 1))]
        steps.append(("propose", [(row, tail, WINDOW - len(tail)), ((row + 1) % NUM_ROWS, [], WINDOW)]))
        kept = [*tail[: draw.randrange(len(tail) + 1)], draw.randrange(num_tokens)]
        if lengths[row] + len(kept) > 300:
            steps += [("store", output[row]), ("reset", row, kept)]
            lengths[row], output[row] = 0, []
        else:
            steps.append(("append", row, kept))
        lengths[row] += len(kept)
        output[row] += kept
    assert replay(make, (1, 3, 200), steps, max_len=300) > 300


@both
def test_a_period_repeats_past_the_end(make: Callable[..., Any]) -> None:
    lookup = make(1, 10, 1, 2)
    lookup.reset(0, [4, 1, 2, 3, 1])
    assert propose(lookup, [(0, [2], 6)], lambda _: 1) == [[3, 1, 2, 3, 1, 2]]
    assert propose(lookup, [(0, [5, 5], 5)], lambda _: 1) == [[5, 5, 5, 5, 5]]


@both
def test_a_longer_match_gives_more_proposals(make: Callable[..., Any]) -> None:
    """As many as are right together with the probability asked for, by LIKELY."""
    phrase = list(range(1, 30))
    lookup = make(1, 100, 1, 2, 0, 0.2)
    lookup.reset(0, [*phrase, 60, 61, 5])
    # One token is the same, then two of which one is in the tail, then more than are counted.
    assert [
        len(found)
        for found in propose(
            lookup, [(0, [], 60), (0, [6], 60), (0, phrase[5:25], 70)], lambda _: 5, window=90
        )
    ] == [1, 3, 26]


@both
def test_of_a_copy_and_a_guess_the_surer_is_proposed(make: Callable[..., Any]) -> None:
    """After a match of one token: a guess that says the same makes the copy surer, one that contradicts it
    takes its place if it is more than RIVAL times as sure."""

    def proposed(share: float, token: int, match_confidence: float | None = None) -> list[int]:
        lookup = make(1, 10, 1, 2, 0, match_confidence, guesses_of({(4,): (token, int(share * SHARES))}, 0.3))
        lookup.reset(0, [4, 1, 2, 3, 4])
        return propose(lookup, [(0, [], 3)], lambda _: 4)[0]

    assert LIKELY[1] < 0.4 < RIVAL * LIKELY[1] <= 0.6
    assert proposed(0.4, 9) == [1, 2, 3], "the copy goes on"
    assert proposed(0.7, 9) == [9], "and ends where the guess is surer"
    assert proposed(0.4, 9, 0.5) == [], "a copy that is not sure enough is no reason to guess otherwise"
    assert proposed(0.4, 1, 0.5) == [1], "both together are as sure as is asked for, what follows is not"


@both
def test_the_store_keeps_the_last_tokens_and_forgets_the_oldest(make: Callable[..., Any]) -> None:
    lookup = make(1, 10, 1, 1, 12)

    def after(token: int) -> list[int]:
        lookup.reset(0, [99, token])
        return propose(lookup, [(0, [], WINDOW)], lambda _: token)[0]

    lookup.store(list(range(20, 40)))  # a half holds five and a separator
    assert (after(34), after(35), after(39)) == ([], [36, 37, 38, 39], [])
    lookup.store([1, 2, 3])
    lookup.store([])
    assert (after(1), after(35)) == ([2, 3], [36, 37, 38, 39])
    lookup.store([35, 4])  # the half before last is dropped, then this one found
    assert (after(1), after(35)) == ([2, 3], [4])
    lookup.store([5, 6])  # fits, to the last token
    assert (after(1), after(35), after(5)) == ([2, 3], [4], [6])
    lookup.store([6, 7, 8, 9])
    assert (after(1), after(35), after(6)) == ([], [4], [7, 8, 9])


@both
def test_large_token_ids_and_no_room_at_all(make: Callable[..., Any]) -> None:
    lookup = make(2, 6, 1, 2, 8)
    lookup.reset(1, [2**31 - 1, 2**31 - 2, 5, 2**31 - 1])
    assert propose(lookup, [(1, [], 2), (0, [], 2)], lambda _: 0, window=2) == [[2**31 - 2, 5], []]
    assert propose(lookup, [(1, [], 0)], lambda _: 0, window=0) == [[]]
    assert lookup.propose(
        *(torch.zeros(shape, dtype=torch.int64) for shape in ([0], [0, 3], [0], [0]))
    ).shape == (0,)
    assert lookup.num_bytes > 2 * 6 * 4


@pytest.mark.parametrize("text", ["one token", "a period", "random", "all different"])
def test_work_does_not_grow_with_the_text(text: str) -> None:
    """In slots of hash tables that are read, which a few clusters of collisions may double."""
    length, draw = 8000, random.Random(0)
    token_at = {
        "one token": lambda i: 7,
        "a period": lambda i: i % 11,
        "random": lambda i: draw.randrange(300),
        "all different": lambda i: i,
    }
    tokens = [token_at[text](i) for i in range(length)]
    index = LookupIndex(1, length, 2, 4, 4000)
    index.reset(0, tokens)
    index.store(tokens)
    assert index.num_probes <= 3 * (length + 2000) * 3, "looked up more than once for each size"
    before = index.num_probes
    for tail in ([tokens[i], tokens[i + 1], draw.randrange(300)] for i in range(0, length - 1, 20)):
        propose(index, [(0, tail, 4)], lambda _: tokens[-1])
    assert 0 < index.num_probes - before <= 400 * 3 * 3 * 3, (
        "for 400 proposals, three sizes and three sources"
    )
    before = index.num_probes
    index.reset(0, tokens[:10])
    assert index.num_probes - before <= 3 * 10 * 3, "another text costs as much as itself"


def test_time_does_not_grow_with_the_text() -> None:
    """A scan of the long text would take some hundred times as long as everything else about a proposal."""
    arguments = torch.tensor([0]), torch.tensor([[0, 5, 6, 0, 0, 0]]), torch.tensor([2]), torch.tensor([3])
    best = []
    for length in (100, 1_000_000):
        index = LookupIndex(1, length, 2, 3)
        index.reset(0, list(range(length)))
        index.propose(*arguments)
        times = []
        for _ in range(100):
            start = time.perf_counter()
            index.propose(*arguments)
            times.append(time.perf_counter() - start)
        best.append(min(times))
    assert best[1] < 10 * best[0], f"seconds for a proposal: {best}"


def test_the_tensor_twin_needs_no_value_on_the_host() -> None:
    """On the meta device there are shapes alone: .item(), nonzero and boolean masks raise there."""
    device = torch.device("meta")
    guesses = Guesses(NgramTable.empty(None, 3, 64, 2, 100, device), 0.2)
    lookup = make_lookup(device, 4, 50, 1, 3, 40, 0.2, guesses)
    assert isinstance(lookup, TensorLookup)
    lookup.reset(2, [1, 2, 3])
    lookup.append(2, [4])
    lookup.store([5, 6])
    assert lookup.length(2) == 4
    meta = torch.zeros(3, dtype=torch.int64, device="meta")
    assert lookup.propose(meta, torch.zeros(3, 6, dtype=torch.int64, device="meta"), meta, meta).shape == (3,)
    assert isinstance(make_lookup(CPU, 4, 50, 1, 3, 40), LookupIndex)


@both
def test_bad_arguments_are_refused_and_change_nothing(make: Callable[..., Any]) -> None:
    for sizes in (
        (0, 9, 1, 2),
        (1, 0, 1, 2),
        (1, 9, 0, 2),
        (1, 9, 3, 2),
        (1, 9, 1, 2, -1),
        (1, 9, 1, 2, 7),
        (1, 9, 1, 2, 0, 0.0),
        (1, 9, 1, 2, 0, 1.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            make(*sizes)
    lookup = make(2, 4, 1, 2, 8)
    lookup.reset(0, [1, 2, 1])
    for call in (
        lambda: lookup.append(0, [1, 2]),
        lambda: lookup.reset(0, [1, 2, 3, 4, 5]),
        lambda: lookup.append(0, [-1]),
        lambda: lookup.reset(0, [2**31]),
        lambda: lookup.store([3, -1, 4]),
        lambda: lookup.reset(2, [1]),
        lambda: lookup.append(-1, [1]),
        lambda: lookup.length(2),
        lambda: lookup.propose(
            torch.tensor([0, 0]), torch.zeros(1, 4, dtype=torch.int64), torch.tensor([0]), torch.tensor([1])
        ),
    ):
        with pytest.raises(ValueError, match=r"must|at most max_len=4"):
            call()
    assert lookup.length(0) == 3
    assert propose(lookup, [(0, [], 3)], lambda _: 1) == [[2, 1, 2]]


@pytest.mark.parametrize(
    ("row", "tail", "most"), [(2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 2, 2), (0, 0, 4)]
)
def test_the_index_refuses_proposals_out_of_range(row: int, tail: int, most: int) -> None:
    index = LookupIndex(2, 4, 1, 2)
    index.reset(0, [1, 2, 1])
    tokens = torch.full((2, 4), 1)
    with pytest.raises(ValueError, match=r"proposal 1: row .* must"):
        index.propose(torch.tensor([0, row]), tokens, torch.tensor([0, tail]), torch.tensor([3, most]))
    assert torch.equal(tokens, torch.full((2, 4), 1)), "nothing is written, for no row"
