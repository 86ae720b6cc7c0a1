"""Counts of what the engine did. Rates are derived where they are printed."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RoundCounts:
    """What rounds did, for one request or for all.

    rounds                   rows times rounds
    tokens                   output tokens kept
    committed                tokens that rounds committed; more than `tokens` by what lay beyond a request's end
    drafted, draft_accepted  draft tokens that could be judged; of them, those that the tier above kept
    tentative, accepted      tokens put before verify; of them, those that it kept
    accept_length_histogram  index = tokens that one row's round committed
    """

    rounds: int = 0
    tokens: int = 0
    committed: int = 0
    drafted: int = 0
    draft_accepted: int = 0
    tentative: int = 0
    accepted: int = 0
    accept_length_histogram: list[int] = field(default_factory=list)

    def add(self, committed: int, tokens: int, drafted: int, draft_accepted: int, tentative: int, accepted: int) -> None:
        """Counts one row's round."""
        self.rounds += 1
        self.committed += committed
        self.tokens += tokens
        self.drafted += drafted
        self.draft_accepted += draft_accepted
        self.tentative += tentative
        self.accepted += accepted
        histogram = self.accept_length_histogram
        histogram += [0] * (committed + 1 - len(histogram))
        histogram[committed] += 1


@dataclass
class EngineStats:
    """Totals since the start, or since the last reset.

    steps            engine steps that ran a round
    prefill_tokens   prompt positions computed
    """

    round: RoundCounts = field(default_factory=RoundCounts)
    steps: int = 0
    prefill_tokens: int = 0
    finished: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Flat, in plain types."""
        own = {"steps": self.steps, "prefill_tokens": self.prefill_tokens, "finished": self.finished}
        counts = dict(vars(self.round), accept_length_histogram=list(self.round.accept_length_histogram))
        return {**counts, **own}
