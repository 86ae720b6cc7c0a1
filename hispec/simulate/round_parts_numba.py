"""Compiled parts of a simulated round: costs of passes, draws of what is right, limits of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .costs import COMPUTED, EXIT_TOKENS, KIND, LOOKED_UP, PREFILL_STAGE
from .row_columns import (
    CHECKS,
    DRAFTS,
    FIRST,
    LAST,
    LEFT,
    LENGTH,
    MOST,
    OUTPUT,
    ROUND,
    S_PREFILL_PASSES,
    S_PREFILL_SECONDS,
)
from .workload import DRAFT, EXIT, MATCH
from .workload import VERIFY as AT_VERIFY

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True}


kernel = njit(cache=True, nogil=True)


@kernel
def chance(seed: Any, stream: Any, place: Any) -> Any:
    """A number in [0, 1) that depends on these alone: so a draft at a place is right or wrong under every
    policy and plan."""
    x = (
        seed
        ^ (np.uint64(stream + 1) * np.uint64(0x9E3779B97F4A7C15))
        ^ (np.uint64(place) * np.uint64(0xD1B54A32D192ED03))
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def cost(tables: Any, stage: Any, rows: Any, tokens: Any, context: Any) -> Any:
    each = tables.stages[stage]
    paid = max(tokens - each[5], 0.0)
    return (
        each[0]
        + each[1] * rows
        + each[2] * paid
        + each[3] * context
        + each[4] * tokens * context / max(rows, 1)
    )


@kernel
def factor(points: Any, now: Any) -> Any:
    """Of a drift [2, points] at this time."""
    seconds, factors = points[0], points[1]
    if now <= seconds[0]:
        return factors[0]
    for i in range(1, len(seconds)):
        if now < seconds[i]:
            return factors[i - 1] + (factors[i] - factors[i - 1]) * (now - seconds[i - 1]) / (
                seconds[i] - seconds[i - 1]
            )
    return factors[-1]


@kernel
def rows_paid(tables: Any, rows: Any) -> Any:
    if tables.is_static:
        for bucket in tables.buckets:
            if bucket >= rows:
                return bucket
    return rows


@kernel
def own(value: Any, most: Any) -> Any:
    """K or R of a row: the plan's, unless it has less of its own."""
    return most if value < 0 else min(most, value)


@kernel
def limit(row: Any, num_drafts: Any, num_checks: Any) -> Any:
    """Places that a round may process for a row, never more than it may still output."""
    drafts = own(row[DRAFTS], num_drafts)
    return min(own(row[CHECKS], num_checks) * (drafts + 1) if drafts > 0 else 1, row[MOST] - row[OUTPUT])


@kernel
def blocks_needed(whole: Any, num_rows: Any, num_drafts: Any, num_checks: Any, block_size: Any) -> Any:
    """KV blocks that the next round may need, of all rows."""
    needed = 0
    for r in range(num_rows):
        needed += -(-(whole[r, LENGTH] - 1 + limit(whole[r], num_drafts, num_checks)) // block_size)
    return needed


@kernel
def rounds_left(
    seed: Any, shares: Any, positions: Any, route: Any, num_drafts: Any, output: Any, target: Any
) -> Any:
    """Rounds until the output is complete, by a plan of two tiers (num_drafts 0 = plain), drift aside; for
    oracles. shares [4]"""
    rounds = 0
    while output < target:
        drafts, which = num_drafts, DRAFT
        if route[KIND] != COMPUTED and chance(seed, MATCH, output) >= shares[MATCH]:
            drafts, which = 0 if route[KIND] == LOOKED_UP else min(drafts, route[EXIT_TOKENS]), EXIT
        kept = 0
        while (
            kept < drafts and chance(seed, DRAFT, output + kept + 1) < shares[which] * positions[which, kept]
        ):
            kept += 1
        output += kept + 1
        rounds += 1
    return rounds


@kernel
def prefill(rows: Any, num_rows: Any, order: Any, tables: Any, max_tokens: Any) -> Any:
    """One pass over pieces of prompts, in this order of rows -> seconds."""
    whole, budget, num, context, fed = rows.whole, max_tokens, 0, 0, np.empty(num_rows, np.int64)
    for i in range(num_rows):
        r = order[i]
        if whole[r, LEFT] > 0 and budget > 0:
            take = min(budget, whole[r, LEFT])
            budget -= take
            whole[r, LEFT] -= take
            fed[num] = r
            num += 1
            context += whole[r, LENGTH] - 1 - whole[r, LEFT]
            rows.real[r, S_PREFILL_PASSES] += 1.0
    seconds = cost(tables, PREFILL_STAGE, num, max_tokens - budget, context) if num > 0 else 0.0
    for i in range(num):
        rows.real[fed[i], S_PREFILL_SECONDS] += seconds
    return seconds


@kernel
def is_recorded(row: Any, route_index: Any, tables: Any) -> Any:
    """The recorded round that this one repeats; -1 = none of this route is left."""
    at = row[FIRST] + row[ROUND]
    return at if row[FIRST] >= 0 and at < row[LAST] and tables.recorded_rounds[at, 0] == route_index else -1


@kernel
def cycle(
    r: Any, cycle: Any, offset: Any, room: Any, rows: Any, route_index: Any, tables: Any, factors: Any
) -> Any:
    """A row's drafts in a cycle, of which there may be `room` -> (drafted, kept by the tier above, whether
    they were looked up)."""
    recorded = is_recorded(rows.whole[r], route_index, tables)
    if recorded >= 0:
        at = tables.recorded_rounds[recorded, 2] + cycle
        drafted = min(room, tables.recorded_cycles[at, 0]) if at < tables.recorded_rounds[recorded, 3] else 0
        return drafted, min(drafted, tables.recorded_cycles[at, 1]) if drafted > 0 else 0, 0
    seed, shares, route = rows.seeds[r], rows.shares[r, route_index], tables.routes[route_index]
    start, which, looked_up = rows.whole[r, OUTPUT] + offset, DRAFT, 0
    if route[KIND] != COMPUTED:
        looked_up = 1 if room > 0 and chance(seed, MATCH, start) < shares[MATCH] else 0
        if looked_up == 0:
            which, room = EXIT, 0 if route[KIND] == LOOKED_UP else min(room, route[EXIT_TOKENS])
    kept, positions = 0, tables.positions[route_index, which]
    while (
        kept < room
        and chance(seed, DRAFT, start + kept + 1) < shares[which] * positions[kept] * factors[which]
    ):
        kept += 1
    return room, kept, looked_up


@kernel
def accepted(r: Any, offset: Any, rows: Any, route_index: Any, tables: Any, factor: Any) -> Any:
    """Leading tentative tokens that verify keeps, of `offset`."""
    recorded = is_recorded(rows.whole[r], route_index, tables)
    if recorded >= 0:
        return min(offset, tables.recorded_rounds[recorded, 1] - 1)
    accepted, positions, share = 0, tables.positions[route_index, 2], rows.shares[r, route_index, AT_VERIFY]
    while accepted < offset:
        wanted = share * positions[min(accepted, len(positions) - 1)] * factor
        if chance(rows.seeds[r], AT_VERIFY, rows.whole[r, OUTPUT] + accepted + 1) >= wanted:
            break
        accepted += 1
    return accepted
