"""Counts of what the engine has done; rates are computed where they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def rate(part: float, whole: float) -> float | None:
    """part / whole, or None where nothing was counted."""
    return part / whole if whole else None


@dataclass
class RoundCounts:
    """Counts of rounds, of one request or of all.

    rounds                   rows times rounds
    tokens                   output tokens
    cycles                   rows times draft cycles: up to num_checks in a round, none in plain decoding
    committed                tokens that rounds committed, those beyond a request's end included
    drafted, draft_accepted  draft tokens that could be judged; those of them that the tier above kept
    looked_up, looked_up_accepted   those of these that prompt lookup proposed
    tentative, accepted      tokens that verify judged; those of them that it kept
    accept_length_histogram  rows times rounds, by the number of tokens that they committed
    """

    rounds: int = 0
    cycles: int = 0
    tokens: int = 0
    committed: int = 0
    drafted: int = 0
    draft_accepted: int = 0
    looked_up: int = 0
    looked_up_accepted: int = 0
    tentative: int = 0
    accepted: int = 0
    accept_length_histogram: list[int] = field(default_factory=list)

    def add(
        self,
        cycles: int,
        committed: int,
        tokens: int,
        drafted: Sequence[int],
        draft_accepted: Sequence[int],
        tentative: int,
        accepted: int,
    ) -> None:
        """Adds one row's round; `drafted` and `draft_accepted` by Source (computed, looked up)."""
        self.rounds += 1
        self.cycles += cycles
        self.committed += committed
        self.tokens += tokens
        self.drafted += sum(drafted)
        self.draft_accepted += sum(draft_accepted)
        self.looked_up += drafted[1]
        self.looked_up_accepted += draft_accepted[1]
        self.tentative += tentative
        self.accepted += accepted
        histogram = self.accept_length_histogram
        histogram += [0] * (committed + 1 - len(histogram))
        histogram[committed] += 1


@dataclass
class EngineStats:
    """Totals since the start, or since the last reset.

    steps              engine steps that ran a round
    prefill_tokens     prompt positions computed
    prefill_s          seconds spent on them; on a GPU only until they are queued
    round_s            seconds spent on rounds
    row_layer_passes   layers that rounds ran, counted once for each row in them: its attained service times L
    row_draft_model_layer_passes   the same of a draft model's layers
    finished           requests that have ended
    drafter_failures   times that a drafter failed, so that requests went on with plain decoding
    caught_up_tokens   positions whose missing KV was backfilled for an exit or a draft model
    """

    round: RoundCounts = field(default_factory=RoundCounts)
    steps: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    round_s: float = 0.0
    row_layer_passes: int = 0
    row_draft_model_layer_passes: int = 0
    finished: int = 0
    drafter_failures: int = 0
    caught_up_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """All counts in one dictionary of plain types."""
        own = {name: value for name, value in vars(self).items() if name != "round"}
        counts = dict(vars(self.round), accept_length_histogram=list(self.round.accept_length_histogram))
        return {**counts, **own}
