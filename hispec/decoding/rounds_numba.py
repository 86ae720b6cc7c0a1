"""A round as `round.Round` runs it, as what is called between its passes: draft -> check (R times) -> verify
-> commit, and the next round, for chains, coupled acceptance and rows that take the likeliest token.

Between two passes of a small model on a CPU Python takes long beside a layer. Here a pass is followed by one
compiled call (`advance`), which does with the rows what the functions of `accept_numba`, `row_steps_numba`
and `addresses_numba` do in a single round: those very functions.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray, from_dtype

from ee_models.kernel_cache import cfunc, njit
from ee_models.kernels.threads import call_with_two, pointer
from ee_models.pass_structures import PLACES

from .accept_numba import _accept
from .acceptance import Source
from .addresses_numba import _locate
from .row_steps_numba import _CHAIN, _NEVER, _count_live, _end_check, _end_verify, _take_drafts


class Stage(IntEnum):
    """The passes of a round, by their number: one more token of a draft; layers [0, D) over drafts that were
    looked up, or over the last one; check; verify above a check, and verify from layer D on. BEGIN: none."""

    BEGIN = -1
    DRAFT = 0
    FEED = 1
    CHECK = 2
    VERIFY = 3
    VERIFY_DRAFTS = 4


class Row(IntEnum):
    """What is known of each row: lines of `Rounds.of_rows` [lines, rows] int64.

    START, LIMIT, MOST_DRAFTS, MOST_CHECKS   as RoundBatch has them
    CAP, ROOM, END   columns that a round of the row's may process; tokens that it may still get; position up
                     to which it has KV blocks
    FIRST            columns that hold x_n and tentative tokens
    FOUND            drafts that were looked up
    PROPOSED, COUNT, LIVE   drafts of the cycle, as they were proposed and as they are taken; live nodes
    ACCEPTED, OWN    of the tier that judged last
    COMMITTED        tokens committed since the first round
    NOTHING          zeros
    """

    START = 0
    LIMIT = 1
    MOST_DRAFTS = 2
    MOST_CHECKS = 3
    CAP = 4
    ROOM = 5
    END = 6
    FIRST = 7
    FOUND = 8
    PROPOSED = 9
    COUNT = 10
    LIVE = 11
    ACCEPTED = 12
    OWN = 13
    COMMITTED = 14
    NOTHING = 15
    NUM_LINES = 16


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class Lookups(ctypes.Structure):
    """What a compiled drafter that looks up is asked: of tokens [rows, window + 1], as Lookup.propose, with
    first, most and counts [rows]; or to take the first counts [rows] of tokens[:, 1:] as committed. By
    address."""

    _fields_ = _ints("num_rows", "window", "tokens", "first", "most", "counts")


class Rounds(ctypes.Structure):
    """Rounds of one plan, and how far they are.

    cycle, depth, num_done, most_rounds   draft cycle of the round, tokens that the exit has drafted in it
                      (-1: it is fed what was looked up), rounds that are done, and at most
    num_drafts, num_checks   K and R of the plan
    num_computed      drafts of an exit in a cycle; 0 = no exit drafts
    has_check, is_gated, tests_drafts, tests_check   whether there is a check, whether a cycle follows only if
                      the check is sure, whether an exit drafts, and a check overrules, only if it is
    num_blocks, most_tokens   of a row's block table, and of a pass: rows * window
    propose, extend, lookups, index   functions of a compiled drafter that looks up, their first argument, to
                      be filled, and their second; 0 = nothing is looked up
    tables, tokens    as RoundBatch has them; of_rows: see Row
    nodes             0, 1, ..., up to the window
    located           [8, tokens]: as `addresses_numba` has them, of the pass that runs next
    stop_begins, stops   tokens that end row r: stops[stop_begins[r] : stop_begins[r + 1]]
    committed         [rows, 1 + most_rounds * window]: from column 1 on
    notes             [most_rounds, rows, 3 + 3 R]: committed, tentative, accepted; by cycle drafted, kept,
                      source
    evidence          [rows] float32: as RoundResult, of all rounds
    flags             [2, most_tokens + rows] bool: scratch
    """

    _fields_ = [
        *_ints("cycle", "depth", "num_done", "most_rounds", "num_drafts", "num_checks", "num_computed"),
        *_ints("has_check", "is_gated", "tests_drafts", "tests_check"),
        *_ints("num_rows", "window", "block_size", "num_blocks", "vocab_size", "most_tokens"),
        *_ints("propose", "extend", "lookups", "index"),
        *_ints("tables", "tokens", "of_rows", "nodes", "located", "stop_begins", "stops"),
        *_ints("committed", "notes", "evidence", "flags"),
        ("draft_confidence", ctypes.c_float),
        ("check_confidence", ctypes.c_float),
        ("continue_confidence", ctypes.c_float),
    ]


_ROUNDS, _LOOKUPS = np.dtype(Rounds), np.dtype(Lookups)


@njit
def _of_rows(r: Any) -> Any:
    return carray(pointer(r.of_rows), (Row.NUM_LINES, r.num_rows), np.int64)


@njit
def _tokens(r: Any) -> Any:
    return carray(pointer(r.tokens), (r.num_rows, r.window + 1), np.int64)


@njit
def _notes(r: Any) -> Any:
    """Of the round: [3 + 3 R, rows] where the kernels of a round want a column for each cycle."""
    width = 3 + 3 * r.num_checks
    return carray(pointer(r.notes), (r.most_rounds, r.num_rows, width), np.int64)[r.num_done]


@njit
def copy_numbers(source: Any, target: Any) -> None:
    """To assign an array, numba compiles what an error says of two shapes: a sixth of all that is here."""
    for i in range(target.shape[0]):
        target[i] = source[i]


@njit
def _place(p: Any, r: Any, stage: int, first: Any, first_node: int, num_nodes: int, live: Any) -> None:
    """The next pass is over nodes first_node to first_node + num_nodes - 1 of each row, as far as they are
    live, after column first."""
    rows, tokens = _of_rows(r), _tokens(r)
    nodes = carray(pointer(r.nodes), r.window + 1, np.int64)
    tables = carray(pointer(r.tables), (r.num_rows, r.num_blocks), np.int64)
    located = carray(pointer(r.located), (8, r.most_tokens), np.int64)
    cu_q_lens = carray(pointer(p.cu_q_lens), r.num_rows + 1, np.int64)
    nodes = nodes[first_node : first_node + num_nodes]
    n = _locate(live, first, rows[Row.START], nodes, tables, r.window, r.block_size, located, cu_q_lens)
    token_ids = carray(pointer(p.token_ids), n, np.int64)
    for token in range(n):
        token_ids[token] = tokens[located[1, token], located[4, token]]
    p.which, p.num_tokens = stage, n


@njit
def _ask(r: Any, function: int, first: int, most: int, counts: int) -> None:
    """Calls the drafter that looks up with these lines of the rows."""
    rows = _of_rows(r)
    asked = carray(pointer(r.lookups), 1, _LOOKUPS)[0]
    asked.num_rows, asked.window, asked.tokens = r.num_rows, r.window, r.tokens
    asked.first, asked.most = rows[first].ctypes.data, rows[most].ctypes.data
    asked.counts = rows[counts].ctypes.data
    call_with_two(function, r.lookups, r.index)


@njit
def _begin_cycle(p: Any, r: Any) -> None:
    """Looks drafts up; then an exit drafts where there are none."""
    rows = _of_rows(r)
    rows[Row.FOUND, :] = 0
    if r.propose != 0:
        _count_live(
            rows[Row.LIMIT], rows[Row.FIRST], rows[Row.MOST_DRAFTS], r.num_drafts + 1, 1, rows[Row.COUNT]
        )
        _ask(r, r.propose, Row.FIRST, Row.COUNT, Row.FOUND)
    copy_numbers(rows[Row.FOUND], rows[Row.PROPOSED])
    if r.num_computed == 0:
        _take(p, r)
        return
    live, most = rows[Row.LIVE], rows[Row.COUNT]
    _count_live(rows[Row.LIMIT], rows[Row.FIRST], rows[Row.MOST_DRAFTS], r.num_computed + 1, 0, live)
    has_found = False
    for row in range(r.num_rows):
        most[row] = 0
        if rows[Row.FOUND, row] > 0:
            live[row], most[row], has_found = 0, rows[Row.FOUND, row] + 1, True
    if has_found:
        r.depth = -1
        _place(p, r, Stage.FEED, rows[Row.FIRST], 0, r.num_drafts + 1, most)
    else:
        r.depth = 0
        _draft_on(p, r)


@njit
def _draft_on(p: Any, r: Any) -> None:
    """The exit's next pass: over the last token of the rows that go on drafting, the last draft included."""
    rows, any_live = _of_rows(r), False
    for row in range(r.num_rows):
        any_live |= rows[Row.LIVE, row] > r.depth
    if any_live and r.depth <= r.num_computed:
        stage = Stage.DRAFT if r.depth < r.num_computed else Stage.FEED
        _place(p, r, stage, rows[Row.FIRST], r.depth, 1, rows[Row.LIVE])
        return
    for row in range(r.num_rows):
        if rows[Row.FOUND, row] == 0:
            rows[Row.PROPOSED, row] = rows[Row.LIVE, row] - 1
    _take(p, r)


