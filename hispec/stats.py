"""Counts of what the engine has done; rates are computed where they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .metrics.latencies import Latencies
from .metrics.table import ERROR_KINDS, FINISH_REASONS


def rate(part: float, whole: float) -> float | None:
    """part / whole, or None where nothing was counted."""
    return part / whole if whole else None


STAGES = ("draft", "check", "verify")  # of a round; verify: plain decoding, too


def stage_seconds(pass_s: Sequence[float], round_s: float) -> dict[str, float] | None:
    """Where rounds of round_s seconds spent them: pass_s in passes of each of STAGES, the rest outside of
    passes, on lookups, acceptance and the host. None where passes were not timed, as on a GPU."""
    if not any(pass_s):
        return None
    return {**dict(zip(STAGES, pass_s, strict=True)), "outside of passes": max(0.0, round_s - sum(pass_s))}


@dataclass(frozen=True, eq=False, slots=True)
class RowRound:
    """What a round did with one row, but for the tokens themselves. Rows that are alike may share one: it is
    equal to itself only, so that they are counted without a look at what they hold.

    committed            tokens that it committed
    tentative, accepted  tokens that verify judged; those of them that it kept
    drafted, kept        by cycle that the row took part in: drafts that could be judged, and those of them
                         that the tier above kept
    looked_up            by cycle, whether prompt lookup made its drafts
    has_check            whether the tier above is a check
    """

    committed: int
    tentative: int = 0
    accepted: int = 0
    drafted: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    looked_up: tuple[bool, ...] = ()
    has_check: bool = False


@dataclass
class RoundCounts:
    """Counts of rounds, of one request or of all.

    rounds                   rows times rounds
    tokens                   output tokens
    cycles                   rows times draft cycles: up to num_checks in a round, none in plain decoding
    committed                tokens that rounds committed, those beyond a request's end included
    drafted, draft_kept      draft tokens that could be judged; those of them that the tier above kept
    looked_up, looked_up_kept  those of these that prompt lookup proposed
    check_judged, check_kept  drafts that a check judged; those of them that it kept
    check_corrected, check_bonus, check_undrafted   a check's own tokens: in place of a rejected draft, after
                             drafts that were all kept, and of cycles without drafts
    tentative, accepted      tokens that verify judged; those of them that it kept
    verify_corrected, verify_bonus, verify_undrafted   verify's own tokens: likewise, of tentative ones
    accept_length_histogram  rows times rounds, by the number of tokens that they committed
    """

    rounds: int = 0
    cycles: int = 0
    tokens: int = 0
    committed: int = 0
    drafted: int = 0
    draft_kept: int = 0
    looked_up: int = 0
    looked_up_kept: int = 0
    check_judged: int = 0
    check_kept: int = 0
    check_corrected: int = 0
    check_bonus: int = 0
    check_undrafted: int = 0
    tentative: int = 0
    accepted: int = 0
    verify_corrected: int = 0
    verify_bonus: int = 0
    verify_undrafted: int = 0
    accept_length_histogram: list[int] = field(default_factory=list)

    def add(self, each: RowRound, times: int = 1) -> None:
        """Adds `times` rows' rounds that were alike, all of whose tokens are output tokens."""
        self.rounds += times
        self.committed += each.committed * times
        self.tokens += each.committed * times
        self.cycles += len(each.drafted) * times
        for drafted, kept, was_looked_up in zip(each.drafted, each.kept, each.looked_up, strict=True):
            self.drafted += drafted * times
            self.draft_kept += kept * times
            if was_looked_up:
                self.looked_up += drafted * times
                self.looked_up_kept += kept * times
            # With nothing tentative the check was left out, as no row had drafts.
            if not (each.has_check and each.tentative):
                continue
            self.check_judged += drafted * times
            self.check_kept += kept * times
            if kept < drafted:
                self.check_corrected += times
            elif drafted:
                self.check_bonus += times
            else:
                self.check_undrafted += times
        self.tentative += each.tentative * times
        self.accepted += each.accepted * times
        # After a check the last tentative token stands after the last column: verify adds none to it.
        if each.committed > each.accepted:
            if each.accepted < each.tentative:
                self.verify_corrected += times
            elif each.tentative:
                self.verify_bonus += times
            else:
                self.verify_undrafted += times
        histogram = self.accept_length_histogram
        if len(histogram) <= each.committed:
            histogram += [0] * (each.committed + 1 - len(histogram))
        histogram[each.committed] += times


class RoundTally:
    """Rounds of rows, of which many are alike: how often there was each. Adding them up took longer than all
    else of a row and a round, and is left to who wants to know."""

    __slots__ = ("_num_dropped", "_times")

    def __init__(self) -> None:
        self._times: dict[RowRound, int] = {}
        self._num_dropped = 0

    def count(self, rounds: Sequence[RowRound], num_taken: int) -> None:
        """A row's rounds, of whose tokens its request took so many: those beyond its end are dropped."""
        times, committed = self._times, 0
        for of_row in rounds:
            times[of_row] = times.get(of_row, 0) + 1
            committed += of_row.committed
        self._num_dropped += committed - num_taken

    def add_to(self, counts: RoundCounts) -> RoundCounts:
        for of_row, times in self._times.items():
            counts.add(of_row, times)
        counts.tokens -= self._num_dropped
        return counts


@dataclass
class EngineStats:
    """Totals since the start, or since the last reset.

    steps              engine steps that ran a round, or several together
    rounds_ahead       rounds that were launched before the host had read the one before
    prefill_tokens     prompt positions computed
    prefill_s          seconds spent on them; on a GPU only until they are queued
    round_s            seconds spent on rounds
    row_layer_passes   layers that rounds ran, counted once for each row in them: its attained service times L
    row_draft_model_layer_passes   the same of a draft model's layers
    finished           requests that have ended
    drafter_failures   times that a drafter failed, so that requests went on with plain decoding
    caught_up_tokens   positions whose missing KV was backfilled for an exit or a draft model
    finished_by_reason   as `finished`, by finish_reason
    errors             requests refused or failed, by kind (metrics.table.ERROR_KINDS)
    latencies          when requests got their tokens
    """

    round: RoundCounts = field(default_factory=RoundCounts)
    steps: int = 0
    rounds_ahead: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    round_s: float = 0.0
    row_layer_passes: int = 0
    row_draft_model_layer_passes: int = 0
    finished: int = 0
    drafter_failures: int = 0
    caught_up_tokens: int = 0
    finished_by_reason: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ERROR_KINDS, 0))
    latencies: Latencies = field(default_factory=Latencies)

    def as_dict(self) -> dict[str, Any]:
        """All counts in one dictionary of plain types."""
        counts = dict(vars(self.round), accept_length_histogram=list(self.round.accept_length_histogram))
        own = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        by_label = {"finished_by_reason": dict(self.finished_by_reason), "errors": dict(self.errors)}
        return {**counts, **own, **by_label, **self.latencies.as_dict()}
