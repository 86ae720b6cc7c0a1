"""What a row of a simulated engine holds: columns of the arrays that compiled rounds read and write."""

from __future__ import annotations

from typing import Any, NamedTuple

# whole numbers: the request; prompt or lost positions still to be computed; prompt + output tokens; output
# tokens, how many there will be, how many there may be; rounds that it was in; the first of its recorded
# rounds, and the last + 1; K and R of its own (-1 = the plan's); then, since the policy was last told:
# rounds, tokens, drafts, those accepted in the end.
(
    REQUEST,
    LEFT,
    LENGTH,
    OUTPUT,
    TARGET,
    MOST,
    ROUND,
    FIRST,
    LAST,
    DRAFTS,
    CHECKS,
    S_ROUNDS,
    S_TOKENS,
    S_DRAFTED,
    S_ACCEPTED,
) = range(15)
NUM_WHOLE = 15
# times: of its first token (nan = not yet); then, since the policy was last told: passes and seconds of
# rounds, passes and seconds of prefill
FIRST_TOKEN, S_PASSES, S_SECONDS, S_PREFILL_PASSES, S_PREFILL_SECONDS = range(5)
NUM_REAL = 5
# why a run of rounds ended: somebody has all tokens; the time is up; enough rounds; a prompt is through;
# blocks are short before a step
FINISHED, TIME, ROUNDS, JOINED, NO_ROOM = range(5)
# what a run of rounds adds up: rounds with anybody in them, seconds of them, seconds of all steps, tokens,
# context tokens (a sum over rounds), drafted, kept, tentative, accepted, row-rounds
T_ROUNDS, T_ROUND_S, T_STEP_S, T_TOKENS, T_CONTEXT, T_DRAFTED, T_KEPT, T_TENTATIVE, T_ACCEPTED, T_ROWS = (
    range(10)
)
NUM_TOTALS = 10
MANY = 1 << 40  # rounds, where nothing limits them


class Rows(NamedTuple):
    """whole [rows, NUM_WHOLE], real [rows, NUM_REAL], seeds [rows], shares [rows, routes, 4]: as rows.py and
    Workload say."""

    whole: Any
    real: Any
    seeds: Any
    shares: Any


class Kept(NamedTuple):
    """What a controller is told, if it asks: entries cycles [:, 5] (request, cap, drafted, kept, looked up),
    verified [:, 3] (request, tentative, accepted), and how many there are of both."""

    is_kept: Any
    cycles: Any
    verified: Any
    num: Any


class Tables(NamedTuple):
    """The arrays of `Costs` and `Recorded`."""

    stages: Any
    is_static: Any
    buckets: Any
    routes: Any
    passes: Any
    positions: Any
    drift: Any
    recorded_rounds: Any
    recorded_cycles: Any