@njit
def _end_draft(p: Any, r: Any) -> None:
    """Puts what the exit has chosen; a row that is not sure enough drafts no further."""
    rows, tokens, n = _of_rows(r), _tokens(r), p.num_tokens
    located = carray(pointer(r.located), (8, r.most_tokens), np.int64)
    best, sums = carray(pointer(p.best), n, np.int64), carray(pointer(p.sums), n, np.float32)
    for token in range(n):
        row = located[1, token]
        tokens[row, located[4, token] + 1] = best[token]
        if r.tests_drafts != 0 and not (np.float32(1.0) / sums[token] >= r.draft_confidence):
            rows[Row.LIVE, row] = min(rows[Row.LIVE, row], r.depth + 1)


@njit
def _take(p: Any, r: Any) -> None:
    """Takes the cycle's drafts; the tier above is next."""
    rows, notes, num_checks = _of_rows(r), _notes(r), r.num_checks
    sources = np.empty(r.num_rows, np.int64)
    for row in range(r.num_rows):
        is_looked_up = r.num_computed == 0 or rows[Row.FOUND, row] > 0
        sources[row] = Source.LOOKED_UP if is_looked_up else Source.COMPUTED
    out = np.empty((2, r.num_rows), np.int64)
    _take_drafts(
        _tokens(r),
        rows[Row.LIMIT],
        rows[Row.FIRST],
        rows[Row.MOST_DRAFTS],
        rows[Row.PROPOSED],
        sources,
        0,
        notes[:, 3 : 3 + num_checks],
        notes[:, 3 + 2 * num_checks :],
        r.cycle,
        r.num_drafts + 1,
        r.vocab_size - 1,
        out,
    )
    copy_numbers(out[0], rows[Row.COUNT])
    copy_numbers(out[1], rows[Row.LIVE])
    has_drafts = False
    for row in range(r.num_rows):
        has_drafts |= out[0, row] > 0
    # Without drafts a check has nothing to judge: verify resumes where the draft tier stopped.
    has_check = r.has_check != 0 and (num_checks > 1 or has_drafts)
    stage = Stage.CHECK if has_check else Stage.VERIFY_DRAFTS
    _place(p, r, stage, rows[Row.FIRST], 0, r.num_drafts + 1, rows[Row.LIVE])


