"""Attention over pages in Triton: one kernel walks the context in splits, another puts the splits of a token
together.

Sums in which a compiler could choose a rounding are written as fused multiply-adds, so that all kernels round
alike.

What a query has seen so far is `running`: (peak [n], total [n], sums [n, PADDED_DIM]) in fp32; weights are
powers of two below the peak.
"""

from __future__ import annotations

import triton
import triton.language as tl

_FAR_BELOW: tl.constexpr = tl.constexpr(-1e30)  # -inf would turn the difference of two peaks into NaN


@triton.jit
def _nothing(SIZE: tl.constexpr, PADDED_DIM: tl.constexpr) -> tl.tuple:
    return (
        tl.full([SIZE], _FAR_BELOW, tl.float32),
        tl.zeros([SIZE], tl.float32),
        tl.zeros([SIZE, PADDED_DIM], tl.float32),
    )


@triton.jit
def _attend_tile(
    running: tl.tuple,
    queries: tl.tensor,
    pages: tl.tuple,
    slots: tl.tensor,
    in_use: tl.tensor,
    seen: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tuple:
    """One step of the online softmax -> running. Of slots [tile] those `in_use` [tile] are loaded, and query
    i weighs those with seen[i].

    queries [BLOCK_M, PADDED_DIM]; pages: (keys and values of one KV head, their stride from slot to slot, the
    scale of scores).
    """
    keys, values, slot_stride, scale = pages
    peak, total, sums = running
    dims = tl.arange(0, PADDED_DIM)
    at = slots[:, None] * slot_stride + dims[None, :]
    # Zeros for what is not in use: it may be NaN, and 0 * NaN is NaN. What is in use, but not seen by a
    # query, was written in this pass: finite.
    mask = in_use[:, None] & (dims < HEAD_DIM)[None, :]
    key_tile = tl.load(keys + at, mask=mask, other=0.0).to(queries.dtype)
    value_tile = tl.load(values + at, mask=mask, other=0.0).to(queries.dtype)
    if WIDEN:
        scores = tl.dot(queries.to(tl.float32), tl.trans(key_tile.to(tl.float32)), input_precision="ieee")
    else:
        scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee")
    scores = tl.where(seen, scores * scale, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    weights = weights.to(queries.dtype)
    if WIDEN:
        sums = tl.dot(
            weights.to(tl.float32), value_tile.to(tl.float32), sums * shrink[:, None], input_precision="ieee"
        )
    else:
        sums = tl.dot(weights, value_tile, sums * shrink[:, None], input_precision="ieee")
    return new_peak, total, sums


@triton.jit
def _merge(running: tl.tuple, part: tl.tuple) -> tl.tuple:
    """Both together. A part that saw nothing changes no bit, and the first part is taken over as it is."""
    peak, total, sums = running
    part_peak, part_total, part_sums = part
    new_peak = tl.maximum(peak, part_peak)
    shrink, part_shrink = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
    total = tl.fma(total, shrink, part_total * part_shrink)
    sums = tl.fma(sums, tl.broadcast_to(shrink[:, None], sums.shape), part_sums * part_shrink[:, None])
    return new_peak, total, sums


@triton.jit
def _store(
    out: tl.tensor,
    pairs: tl.tensor,
    live: tl.tensor,
    running: tl.tuple,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    """Writes the live ones of pairs [n] to out [all pairs, HEAD_DIM]. Both kernels end here, so one split or
    several leave the same bits."""
    _peak, total, sums = running
    dims = tl.arange(0, PADDED_DIM)
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)  # a place of padding may see nothing
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(
        out + pairs[:, None] * HEAD_DIM + dims[None, :],
        (sums * factor[:, None]).to(out.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _attend_range(
    begin: tl.tensor,
    end: tl.tensor,
    queries: tl.tensor,
    tokens: tl.tensor,
    own: tl.tensor,
    pages: tl.tuple,
    table: tl.tensor,
    tree: tl.tuple,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    TURN_TILE: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tuple:
    """What queries [BLOCK_M, PADDED_DIM], those of `tokens` [BLOCK_M] at positions `own` [BLOCK_M], see in
    positions begin..end-1 -> running.

    In a tree the tokens take turns from position `turns_begin` on, each with the slots of its own path: so a
    tile holds for the token in turn what it would hold in a chain.
    """
    positions, paths, path_starts, path_stride, depth, first_token, num_tokens, turns_begin = tree
    running = _nothing(BLOCK_M, PADDED_DIM)
    shared_end = tl.minimum(end, turns_begin)
    for start in tl.range(begin, shared_end, TILE):
        at = start + tl.arange(0, TILE)
        in_use = at < shared_end
        slots = tl.load(table + at // BLOCK_SIZE, mask=in_use, other=0) * BLOCK_SIZE + at % BLOCK_SIZE
        seen = in_use[None, :] & (at[None, :] <= own[:, None])
        running = _attend_tile(running, queries, pages, slots, in_use, seen, HEAD_DIM, PADDED_DIM, WIDEN)
    if HAS_PATHS:
        turns_begin = tl.maximum(begin, turns_begin)
        tiles_per_turn = tl.cdiv(tl.maximum(end - turns_begin, 0), TURN_TILE)
        divisor = tl.maximum(tiles_per_turn, 1)  # the compiler divides ahead of a loop that may not run
        for i in tl.range(0, num_tokens * tiles_per_turn):
            token = first_token + i // divisor
            at = turns_begin + i % divisor * TURN_TILE + tl.arange(0, TURN_TILE)
            in_use = (at < end) & (at <= tl.load(positions + token))
            step = at - tl.load(path_starts + token)  # below 0 the block table tells the slot
            by_table = (
                tl.load(table + at // BLOCK_SIZE, mask=in_use & (step < 0), other=0) * BLOCK_SIZE
                + at % BLOCK_SIZE
            )
            by_path = tl.load(
                paths + token * path_stride + step, mask=in_use & (step >= 0) & (step < depth), other=0
            )
            slots = tl.where(step < 0, by_table, tl.maximum(by_path, 0))  # padding may name slot -1
            seen = in_use[None, :] & (tokens == token)[:, None]
            running = _attend_tile(running, queries, pages, slots, in_use, seen, HEAD_DIM, PADDED_DIM, WIDEN)
    return running


# What changes from pass to pass must not lead to another compilation, which nothing could afford while a
# graph is captured.
@triton.jit(
    do_not_specialize=[
        "tables",
        "positions",
        "cu_q_lens",
        "paths",
        "path_starts",
        "table_stride",
        "path_stride",
        "depth",
        "m_blocks",
        "split_len",
        "num_splits",
        "num_pairs",
    ]
)
def attend_pages(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    positions: tl.tensor,
    cu_q_lens: tl.tensor,
    paths: tl.tensor,
    path_starts: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    split_sums: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    path_stride: tl.tensor,
    depth: tl.tensor,
    m_blocks: tl.tensor,
    split_len: tl.tensor,
    num_splits: tl.tensor,
    num_pairs: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    TURN_TILE: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    FOLD: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Grid (rows * m_blocks, kv heads, num_splits). A program takes PAIRS consecutive (token, head) pairs of
    one row and KV head, and positions split * split_len to + split_len - 1; if FOLD and there is one split,
    it goes through the whole context split_len by split_len.

    q [tokens, heads, HEAD_DIM], keys and values [slots, kv heads, HEAD_DIM], paths [tokens, depth]. With one
    split it writes out [pairs, HEAD_DIM], pair = token * heads + head; with more, stats [2, num_splits,
    pairs] (peaks, then totals) and split_sums [num_splits, pairs, HEAD_DIM], but nothing for splits past all
    of the program's tokens.
    """
    row = tl.program_id(0) // m_blocks
    first_pair = (
        m_blocks - 1 - tl.program_id(0) % m_blocks
    ) * PAIRS  # the last tokens see most: they go first
    kv_head, split = tl.program_id(1), tl.program_id(2)
    row_begin = tl.load(cu_q_lens + row)
    row_pairs = (tl.load(cu_q_lens + row + 1) - row_begin).to(tl.int32) * GROUP
    if first_pair >= row_pairs:
        return
    places = tl.arange(0, BLOCK_M)
    in_row = first_pair + places
    live = (places < PAIRS) & (in_row < row_pairs)
    tokens, heads = row_begin + in_row // GROUP, kv_head * GROUP + in_row % GROUP
    own = tl.load(positions + tokens, mask=live, other=-1).to(tl.int32)
    begin, end = split * split_len, tl.max(own, 0) + 1
    if begin >= end:
        return
    dims = tl.arange(0, PADDED_DIM)
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(
        q + tokens[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :],
        mask=mask,
        other=0.0,
    )
    pages = keys + kv_head * kv_head_stride, values + kv_head * kv_head_stride, slot_stride, scale
    table = tables + row.to(tl.int64) * table_stride
    num_tokens, turns_begin = 0, end
    if HAS_PATHS:
        num_tokens = (tl.minimum(first_pair + PAIRS, row_pairs) - 1) // GROUP - first_pair // GROUP + 1
        starts = tl.load(path_starts + tokens, mask=live, other=0)
        shared = tl.min(tl.where(live & (starts <= own), starts, end), 0).to(tl.int32)
        turns_begin = tl.where(shared < end, shared // TURN_TILE * TURN_TILE, end)
    tree = (
        positions,
        paths,
        path_starts,
        path_stride,
        depth,
        row_begin + first_pair // GROUP,
        num_tokens,
        turns_begin,
    )
    if FOLD:
        running = _nothing(BLOCK_M, PADDED_DIM)
        last = tl.where(num_splits == 1, end, tl.minimum(end, begin + split_len))
        for part_begin in tl.range(begin, last, split_len, num_stages=1):
            part = _attend_range(
                part_begin,
                tl.minimum(end, part_begin + split_len),
                queries,
                tokens,
                own,
                pages,
                table,
                tree,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_SIZE,
                BLOCK_M,
                TILE,
                TURN_TILE,
                HAS_PATHS,
                WIDEN,
            )
            running = _merge(running, part)
    else:
        running = _attend_range(
            begin,
            tl.minimum(end, begin + split_len),
            queries,
            tokens,
            own,
            pages,
            table,
            tree,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            BLOCK_M,
            TILE,
            TURN_TILE,
            HAS_PATHS,
            WIDEN,
        )
    pairs = tokens * (GROUP * tl.num_programs(1)) + heads
    if num_splits == 1:
        _store(out, pairs, live, running, HEAD_DIM, PADDED_DIM)
    else:
        at = split * num_pairs + pairs
        tl.store(stats + at, running[0], mask=live)
        tl.store(stats + num_splits * num_pairs + at, running[1], mask=live)
        tl.store(split_sums + at[:, None] * HEAD_DIM + dims[None, :], running[2], mask=mask)


@triton.jit(do_not_specialize=["positions", "split_len", "num_splits", "num_pairs"])
def combine_splits(
    stats: tl.tensor,
    split_sums: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    split_len: tl.tensor,
    num_splits: tl.tensor,
    num_pairs: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Merges what `attend_pages` left, split by split from the first on, for ROWS pairs a program. A token
    has the splits up to its position: those after it were not written. AT_ONCE splits can be loaded before
    the first of them is merged."""
    pairs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = pairs < num_pairs
    dims = tl.arange(0, PADDED_DIM)
    own = tl.load(positions + pairs // NUM_HEADS, mask=live, other=0).to(tl.int32)
    counts = tl.where(live, own // split_len + 1, 0)
    running = _nothing(ROWS, PADDED_DIM)
    for first in tl.range(0, tl.max(counts, 0), AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            written = first + i < counts
            at = (first + i) * num_pairs + pairs
            peak = tl.load(stats + at, mask=written, other=_FAR_BELOW)
            total = tl.load(stats + num_splits * num_pairs + at, mask=written, other=0.0)
            mask = written[:, None] & (dims < HEAD_DIM)[None, :]
            running = _merge(
                running,
                (
                    peak,
                    total,
                    tl.load(split_sums + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0),
                ),
            )
    _store(out, pairs, live, running, HEAD_DIM, PADDED_DIM)
