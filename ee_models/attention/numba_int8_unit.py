"""A unit of attention (`numba_pages`) over keys and values in int8, group by group of slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from cache.int8_kv import GROUP

from ..kernel_cache import inlined, njit
from ..kernels.numba_int8_kv import bytes_of_head, copy_key, copy_value
from ..kernels.numba_math import ONE
from .numba_int8_products import GROUPS, QUERIES, accumulate, round_queries, score
from .numba_products import FAR_BELOW, TILE, query_at, weigh


@njit
def _find_groups(
    table: Any,
    block_size: int,
    start: int,
    count: int,
    bytes_per_group: int,
    bases: Any,
    of_keys: Any,
    of_values: Any,
) -> None:
    """Writes the addresses of the groups of `count` positions from `start` on, which begin a tile, of keys
    and values from `bases` on; after the last it again."""
    for i in range(GROUPS):
        position = start + min(i, (count - 1) // GROUP) * GROUP
        slot = table[position // block_size] * block_size + position % block_size
        offset = slot // GROUP * bytes_per_group
        of_keys[i], of_values[i] = bases[0] + offset, bases[1] + offset


@njit
def _gather_path(
    path: Any,
    path_start: int,
    start: int,
    count: int,
    shape: Any,
    bases: Any,
    of_keys: Any,
    of_values: Any,
    spare: Any,
) -> None:
    """Where a path tells some of `count` positions from `start` on, puts groups together in `spare`
    [2, GROUPS * bytes]: of those that it tells, and of those before, which the table does. shape: heads, of
    these the first and the last + 1 that are read, numbers of each."""
    num_heads, first_head, last_head, head_dim = shape
    bytes_per_head = bytes_of_head(head_dim)
    bytes_per_group = num_heads * bytes_per_head
    for i in range(max(0, path_start - start) // GROUP, (count + GROUP - 1) // GROUP):
        targets = spare.ctypes.data + i * bytes_per_group, spare.ctypes.data + (GROUPS + i) * bytes_per_group
        for j in range(i * GROUP, min((i + 1) * GROUP, count)):
            keys, values, lane = of_keys[i], of_values[i], j % GROUP
            if start + j >= path_start:
                slot = path[start + j - path_start]
                offset, lane = slot // GROUP * bytes_per_group, slot % GROUP
                keys, values = bases[0] + offset, bases[1] + offset
            for head in range(first_head, last_head):
                at = head * bytes_per_head
                copy_key(keys + at, lane, targets[0] + at, j % GROUP, head_dim)
                copy_value(values + at, lane, targets[1] + at, j % GROUP, head_dim)
        of_keys[i], of_values[i] = targets
    for i in range((count + GROUP - 1) // GROUP, GROUPS):
        of_keys[i], of_values[i] = of_keys[i - 1], of_values[i - 1]


# Within its caller alone: LLVM optimises what a kernel calls once more in each that calls it.
@inlined
def attend_unit_in_int8(
    q: Any, keys: int, values: int, num_kv_heads: int, places: Any, part: Any, scale: Any, out: Any
) -> None:
    """Attention of a part of a row, as numba_pages._attend_unit. Queries are (KV head, token, head of its
    group), of which up to QUERIES are taken together."""
    table, block_size, positions, paths, path_starts = places
    first, last, first_head, last_head = part
    head_dim, group = q.shape[2], q.shape[1] // num_kv_heads
    bytes_per_head, num_per_head = bytes_of_head(head_dim), (last - first) * group
    bytes_per_group, num_queries = num_kv_heads * bytes_per_head, num_per_head * (last_head - first_head)
    queries, sums = (
        np.empty((num_queries, head_dim), np.float32),
        np.zeros((num_queries, head_dim), np.float32),
    )
    peak, total = np.full(num_queries, np.float32(FAR_BELOW)), np.zeros(num_queries, np.float32)
    shrink, query_scales = np.empty(num_queries, np.float32), np.empty(num_queries, np.float32)
    whole_queries, begins = np.empty((num_queries, head_dim), np.int8), np.empty(num_queries, np.int32)
    lengths = np.empty(num_queries, np.int64)  # positions that each query sees
    scores, weight_scales = np.empty((QUERIES, TILE), np.float32), np.empty(QUERIES, np.float32)
    rounded, seen = np.empty((QUERIES, TILE), np.uint8), np.empty(QUERIES, np.int64)
    of_keys, of_values = np.empty(GROUPS, np.int64), np.empty(GROUPS, np.int64)
    keys_ahead, values_ahead = np.empty(GROUPS, np.int64), np.empty(GROUPS, np.int64)
    context_len, shared = 0, path_starts[first]  # positions below `shared` have the same slots for all
    for token in range(first, last):
        context_len, shared = max(context_len, positions[token] + 1), min(shared, path_starts[token])
    spare = np.empty((2, GROUPS * bytes_per_group if shared < context_len else 0), np.int8)
    for i in range(num_queries):
        token, head = query_at(i, num_per_head, group, first, first_head)
        lengths[i] = positions[token] + 1
        for d in range(head_dim):
            queries[i, d] = q[token, head, d] * scale
    round_queries(queries, whole_queries, query_scales, begins)
    for start in range(0, context_len, TILE):
        ahead = min(TILE, min(context_len, shared) - start - TILE)
        if ahead > 0:
            _find_groups(
                *(table, block_size, start + TILE, ahead, bytes_per_group, (keys, values)),
                *(keys_ahead, values_ahead),
            )
        together = start + TILE <= shared
        num_in_turn = last - first if together else 1
        for token in range(first, last, num_in_turn):
            count = min(TILE, (context_len if together else positions[token] + 1) - start)
            if count <= 0:
                continue
            by_table = min(count, path_starts[token] - start)
            if by_table > 0:
                _find_groups(
                    *(table, block_size, start, by_table, bytes_per_group, (keys, values)),
                    *(of_keys, of_values),
                )
            if by_table < count:
                _gather_path(
                    *(paths[token], path_starts[token], start, count),
                    *((num_kv_heads, first_head, last_head, head_dim), (keys, values)),
                    *(of_keys, of_values, spare),
                )
            for kv_head in range(first_head, last_head):
                of_head, is_last = kv_head * bytes_per_head, kv_head + 1 == last_head
                # What is read next: the next head, or the first one of the next tile.
                of_next = first_head * bytes_per_head if is_last else of_head + bytes_per_head
                of_next = of_head if is_last and ahead <= 0 else of_next
                # By address: of arrays numba counts who holds them, one thread after the other.
                goes_on = is_last and ahead > 0
                asked_keys = keys_ahead.ctypes.data if goes_on else of_keys.ctypes.data
                asked_values = values_ahead.ctypes.data if goes_on else of_values.ctypes.data
                i = (kv_head - first_head) * num_per_head + (token - first) * group
                end = i + num_in_turn * group
                num_blocks = (end - i + QUERIES - 1) // QUERIES
                for block in range(num_blocks):
                    num = (end - i) // (num_blocks - block)  # blocks as alike as can be
                    longest = 0
                    for k in range(num):
                        seen[k] = max(0, min(count, lengths[i + k] - start))
                        longest = max(longest, seen[k])
                    if longest > 0:
                        score(
                            *(whole_queries, begins, query_scales, i, num, of_keys, of_head, longest, scores),
                            (asked_keys, of_next),
                        )
                        for k in range(num):
                            at = 4 * (i + k)
                            of_scores = scores.ctypes.data + k * scores.strides[0]
                            of_peak, of_total = peak.ctypes.data + at, total.ctypes.data + at
                            weigh(of_scores, seen[k], of_peak, of_total, shrink.ctypes.data + at)
                        accumulate(
                            *(scores, rounded, weight_scales, of_values, of_head, longest, seen),
                            *(shrink, sums, i, num, (asked_values, of_next)),
                        )
                    i += num
    for i in range(num_queries):
        token, head = query_at(i, num_per_head, group, first, first_head)
        o, s, factor = out[token, head], sums[i], ONE / total[i]
        for d in range(head_dim):
            o[d] = s[d] * factor