@njit
def _judge(p: Any, r: Any, first: Any, counts: Any, unsure: Any) -> None:
    """Keeps of `counts` tokens after column `first` those that the pass has chosen, too."""
    rows, out = _of_rows(r), np.empty((2, r.num_rows), np.int64)
    best = carray(pointer(p.best), p.num_tokens, np.int64)
    cu_q_lens = carray(pointer(p.cu_q_lens), r.num_rows + 1, np.int64)
    _accept(best, cu_q_lens, _tokens(r), first, counts, unsure, out)
    copy_numbers(out[0], rows[Row.ACCEPTED])
    copy_numbers(out[1], rows[Row.OWN])


@njit
def _check(p: Any, r: Any) -> None:
    """Ends a check: another cycle, or verify, is next."""
    rows, n = _of_rows(r), p.num_tokens
    sums = carray(pointer(p.sums), n, np.float32)
    cu_q_lens = carray(pointer(p.cu_q_lens), r.num_rows + 1, np.int64)
    flags = carray(pointer(r.flags), (2, r.most_tokens + r.num_rows), np.bool_)
    unsure, goes_on = flags[0, : n if r.tests_check != 0 else 0], flags[1, : r.num_rows * r.is_gated]
    for token in range(unsure.shape[0]):
        unsure[token] = np.float32(1.0) / sums[token] < r.check_confidence
    _judge(p, r, rows[Row.FIRST], rows[Row.COUNT], unsure)
    for row in range(goes_on.shape[0]):
        last = min(cu_q_lens[row] + rows[Row.ACCEPTED, row], n - 1)
        goes_on[row] = np.float32(1.0) / sums[last] >= r.continue_confidence
    kept, out = _notes(r)[:, 3 + r.num_checks :], np.empty(r.num_rows, np.int64)
    _end_check(
        _tokens(r),
        rows[Row.LIMIT],
        rows[Row.MOST_CHECKS],
        rows[Row.FIRST],
        rows[Row.ACCEPTED],
        rows[Row.OWN],
        goes_on,
        kept,
        r.cycle,
        out,
    )
    has_room = False
    for row in range(r.num_rows):
        rows[Row.FIRST, row] = out[row]
        has_room |= rows[Row.LIMIT, row] > out[row]
    r.cycle += 1
    if r.cycle < r.num_checks and has_room:
        _begin_cycle(p, r)
        return
    copy_numbers(rows[Row.FIRST], rows[Row.COUNT])
    copy_numbers(rows[Row.FIRST], rows[Row.LIVE])
    _place(p, r, Stage.VERIFY, rows[Row.NOTHING], 0, r.window, rows[Row.LIVE])


