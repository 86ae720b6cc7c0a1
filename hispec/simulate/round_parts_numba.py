"""Compiled parts of a simulated round: costs of passes, acceptance, limits of rows, prefill."""

from __future__ import annotations

from typing import Any

import numpy as np

from ee_models.kernel_cache import inlined, njit

from .row_state import RoundPlan, Rows
from .tables import Tables
from .workload import DRAFT, EXIT, GATE, MATCH, VERIFY


@njit
def uniform(seed: Any, stream: int, position: int) -> Any:
    """A hash in [0, 1) of its arguments alone: a draft at a position is right or wrong under every policy and
    plan."""
    x = (
        seed
        ^ (np.uint64(stream + 1) * np.uint64(0x9E3779B97F4A7C15))
        ^ (np.uint64(position) * np.uint64(0xD1B54A32D192ED03))
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit
def cost(stage: Any, rows: int, tokens: int, context: int) -> Any:
    """Seconds of a pass, as hispec.latency.model.Linear; stage [terms], see Tables."""
    seconds = stage[0] + stage[1] * rows + stage[2] * context + stage[3] * tokens * context / max(rows, 1)
    for at in range(4, len(stage), 2):
        seconds += max(tokens - stage[at], 0.0) * stage[at + 1]
    return seconds


@njit
def drift_factor(points: Any, now: float) -> Any:
    """The factor at this time of a drift [2, points], linear between points."""
    seconds, factors = points[0], points[1]
    if now >= seconds[-1]:
        return factors[-1]
    if now <= seconds[0]:
        return factors[0]
    i = 1
    while now >= seconds[i]:
        i += 1
    return factors[i - 1] + (factors[i] - factors[i - 1]) * (now - seconds[i - 1]) / (
        seconds[i] - seconds[i - 1]
    )


@inlined
def padded_rows(tables: Tables, rows: int) -> int:
    """Rows that passes over so many rows cost: those of the bucket, where shapes are static."""
    if tables.is_static:
        for bucket in tables.buckets:
            if bucket >= rows:
                return bucket
    return rows


@njit
def own(value: int, most: int) -> int:
    """K or R of a row: the plan's, unless the row has a smaller one of its own."""
    return most if value < 0 else min(most, value)


@njit
def limit(row: Any, plan: RoundPlan) -> int:
    """Positions that a round may process for a row, never more than it may still output."""
    drafts = own(row.num_drafts, plan.num_drafts)
    window = own(row.num_checks, plan.num_checks) * (drafts + 1) if drafts > 0 else 1
    return min(window, row.max_tokens - row.output)


@njit
def blocks_needed(rows: Rows, plan: RoundPlan, block_size: int) -> int:
    """KV blocks that all rows together may need in the next round."""
    needed = 0
    for row in rows:
        needed += -(-(row.length - 1 + limit(row, plan)) // block_size)
    return needed


@inlined
def prefill(tables: Tables, rows: Rows, order: Any) -> Any:
    """One pass over chunks of prompts, in this order of rows -> seconds."""
    budget, num, context = tables.max_prefill_tokens, 0, 0
    fed = np.empty(len(rows), np.int64)
    for r in order:
        row = rows[r]
        if row.prefill_left > 0 and budget > 0:
            take = min(budget, row.prefill_left)
            budget -= take
            row.prefill_left -= take
            row.prefill_passes += 1.0
            fed[num] = r
            num += 1
            context += row.length - 1 - row.prefill_left
    if num == 0:
        return 0.0
    seconds = cost(tables.prefill, num, tables.max_prefill_tokens - budget, context)
    for r in fed[:num]:
        rows[r].prefill_s += seconds
    return seconds


@inlined
def draft(tables: Tables, request: int, route: int, start: int, room: int, factors: Any) -> Any:
    """A cycle of at most `room` drafts after `start` output tokens -> (drafted, kept by the tier above,
    whether they were looked up). factors: as `_round`."""
    seed, shares, which, looked_up = tables.seeds[request], tables.shares[route, request], DRAFT, 0
    if tables.looks_up[route]:
        looked_up = 1 if room > 0 and uniform(seed, MATCH, start) < shares[MATCH] else 0
        if looked_up == 0:
            which, room = EXIT, min(room, tables.exit_tokens[route])
    kept, positions = 0, tables.positions[route, which]
    while (
        kept < room
        and uniform(seed, DRAFT, start + kept + 1) < shares[which] * positions[kept] * factors[which]
    ):
        kept += 1
    return room, kept, looked_up


@inlined
def recorded_round(tables: Tables, row: Any, route: int) -> int:
    """The recorded round of this route's tiers that a row repeats now; -1 = none."""
    at = row.first_recorded + row.round_index
    if row.first_recorded < 0 or at >= row.end_recorded:
        return -1
    return at if tables.recorded_rounds[at, 0] == tables.recorded_routes[route] else -1


@inlined
def draft_or_repeat(
    tables: Tables, row: Any, route: int, cycle: int, tentative: int, room: int, factors: Any
) -> Any:
    """As `draft`, for a row's cycle after so many tentative tokens; a recorded one if there is any."""
    recorded = recorded_round(tables, row, route)
    if recorded < 0:
        return draft(tables, row.request, route, row.output + tentative, room, factors)
    at = tables.recorded_rounds[recorded, 2] + cycle
    if at >= tables.recorded_rounds[recorded, 3]:
        return 0, 0, 0
    drafted = min(room, tables.recorded_cycles[at, 0])
    return drafted, min(drafted, tables.recorded_cycles[at, 1]), 0


@inlined
def accept(tables: Tables, row: Any, route: int, tentative: int, factor: float) -> int:
    """How many leading ones of a row's tentative tokens verify accepts."""
    recorded = recorded_round(tables, row, route)
    if recorded >= 0:
        return min(tentative, tables.recorded_rounds[recorded, 1] - 1)
    accepted, positions = 0, tables.positions[route, 2]
    seed, share = tables.seeds[row.request], tables.shares[route, row.request, VERIFY]
    while accepted < tentative:
        rate = share * positions[min(accepted, len(positions) - 1)] * factor
        if uniform(seed, VERIFY, row.output + accepted + 1) >= rate:
            break
        accepted += 1
    return accepted


@inlined
def goes_on(tables: Tables, row: Any, route: int, cycle: int, tentative: int, factor: float) -> bool:
    """Whether the check that ended a row's cycle, with so many tentative tokens, lets another follow."""
    if not tables.is_gated[route]:
        return True
    recorded = recorded_round(tables, row, route)
    if recorded >= 0:
        return tables.recorded_rounds[recorded, 2] + cycle + 1 < tables.recorded_rounds[recorded, 3]
    is_right = accept(tables, row, route, tentative, factor) == tentative
    return (
        uniform(tables.seeds[row.request], GATE, row.output + tentative)
        < tables.gates[route, 1 if is_right else 0]
    )


@njit
def rounds_left(tables: Tables, request: int, route: int, num_drafts: int, output: int, target: int) -> int:
    """Rounds until the output is complete, by a plan of two tiers (num_drafts 0 = plain) without drift; for
    oracles."""
    rounds = 0
    while output < target:
        _, kept, _ = draft(tables, request, route, output, num_drafts, (1.0, 1.0, 1.0))
        output += kept + 1
        rounds += 1
    return rounds
