"""Rounds over recorded tokens: what `hispec.decoding.round` does to one row under greedy decoding, with a
look-up for each tier."""

from __future__ import annotations

from typing import Any

try:
    from ee_models.kernel_cache import njit
except ImportError:  # a machine with a GPU need not have numba: the same code, a hundred times slower

    def njit(function: Any) -> Any:
        return function


# Places in `totals`.
ROUNDS, TOKENS, UNCHECKED = range(3)
NUM_TOTALS = 3
# Rows of `widths`; from LEVELS on: one for each level of a computed draft, the last of which is filled only.
LOOKED_UP, CHECK, VERIFY, LEVELS = range(4)


@njit
def _draft(room: Any, length: Any, num_branches: Any, sure: Any, widths: Any) -> None:
    """Counts the passes of a computed draft, one for each level of the tree, as far as there is room, and up
    to the first draft that is not sure."""
    for level in range(min(length, sure) + 1):
        live = 1 if level == 0 and room > 0 else 0
        if level > 0:
            for branch in range(num_branches):
                live += branch * length + level < room
        if live == 0:
            break
        widths[LEVELS + level, live] += 1


@njit
def walk(
    starts: Any,
    lengths: Any,
    caps: Any,
    found: Any,
    found_right: Any,
    found_kept: Any,
    rank: Any,
    right: Any,
    kept: Any,
    sure: Any,
    own_right: Any,
    goes_on: Any,
    most_found: Any,
    length_drafted: Any,
    num_branches: Any,
    num_checks: Any,
    has_check: Any,
    rounds: Any,
    totals: Any,
    reached: Any,
    widths: Any,
) -> None:
    """Walks every answer from its first token to its last, round by round, and adds to `rounds` [answers],
    `totals`, `reached` [num_checks], rounds with so many cycles at least, and `widths`.

    starts, lengths, caps [answers]   where an answer lies in the arrays of places, its tokens, and how many
                                      it could have had
    found, found_right, found_kept    [places]: proposals that are looked up; of these, how many leading ones
                                      are right, and kept by the check
    rank, right, kept, sure           [places], of drafts that are computed where nothing is found: the branch
                                      that the next tier goes along (-1: none, a chain has one, 0), how far
                                      that is right, how far the check keeps it, and how far it is sure enough
                                      to go on
    own_right                         [places]: whether the check's own token is the answer's
    goes_on                           [places]: whether it is sure enough of it for another cycle
    most_found, length_drafted        proposals of each kind at most (0 = none); num_branches: chains of
                                      length_drafted that are drafted
    widths                            [LEVELS + length_drafted + 1, window + 1]: passes of each kind by their
                                      positions

    A place after each answer's last holds nothing right in any of them. Once a tentative token is wrong, what
    is said further on in that round is of another context: only the round's cost depends on that, not what it
    commits.
    """
    window = num_checks * (max(most_found, num_branches * length_drafted) + 1)
    for answer in range(starts.shape[0]):
        first, length = starts[answer], lengths[answer]
        done = 0
        while done < length:
            limit = min(window, caps[answer] - done)
            offset, true = 0, 0  # columns so far; leading tentative tokens that are right
            is_true, committed = True, 0
            for cycle in range(num_checks):
                room = limit - offset
                at = first + min(done + offset, length)
                drafts = min(min(found[at], most_found), room - 1)  # nodes besides the first
                path, path_right, path_kept = drafts, found_right[at], found_kept[at]
                reached[cycle] += 1
                if drafts > 0:
                    widths[LOOKED_UP, drafts + 1] += 1
                elif length_drafted > 0:
                    drafts = min(min(num_branches * length_drafted, room - 1), sure[at])
                    path = (
                        0 if rank[at] < 0 else max(0, min(length_drafted, drafts - rank[at] * length_drafted))
                    )
                    path_right, path_kept = right[at], kept[at]
                    _draft(room, length_drafted, num_branches, sure[at], widths)
                if not has_check:
                    widths[VERIFY, drafts + 1] += 1
                    committed = min(path_right, path) + 1
                    break
                if drafts == 0 and num_checks == 1:
                    totals[UNCHECKED] += 1
                    committed = 1
                    break
                widths[CHECK, drafts + 1] += 1
                num_kept = min(path_kept, path)
                num_right = min(path_right, num_kept)
                if is_true:
                    is_true = num_right == num_kept and own_right[at + num_right]
                    true += num_right + is_true
                offset += num_kept + 1
                if offset >= limit or not goes_on[min(at + num_kept, first + length)]:
                    break
            if committed == 0:
                widths[VERIFY, offset] += 1
                committed = min(true + 1, offset)
            totals[ROUNDS] += 1
            totals[TOKENS] += min(committed, length - done)
            rounds[answer] += 1
            done += committed