@njit
def _verify(p: Any, r: Any) -> None:
    """Ends a round: notes and commits what verify has kept, and begins the next, unless it was the last."""
    rows, tokens, notes = _of_rows(r), _tokens(r), _notes(r)
    counts, evidence = np.empty(r.num_rows, np.int64), np.empty(r.num_rows, np.float32)
    logits = carray(pointer(p.logits), (p.num_tokens, r.vocab_size), np.float32)
    cu_q_lens = carray(pointer(p.cu_q_lens), r.num_rows + 1, np.int64)
    _judge(p, r, rows[Row.NOTHING], rows[Row.COUNT], _NEVER)
    accepted, own, live = rows[Row.ACCEPTED], rows[Row.OWN], rows[Row.LIVE]
    _end_verify(logits, tokens, accepted, own, live, _CHAIN, cu_q_lens, r.window, counts, evidence)
    for row in range(r.num_rows):
        notes[row, 0], notes[row, 1], notes[row, 2] = counts[row], rows[Row.COUNT, row], accepted[row]
        if p.which == Stage.VERIFY_DRAFTS:
            notes[row, 3 + r.num_checks] = accepted[row]
    r.num_done += 1
    if _commit(r, counts, evidence) or r.num_done == r.most_rounds:
        p.which = Stage.BEGIN
        return
    copy_numbers(counts, rows[Row.COUNT])
    if r.propose != 0:
        _ask(r, r.extend, Row.NOTHING, Row.NOTHING, Row.COUNT)
    for row in range(r.num_rows):
        tokens[row, 0] = tokens[row, counts[row]]
        rows[Row.LIMIT, row] = min(rows[Row.CAP, row], rows[Row.ROOM, row])
    rows[Row.FIRST, :] = 0
    r.cycle = 0
    _begin_cycle(p, r)


@njit
def _commit(r: Any, counts: Any, evidence: Any) -> bool:
    """Adds the first counts [rows] of tokens[:, 1:] to what is committed -> whether the next round would be
    another: where a row ends, or lacks places, or none may speculate."""
    rows, tokens = _of_rows(r), _tokens(r)
    committed = carray(pointer(r.committed), (r.num_rows, 1 + r.most_rounds * r.window), np.int64)
    begins = carray(pointer(r.stop_begins), r.num_rows + 1, np.int64)
    stops = carray(pointer(r.stops), begins[r.num_rows], np.int64)
    total = carray(pointer(r.evidence), r.num_rows, np.float32)
    is_over, may_speculate = False, r.num_drafts == 0
    for row in range(r.num_rows):
        for place in range(counts[row]):
            token = tokens[row, place + 1]
            committed[row, rows[Row.COMMITTED, row] + place + 1] = token
            for i in range(begins[row], begins[row + 1]):
                is_over |= stops[i] == token
        rows[Row.COMMITTED, row] += counts[row]
        rows[Row.START, row] += counts[row]
        rows[Row.ROOM, row] -= counts[row]
        total[row] += evidence[row]
        places = min(rows[Row.CAP, row], rows[Row.ROOM, row])
        is_over |= not np.isfinite(total[row]) or places <= 0
        is_over |= rows[Row.START, row] + places > rows[Row.END, row]
        may_speculate |= places > 1
    return is_over or not may_speculate


@cfunc(types.void(types.CPointer(from_dtype(PLACES)), types.CPointer(from_dtype(_ROUNDS))))
def advance(places: Any, rounds: Any) -> None:
    """The link of rounds: ends the stage that has run, and asks for the next one's pass."""
    p, r = carray(places, 1)[0], carray(rounds, 1)[0]
    if p.which == Stage.DRAFT:
        _end_draft(p, r)
    if p.which == Stage.DRAFT or p.which == Stage.FEED:
        r.depth += 1
        _draft_on(p, r)
    elif p.which == Stage.CHECK:
        _check(p, r)
    elif p.which == Stage.BEGIN:
        _begin_cycle(p, r)
    else:
        _verify(p, r)
