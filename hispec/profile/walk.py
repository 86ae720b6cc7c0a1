"""Rounds over recorded tokens: what `hispec.round` does to one row under greedy decoding, with a look-up for each exit."""
from __future__ import annotations

from typing import Any

from numba import njit

# Places in `totals`.
ROUNDS, TOKENS, DRAFT_PASSES, FILL_PASSES, CHECKS, CHECK_POSITIONS, VERIFY_POSITIONS = range(7)
NUM_TOTALS = 7


@njit(cache=True)
def walk(starts: Any, lengths: Any, caps: Any, same: Any, right: Any, num_drafts: int, num_checks: int, has_check: bool, rounds: Any, totals: Any) -> None:
    """Walks every answer from its first token to its last, round by round, and adds to `rounds` [answers] and `totals`.

    starts, lengths, caps [answers]   where an answer lies in `same` and `right`, its tokens, and how many it could have had
    same [places]                     how many tokens on from here the draft exit and the check exit say the same
    right [places]                    how many tokens on the exit below verify says what the full model says

    A place after each answer's last holds 0 in both. Once a tentative token is wrong, what `same` says further on in that
    round is of another context: only the round's cost depends on that, not what it commits.
    """
    window = num_checks * (num_drafts + 1)
    for answer in range(starts.shape[0]):
        first, length = starts[answer], lengths[answer]
        done = 0
        while done < length:
            limit = min(window, caps[answer] - done)
            offset = 0
            for _ in range(num_checks):
                room = limit - offset
                drafted = min(num_drafts, room - 1)
                totals[DRAFT_PASSES] += min(num_drafts, room)
                totals[FILL_PASSES] += 1 if room > num_drafts else 0
                if not has_check:
                    offset = drafted + 1
                    break
                totals[CHECKS] += 1
                totals[CHECK_POSITIONS] += drafted + 1
                offset += min(drafted, same[first + min(done + offset, length)]) + 1
                if offset >= limit:
                    break
            tentative = offset if has_check else offset - 1
            committed = min(min(tentative, right[first + done]) + 1, offset)
            totals[ROUNDS] += 1
            totals[TOKENS] += min(committed, length - done)
            totals[VERIFY_POSITIONS] += offset
            rounds[answer] += 1
            done += committed
