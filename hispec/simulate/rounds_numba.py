"""Rounds, compiled: runs of them over the same rows and by the same choice, as hispec/decoding/round.py and
hispec/drafters run them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .costs import (
    CHECK,
    COMPUTED,
    EXIT_TOKENS,
    FILL,
    HAS_CHECK,
    HYBRID,
    KIND,
    LOOKED_UP,
    LOOKUP_STAGE,
    PASS,
    PLAIN_STAGE,
    PLAIN_VERIFY,
    ROUND_STAGE,
    VERIFY,
)
from .round_parts_numba import accepted as accepted_by_verify
from .round_parts_numba import blocks_needed, cost, factor, limit, own, prefill, rows_paid
from .round_parts_numba import cycle as draft_cycle
from .row_columns import (
    CHECKS,
    DRAFTS,
    FINISHED,
    FIRST_TOKEN,
    JOINED,
    LEFT,
    LENGTH,
    NO_ROOM,
    OUTPUT,
    REQUEST,
    ROUND,
    ROUNDS,
    S_ACCEPTED,
    S_DRAFTED,
    S_PASSES,
    S_ROUNDS,
    S_SECONDS,
    S_TOKENS,
    T_ACCEPTED,
    T_CONTEXT,
    T_DRAFTED,
    T_KEPT,
    T_ROUND_S,
    T_ROUNDS,
    T_ROWS,
    T_STEP_S,
    T_TENTATIVE,
    T_TOKENS,
    TARGET,
    TIME,
)

kernel = njit(cache=True, nogil=True)


@kernel
def _draft_seconds(
    num: Any, drafted: Any, looked_up: Any, contexts: Any, num_drafts: Any, route: Any, tables: Any, paid: Any
) -> Any:
    """Of one cycle's drafting, for rows with these drafts [num]; `paid`: rows of a static shape -> seconds,
    passes over the draft tier."""
    context, seconds, passes = contexts[:num].sum(), 0.0, 0
    if route[KIND] != COMPUTED:
        seconds += cost(tables, LOOKUP_STAGE, paid, paid, context)
        if route[KIND] == LOOKED_UP:
            return seconds, passes
        fed = looked_up[:num].sum()
        tokens, fed_context = (
            (looked_up[:num] * (drafted[:num] + 1)).sum(),
            (looked_up[:num] * contexts[:num]).sum(),
        )
        if tables.is_static:
            fed, tokens, fed_context = paid, paid * (num_drafts + 1), context
        if fed > 0:
            seconds, passes = seconds + cost(tables, route[FILL], fed, tokens, fed_context), 1
    depth = min(num_drafts, route[EXIT_TOKENS]) if route[KIND] == HYBRID else num_drafts
    for step in range(depth + 1):
        rows = pass_context = 0
        for i in range(num):
            if looked_up[i] == 0 and drafted[i] >= step:
                rows, pass_context = rows + 1, pass_context + contexts[i]
        if tables.is_static:
            rows, pass_context = paid, context
        elif rows == 0:
            break
        seconds += cost(tables, route[PASS] if step < depth else route[FILL], rows, rows, pass_context)
        passes += 1
    return seconds, passes


@kernel
def _plain_round(rows: Any, num_rows: Any, ready: Any, tables: Any, totals: Any) -> Any:
    """One round of plain decoding -> seconds."""
    whole, context = rows.whole, 0
    for r in range(num_rows):
        if whole[r, LEFT] == 0:
            context += whole[r, LENGTH]
            whole[r, OUTPUT] += 1
            whole[r, LENGTH] += 1
            whole[r, S_TOKENS] += 1
            rows.real[r, S_PASSES] += 1.0
    paid = rows_paid(tables, ready)
    totals[T_TOKENS] += ready
    totals[T_CONTEXT] += context
    return cost(tables, PLAIN_STAGE, paid, paid, context) + cost(tables, ROUND_STAGE, ready, ready, context)


@kernel
def _round(
    now: Any,
    rows: Any,
    num_rows: Any,
    ready: Any,
    route_index: Any,
    num_drafts: Any,
    num_checks: Any,
    tables: Any,
    kept: Any,
    totals: Any,
) -> Any:
    """One speculative round -> seconds."""
    whole, route, passes, drift = (
        rows.whole,
        tables.routes[route_index],
        tables.passes[route_index],
        tables.drift[route_index],
    )
    factors = (factor(drift[0], now), factor(drift[1], now), factor(drift[2], now))
    state = np.zeros((6, num_rows), np.int64)
    offset, all_drafted, accepted, drafted, looked_up, contexts = (
        state[0],
        state[1],
        state[2],
        state[3],
        state[4],
        state[5],
    )
    paid, has_check, skipped = rows_paid(tables, ready), route[HAS_CHECK] == 1, False
    seconds = num_passes = 0.0
    for cycle in range(num_checks):
        live = tokens = proposed = 0
        for r in range(num_rows):
            most = limit(whole[r], num_drafts, num_checks)
            if whole[r, LEFT] > 0 or offset[r] >= most or cycle >= own(whole[r, CHECKS], num_checks):
                continue
            room = min(own(whole[r, DRAFTS], num_drafts), most - offset[r] - 1)
            d, m, was_looked_up = draft_cycle(r, cycle, offset[r], room, rows, route_index, tables, factors)
            if kept.is_kept and room > 0:  # else there is nothing to learn
                entry = kept.cycles[kept.num[0]]
                entry[0], entry[1], entry[2], entry[3], entry[4] = (
                    whole[r, REQUEST],
                    room,
                    d,
                    m,
                    was_looked_up,
                )
                kept.num[0] += 1
            drafted[live], looked_up[live], contexts[live] = d, was_looked_up, whole[r, LENGTH] + offset[r]
            live, tokens, proposed = live + 1, tokens + d + 1, proposed + d
            all_drafted[r] += d
            accepted[r] = m
            totals[T_KEPT] += m
            offset[r] += m + 1
        if live == 0:
            break
        context = contexts[:live].sum()
        draft_s, draft_passes = _draft_seconds(
            live, drafted, looked_up, contexts, num_drafts, route, tables, paid if tables.is_static else live
        )
        seconds, num_passes = seconds + draft_s, num_passes + draft_passes * passes[0]
        tokens, live = (paid * (num_drafts + 1), paid) if tables.is_static else (tokens, live)
        # Without any draft a single check has nothing to filter: verify resumes where drafting stopped.
        skipped = has_check and num_checks == 1 and proposed == 0 and not tables.is_static
        if not has_check or skipped:
            seconds, num_passes = (
                seconds + cost(tables, route[PLAIN_VERIFY], live, tokens, context),
                num_passes + passes[3],
            )
        else:
            seconds, num_passes = (
                seconds + cost(tables, route[CHECK], live, tokens, context),
                num_passes + passes[1],
            )
    if kept.is_kept and not has_check:
        for r in range(num_rows):
            if offset[r] > 0 and all_drafted[r] > 0:
                entry = kept.verified[kept.num[1]]
                entry[0], entry[1], entry[2] = whole[r, REQUEST], all_drafted[r], accepted[r]
                kept.num[1] += 1
    if has_check and not skipped:
        seconds += _verify_seconds(
            rows,
            num_rows,
            ready,
            offset,
            route_index,
            num_drafts,
            num_checks,
            tables,
            accepted,
            kept,
            factors[2],
            totals,
        )
        num_passes += passes[2]
    return seconds + _commit(rows, num_rows, offset, all_drafted, accepted, num_passes, tables, ready, totals)


@kernel
def _verify_seconds(
    rows: Any,
    num_rows: Any,
    ready: Any,
    offset: Any,
    route_index: Any,
    num_drafts: Any,
    num_checks: Any,
    tables: Any,
    accepted: Any,
    kept: Any,
    trust: Any,
    totals: Any,
) -> Any:
    """Verify after checks: what it accepts [rows] of `offset` tentative tokens [rows] -> seconds."""
    context = tentative = 0
    for r in range(num_rows):
        if offset[r] > 0:
            accepted[r] = accepted_by_verify(r, offset[r], rows, route_index, tables, trust)
            context += rows.whole[r, LENGTH]
            tentative += offset[r]
            if kept.is_kept:
                entry = kept.verified[kept.num[1]]
                entry[0], entry[1], entry[2] = rows.whole[r, REQUEST], offset[r], accepted[r]
                kept.num[1] += 1
    totals[T_TENTATIVE] += tentative
    paid = rows_paid(tables, ready)
    tokens = paid * num_checks * (num_drafts + 1) if tables.is_static else tentative
    return cost(tables, tables.routes[route_index, VERIFY], paid, tokens, context)


@kernel
def _commit(
    rows: Any,
    num_rows: Any,
    offset: Any,
    drafted: Any,
    accepted: Any,
    num_passes: Any,
    tables: Any,
    ready: Any,
    totals: Any,
) -> Any:
    """Commits what a round accepted, up to the end of outputs -> seconds of what a round costs besides its
    passes."""
    whole, context = rows.whole, 0
    for r in range(num_rows):
        if offset[r] > 0:
            context += whole[r, LENGTH]
            num = min(accepted[r] + 1, offset[r], whole[r, TARGET] - whole[r, OUTPUT])
            right = min(drafted[r], accepted[r])
            whole[r, OUTPUT] += num
            whole[r, LENGTH] += num
            whole[r, S_TOKENS] += num
            whole[r, S_DRAFTED] += drafted[r]
            whole[r, S_ACCEPTED] += right
            rows.real[r, S_PASSES] += num_passes
            totals[T_TOKENS] += num
            totals[T_DRAFTED] += drafted[r]
            totals[T_ACCEPTED] += right
    totals[T_CONTEXT] += context
    return cost(tables, ROUND_STAGE, ready, ready, context)


@kernel
def run_rounds(
    rows: Any,
    num_rows: Any,
    order: Any,
    route_index: Any,
    num_drafts: Any,
    num_checks: Any,
    tables: Any,
    max_prefill_tokens: Any,
    block_size: Any,
    num_blocks: Any,
    now: Any,
    until: Any,
    max_rounds: Any,
    kept: Any,
    totals: Any,
) -> Any:
    """Steps over the first num_rows rows until one of the reasons in rows.py -> (time, reason).

    order       rows, whose prompt goes first
    num_blocks  that these rows may have; -1 = enough
    kept        if it is written, a run ends when a prompt is through: rounds of one run are over the same
                rows
    totals      [NUM_TOTALS], added to
    """
    whole, real, rounds = rows.whole, rows.real, 0
    while True:
        if (
            num_blocks >= 0
            and blocks_needed(whole, num_rows, num_drafts, num_checks, block_size) > num_blocks
        ):
            return now, NO_ROOM
        step_s, ready, finished = prefill(rows, num_rows, order, tables, max_prefill_tokens), 0, False
        has_prefill, round_s, most = step_s > 0.0, 0.0, 0
        for r in range(num_rows):
            if whole[r, LEFT] == 0:
                ready, most = ready + 1, max(most, limit(whole[r], num_drafts, num_checks))
        if ready > 0:
            if most <= 1:  # nobody may speculate
                round_s = _plain_round(rows, num_rows, ready, tables, totals)
            else:
                round_s = _round(
                    now + step_s,
                    rows,
                    num_rows,
                    ready,
                    route_index,
                    num_drafts,
                    num_checks,
                    tables,
                    kept,
                    totals,
                )
            rounds += 1
            step_s += round_s
            totals[T_ROUNDS] += 1
            totals[T_ROUND_S] += round_s
            totals[T_ROWS] += ready
        now += step_s
        totals[T_STEP_S] += step_s
        for r in range(num_rows):
            if whole[r, LEFT] == 0:
                real[r, S_SECONDS] += round_s
                whole[r, ROUND] += 1
                whole[r, S_ROUNDS] += 1
                if np.isnan(real[r, FIRST_TOKEN]):
                    real[r, FIRST_TOKEN] = now
                finished |= whole[r, OUTPUT] >= whole[r, TARGET]
        if finished:
            return now, FINISHED
        if now >= until:
            return now, TIME
        if rounds >= max_rounds:
            return now, ROUNDS
        if has_prefill and kept.is_kept:
            return now, JOINED
