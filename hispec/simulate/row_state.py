"""What compiled rounds read and write besides tables: rows of the batch, plans, and what rounds report."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .distributions import Floats, Ints

# The request in a row. Counts since the policy was last told: rounds to prefill_s.
ROW = np.dtype(
    [
        ("request", np.int64),
        ("prefill_left", np.int64),  # positions of the prompt, or of lost KV, still to be computed
        ("length", np.int64),  # prompt + output tokens
        ("output", np.int64),  # output tokens so far
        ("target", np.int64),  # output tokens in the end
        ("max_tokens", np.int64),  # output tokens at most
        ("round_index", np.int64),  # rounds that it was in
        (
            "first_recorded",
            np.int64,
        ),  # its recorded rounds, if it repeats any: the first (-1 = none), last + 1
        ("end_recorded", np.int64),
        ("num_drafts", np.int64),  # K and R of its own; -1 = the plan's
        ("num_checks", np.int64),
        ("rounds", np.int64),
        ("tokens", np.int64),
        ("drafted", np.int64),
        ("accepted", np.int64),
        ("passes", np.float64),
        ("seconds", np.float64),
        ("prefill_passes", np.float64),
        ("prefill_s", np.float64),
        ("first_token_s", np.float64),  # time of its first token; nan = not yet
    ]
)
Rows = NDArray[np.void]  # of ROW
# Why a run of rounds ended: an output is complete; the time is up; enough rounds; a prompt is computed; there
# are too few blocks for the next step.
FINISHED, TIME, ROUNDS, JOINED, NO_ROOM = range(5)
# Totals of runs: rounds with any row in them, their seconds, seconds of all steps, committed tokens, context
# tokens (summed over rounds), drafts, those kept by the tier above, rows (over rounds).
T_ROUNDS, T_ROUND_S, T_STEP_S, T_TOKENS, T_CONTEXT, T_DRAFTED, T_KEPT, T_ROWS = range(8)
NUM_TOTALS = 8
MANY = 1 << 40  # rounds, where nothing limits them


class RoundPlan(NamedTuple):
    """Index of the route among the experiment's (-1 = plain decoding), K and R."""

    route: int
    num_drafts: int
    num_checks: int


class RoundLog(NamedTuple):
    """What a run of rounds reports.

    totals     [NUM_TOTALS]
    is_kept    whether entries are written to the other arrays, for a controller's Observation
    cycles     [entries, 5] request, most drafts, drafted, kept, looked up
    verified   [entries, 5] request, tentative, accepted, further cycles, the same and one if it was stopped
    num        [2] number of entries in cycles and verified
    """

    totals: Floats
    is_kept: bool
    cycles: Ints
    verified: Ints
    num: Ints


def make_log(num_cycles: int = 0, num_verified: int = 0) -> RoundLog:
    return RoundLog(
        np.zeros(NUM_TOTALS),
        num_cycles > 0,
        np.zeros((num_cycles, 5), np.int64),
        np.zeros((num_verified, 5), np.int64),
        np.zeros(2, np.int64),
    )
