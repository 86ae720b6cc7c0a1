"""Compiled runs of rounds over the same rows and by the same plan: what hispec/decoding/round.py and
hispec/drafters would run, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ee_models.kernel_cache import inlined, njit

from ..control.route_costs import (
    BARE_SLOT,
    CHECK_SLOT,
    COLD_SLOT,
    DRAFT_SLOT,
    FEED_SLOT,
    FILL_SLOT,
    LOOKUP_SLOT,
    VERIFY_SLOT,
)
from .round_parts_numba import (
    accept,
    blocks_needed,
    cost,
    draft_or_repeat,
    drift_factor,
    goes_on,
    limit,
    own,
    padded_rows,
    prefill,
)
from .row_state import (
    FINISHED,
    JOINED,
    NO_ROOM,
    ROUNDS,
    T_CONTEXT,
    T_DRAFTED,
    T_KEPT,
    T_ROUND_S,
    T_ROUNDS,
    T_ROWS,
    T_STEP_S,
    T_TOKENS,
    TIME,
    RoundLog,
    RoundPlan,
    Rows,
)
from .tables import Tables

# What a row does in a round: tentative tokens so far (0 = not in it), drafts, tokens accepted by the last
# tier, cycles, whether a check stopped it; and in the cycle under way: whether it is in it, drafts, whether
# they were looked up, context tokens.
STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("tentative", "all_drafted", "accepted", "cycles", "stopped"),
            *("is_live", "drafted", "looked_up", "context"),
        )
    ]
)


@inlined
def _draft_cycle(
    tables: Tables, rows: Rows, states: Rows, plan: RoundPlan, cycle: int, factors: Any, log: RoundLog
) -> Any:
    """Drafts of one cycle, and what the tier above keeps of them -> (rows in it, positions, context
    tokens)."""
    num_live = tokens = context = 0
    for r in range(len(rows)):
        row, state = rows[r], states[r]
        most = limit(row, plan)
        state.is_live = (
            row.prefill_left == 0
            and state.tentative < most
            and state.stopped == 0
            and cycle < own(row.num_checks, plan.num_checks)
        )
        if state.is_live == 0:
            continue
        room = min(own(row.num_drafts, plan.num_drafts), most - state.tentative - 1)
        drafted, kept, looked_up = draft_or_repeat(
            tables, row, plan.route, cycle, state.tentative, room, factors
        )
        if log.is_kept and room > 0:  # else there is nothing to learn
            entry = log.cycles[log.num[0]]
            entry[0], entry[1], entry[2], entry[3], entry[4] = row.request, room, drafted, kept, looked_up
            log.num[0] += 1
        state.drafted, state.looked_up, state.context = drafted, looked_up, row.length + state.tentative
        state.all_drafted += drafted
        state.accepted = kept
        state.tentative += kept + 1
        state.cycles += 1
        if cycle + 1 < own(row.num_checks, plan.num_checks) and state.tentative < most:
            state.stopped = not goes_on(tables, row, plan.route, cycle, state.tentative, factors[2])
        log.totals[T_KEPT] += kept
        num_live, tokens, context = num_live + 1, tokens + drafted + 1, context + state.context
    return num_live, tokens, context


@inlined
def _draft_cost(tables: Tables, states: Rows, plan: RoundPlan, paid: int, context: int) -> Any:
    """Seconds of drafting in one cycle, and passes over the draft tier. paid: rows that each pass costs where
    shapes are static, and that prompt lookup costs."""
    stages, exit_tokens = tables.stages[plan.route], tables.exit_tokens[plan.route]
    seconds, passes = 0.0, 0
    if tables.looks_up[plan.route]:
        seconds += cost(stages[LOOKUP_SLOT], paid, paid, context)
        if exit_tokens == 0:
            return seconds, passes
        num = tokens = fed_context = 0  # what was looked up is fed to the draft tier
        for state in states:
            if state.is_live != 0 and state.looked_up != 0:
                num, tokens, fed_context = num + 1, tokens + state.drafted + 1, fed_context + state.context
        if tables.is_static:
            num, tokens, fed_context = paid, paid * (plan.num_drafts + 1), context
        if num > 0:
            seconds, passes = seconds + cost(stages[FEED_SLOT], num, tokens, fed_context), 1
    depth = min(plan.num_drafts, exit_tokens)
    for step in range(depth + 1):
        num = pass_context = 0
        for state in states:
            if state.is_live != 0 and state.looked_up == 0 and state.drafted >= step:
                num, pass_context = num + 1, pass_context + state.context
        if tables.is_static:
            num, pass_context = paid, context
        elif num == 0:
            break
        seconds += cost(stages[DRAFT_SLOT if step < depth else FILL_SLOT], num, num, pass_context)
        passes += 1
    return seconds, passes


@njit
def _round(tables: Tables, rows: Rows, plan: RoundPlan, num_ready: int, now: float, log: RoundLog) -> Any:
    """One speculative round -> seconds."""
    stages, passes, drift = tables.stages[plan.route], tables.passes[plan.route], tables.drift[plan.route]
    factors = (drift_factor(drift[0], now), drift_factor(drift[1], now), drift_factor(drift[2], now))
    states = np.zeros(len(rows), STATE)
    paid, has_check, skipped = padded_rows(tables, num_ready), tables.has_check[plan.route], False
    seconds, num_passes, context = 0.0, 0.0, 0
    for cycle in range(plan.num_checks):
        num, tokens, live_context = _draft_cycle(tables, rows, states, plan, cycle, factors, log)
        if num > 0:
            context = live_context
        elif not tables.is_static:  # there a cycle that no row takes is computed all the same
            break
        # Without any draft a single check has nothing to filter: verify resumes where drafting stopped.
        skipped = has_check and plan.num_checks == 1 and tokens == num and not tables.is_static
        if tables.is_static:
            num, tokens = paid, paid * (plan.num_drafts + 1)
        draft_s, draft_passes = _draft_cost(tables, states, plan, num, context)
        slot = VERIFY_SLOT if not has_check else BARE_SLOT if skipped else CHECK_SLOT
        # The first pass over the first layers is an exit's, in every cycle; or else a check's, which finds
        # what it has read in the cycle before, unless a draft model has passed meanwhile.
        if passes[DRAFT_SLOT] > 0 or (slot == CHECK_SLOT and (cycle == 0 or draft_passes > 0)):
            draft_s += cost(stages[COLD_SLOT], num, num, context)
        seconds = seconds + draft_s + cost(stages[slot], num, tokens, context)
        num_passes = num_passes + draft_passes * passes[DRAFT_SLOT] + passes[slot]
    if has_check and not skipped:
        context = tokens = 0
        for r in range(len(rows)):
            row, state = rows[r], states[r]
            if state.tentative > 0:
                state.accepted = accept(tables, row, plan.route, state.tentative, factors[2])
                context += row.length
                tokens += state.tentative
        if tables.is_static:
            tokens = paid * plan.num_checks * (plan.num_drafts + 1)
        seconds += cost(stages[VERIFY_SLOT], paid, tokens, context)
        num_passes += passes[VERIFY_SLOT]
    _commit(rows, states, num_passes, has_check and not skipped, log)
    return seconds


@inlined
def _commit(rows: Rows, states: Rows, num_passes: float, is_checked: bool, log: RoundLog) -> None:
    """Commits what a round accepted, up to the ends of outputs."""
    for r in range(len(rows)):
        row, state = rows[r], states[r]
        if state.tentative > 0:
            judged = state.tentative if is_checked else state.all_drafted
            if log.is_kept and judged > 0:
                entry = log.verified[log.num[1]]
                entry[0], entry[1], entry[2] = row.request, judged, state.accepted
                entry[3], entry[4] = state.cycles - 1, state.cycles - 1 + state.stopped
                log.num[1] += 1
            num = min(state.accepted + 1, state.tentative, row.target - row.output)
            row.output += num
            row.length += num
            row.tokens += num
            row.drafted += state.all_drafted
            row.accepted += min(state.all_drafted, state.accepted)
            row.passes += num_passes
            log.totals[T_TOKENS] += num
            log.totals[T_DRAFTED] += state.all_drafted


@inlined
def _plain_round(tables: Tables, rows: Rows, num_ready: int, context: int, log: RoundLog) -> Any:
    """One round of plain decoding -> seconds."""
    for row in rows:
        if row.prefill_left == 0:
            row.output += 1
            row.length += 1
            row.tokens += 1
            row.passes += 1.0
    log.totals[T_TOKENS] += num_ready
    paid = padded_rows(tables, num_ready)
    return cost(tables.plain, paid, paid, context)


@njit
def run_rounds(
    tables: Tables,
    rows: Rows,
    order: Any,
    plan: RoundPlan,
    num_blocks: int,
    now: float,
    until: float,
    max_rounds: int,
    log: RoundLog,
) -> Any:
    """Steps over the rows until one of the reasons in row_state.py -> (time, reason).

    order       rows in the order of their prefill
    num_blocks  KV blocks that they may have; -1 = enough
    log         added to; if it keeps entries, a run ends when a prompt is computed: rounds of one run are
                over the same rows
    """
    rounds = 0
    while True:
        if num_blocks >= 0 and blocks_needed(rows, plan, tables.block_size) > num_blocks:
            return now, NO_ROOM
        step_s, round_s, finished = prefill(tables, rows, order), 0.0, False
        has_prefill = step_s > 0.0
        num_ready = most = context = np.int64(0)  # a literal's would compile `_round` once more
        for row in rows:
            if row.prefill_left == 0:
                num_ready, context = num_ready + 1, context + row.length
                most = max(most, limit(row, plan))
        if num_ready > 0:
            if most <= 1:  # no row may speculate
                round_s = _plain_round(tables, rows, num_ready, context, log)
            else:
                round_s = _round(tables, rows, plan, num_ready, now + step_s, log)
            round_s += cost(tables.round_cost, num_ready, num_ready, context)
            rounds += 1
            step_s += round_s
            log.totals[T_ROUNDS] += 1
            log.totals[T_ROUND_S] += round_s
            log.totals[T_ROWS] += num_ready
            log.totals[T_CONTEXT] += context
        now += step_s
        log.totals[T_STEP_S] += step_s
        for row in rows:
            if row.prefill_left == 0:
                row.seconds += round_s
                row.round_index += 1
                row.rounds += 1
                if np.isnan(row.first_token_s):
                    row.first_token_s = now
                finished |= row.output >= row.target
        if finished:
            return now, FINISHED
        if now >= until:
            return now, TIME
        if rounds >= max_rounds:
            return now, ROUNDS
        if has_prefill and log.is_kept:
            return now, JOINED
