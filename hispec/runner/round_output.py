"""The results of rounds: packed on the device, read on the host row by row for the engine, and as arrays for
the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import Plan
from ..control.choice import Choice, Observation, Shadow
from ..decoding.acceptance import Source
from ..decoding.batch import RoundResult, Watch
from ..outputs import TokenTier
from ..scheduling.policy import Service
from ..stats import RowRound

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


_PLAIN = RowRound(committed=1)


@dataclass(slots=True)  # not frozen, which would triple the time that making one takes
class RowOutcome:
    """The result of a round for one row, or of several that ran together; nobody changes one.

    rounds     what each of them did, in counts
    shadows    four counts of each exit that was watched, in the order of control.choice.Shadow: places,
               right, drafts, agreed
    evidence   RoundResult's; where it is not finite, token_ids mean nothing
    """

    token_ids: list[int]
    rounds: Sequence[RowRound]
    shadows: Sequence[int] = ()
    evidence: float = 0.0

    @property
    def num_rounds(self) -> int:
        return len(self.rounds)

    def tiers(self) -> list[TokenTier]:
        """Whose choice each of token_ids is.

        What verify accepted begins with the first cycle: its kept drafts, then the check's own token, then
        the next cycle's. Whatever the round commits beyond that is verify's own. Without a check tier no more
        is accepted than the first cycle kept, so there only drafts are, and in plain decoding nothing.
        """
        tiers: list[TokenTier] = []
        for each in self.rounds:
            tentative: list[TokenTier] = []
            for kept in each.kept:
                tentative.extend("draft" for _ in range(kept))
                tentative.append("check")
            num_accepted = min(each.accepted, each.committed)
            tiers += tentative[:num_accepted] + ["verify"] * (each.committed - num_accepted)
        return tiers

    def make_service(self, passes: float, seconds: float) -> Service:
        """What they gave the row, for a scheduling policy. Some tentative tokens are the check's own, so that
        more may be accepted than were drafted."""
        of_rounds = [(sum(each.drafted), each.accepted) for each in self.rounds]
        drafted = sum(drafted for drafted, _ in of_rounds)
        accepted = sum(min(each) for each in of_rounds)
        return Service(self.num_rounds, len(self.token_ids), drafted, accepted, passes, seconds)


def pack(result: RoundResult, watch: Watch | None) -> Tensor:
    """All that the host reads of a round as one tensor [rows, ...], so that one copy brings it there: counts,
    tentative, accepted; by cycle drafted, kept, source; the bits of the evidence; tokens; counts of watched
    exits."""
    of_rows = (each.unsqueeze(1) for each in (result.counts, result.tentative, result.accepted))
    bits = result.evidence.view(torch.int32).to(torch.int64).unsqueeze(1)
    parts = [*of_rows, result.drafted, result.kept, result.source, bits, result.tokens[:, 1:]]
    if watch is not None:
        parts.append(watch.count_agreements(result.tokens, result.counts).flatten(1))
    return torch.cat(parts, dim=1)


def unpack(packed: Tensor, plan: Plan) -> list[RowOutcome]:
    """packed [rows, ...] as `pack` has made it -> one RowOutcome per row."""
    values, first = packed.numpy(), 3 + 3 * plan.num_checks
    evidence = values[:, first].astype(np.int32).view(np.float32)
    tokens, shadows = values[:, first + 1 : first + 1 + plan.window], values[:, first + 1 + plan.window :]
    return _outcomes(plan, values[:, :first], evidence, tokens, shadows)


def read_rows(result: RoundResult, watch: Watch | None, plan: Plan) -> list[RowOutcome]:
    """As `unpack` of `pack`, of a round, or of several together, that ran on a CPU."""
    if result.num_rounds > 1 or result.by_round is not None:
        return _read_run(result, plan)
    by_cycle = () if plan.is_plain else (result.drafted, result.kept, result.source)
    columns = (result.counts, result.tentative, result.accepted, *by_cycle)
    counts = np.column_stack([each.numpy() for each in columns])
    shadows = None
    if watch is not None:
        shadows = watch.count_agreements(result.tokens, result.counts).flatten(1).numpy()
    return _outcomes(plan, counts, result.evidence.numpy(), result.tokens.numpy()[:, 1:], shadows)


def _read_run(result: RoundResult, plan: Plan) -> list[RowOutcome]:
    """As `read_rows`, of rounds that ran together."""
    counts, evidence = result.counts.tolist(), result.evidence.tolist()
    rounds: Sequence[Sequence[RowRound]] = [(_PLAIN,) * count for count in counts]
    if result.by_round is not None:
        has_check = plan.check_layer is not None
        by_row = result.by_round.transpose(0, 1).numpy()
        rounds = [[_row_round(key, has_check) for key in _keys(of_row)] for of_row in by_row]
    rows = zip(result.tokens[:, 1:].tolist(), counts, rounds, evidence, strict=True)
    return [RowOutcome(tokens[:count], of_row, (), value) for tokens, count, of_row, value in rows]


def _keys(counts: Ints) -> list[bytes]:
    """counts [n, ...], each line as one value, by which those that are alike are found: a list for each of
    them, for every row and round, would have Python look for garbage."""
    keys: list[bytes] = np.ascontiguousarray(counts).view(f"V{8 * counts.shape[1]}").ravel().tolist()
    return keys


def _outcomes(
    plan: Plan, counts: Ints, evidence: Floats, tokens: Ints, shadows: Ints | None
) -> list[RowOutcome]:
    """counts [rows, 3 + 3 cycles]: committed, tentative, accepted; by cycle drafted, kept, source, which may
    be missing in plain decoding. tokens [rows, at least committed]; shadows [rows, ...], None or empty = no
    exit was watched."""
    if plan.is_plain:
        counts = counts[:, :3]
    has_check, outcomes = plan.check_layer is not None, []
    for key, token_ids, value in zip(_keys(counts), tokens.tolist(), evidence.tolist(), strict=True):
        of_row = _row_round(key, has_check)
        del token_ids[of_row.committed :]
        outcomes.append(RowOutcome(token_ids, (of_row,), (), value))
    if shadows is not None and shadows.shape[1]:
        for outcome, seen in zip(outcomes, shadows.tolist(), strict=True):
            outcome.shadows = seen
    return outcomes


@lru_cache(maxsize=4096)
def _row_round(counts: bytes, has_check: bool) -> RowRound:
    """counts: of one row, as `_outcomes` has them."""
    committed, tentative, accepted, *by_cycle = np.frombuffer(counts, np.int64).tolist()
    num_checks = len(by_cycle) // 3
    drafted, kept, source = (by_cycle[at * num_checks : (at + 1) * num_checks] for at in range(3))
    num_cycles = drafted.index(-1) if -1 in drafted else num_checks  # those it took no part in come last
    return RowRound(
        committed,
        tentative,
        accepted,
        tuple(drafted[:num_cycles]),
        tuple(kept[:num_cycles]),
        tuple(each == Source.LOOKED_UP for each in source[:num_cycles]),
        has_check,
    )


def make_observation(
    choice: Choice,
    rows: Sequence[tuple[int, RowOutcome]],
    *,
    caps: Sequence[int],
    rooms: Sequence[int],
    most_drafts: Sequence[int],
    most_checks: Sequence[int],
    watched: Sequence[int],
    context_tokens: int,
    seconds: float,
) -> Observation:
    """What the controller is told of one round, or of several that ran together.

    rows          number and outcome of each request
    caps, rooms   places of each request in a round at most; tokens that it may still get before the first
    most_drafts, most_checks   drafts of each request in a cycle, and its cycles, at most
    watched       layers of the exits that were watched
    context_tokens   positions of all rows before it
    """
    cycles: list[tuple[int, int, int, int, int]] = []
    verified: list[tuple[int, int, int, int, int]] = []
    if choice.route is not None:
        of_rows = zip(rows, caps, rooms, most_drafts, most_checks, strict=True)
        for (number, outcome), cap, room, most, num_checks in of_rows:
            for of_row in outcome.rounds:
                first, limit = 0, min(cap, room)
                room -= of_row.committed
                for drafted, kept, is_looked_up in zip(
                    of_row.drafted, of_row.kept, of_row.looked_up, strict=True
                ):
                    possible = min(limit - first - 1, most)
                    if possible <= 0:  # it could not have drafted, so there is nothing to learn
                        break
                    cycles.append((number, possible, drafted, kept, is_looked_up))
                    first += kept + 1
                if first:
                    went_on = len(of_row.drafted) - 1
                    is_stopped = went_on + 1 < num_checks and of_row.tentative < limit
                    verified.append(
                        (number, of_row.tentative, of_row.accepted, went_on, went_on + is_stopped)
                    )
    by_cycle, by_row = (
        np.array(cycles, np.int64).reshape(-1, 5).T,
        np.array(verified, np.int64).reshape(-1, 5).T,
    )
    num_rounds = max((outcome.num_rounds for _, outcome in rows), default=1)  # the same of all
    return Observation(
        choice=choice,
        num_rows=len(rows),
        context_tokens=context_tokens + _mean_growth(rows),
        seconds=seconds,
        rounds=num_rounds,
        tokens=sum(len(outcome.token_ids) for _, outcome in rows),
        numbers=by_cycle[0],
        caps=by_cycle[1],
        drafted=by_cycle[2],
        kept=by_cycle[3],
        looked_up=by_cycle[4],
        rows=by_row[0],
        tentative=by_row[1],
        accepted=by_row[2],
        went_on=by_row[3],
        asked=by_row[4],
        shadows=_shadows(rows, watched),
    )


def _mean_growth(rows: Sequence[tuple[int, RowOutcome]]) -> float:
    """Positions by which the rows have grown before each of the rounds, on average over these."""
    grown = 0.0
    for _, outcome in rows:
        committed = [each.committed for each in outcome.rounds]
        ahead = range(len(committed) - 1, -1, -1)
        grown += sum(count * left for count, left in zip(committed, ahead, strict=True)) / len(committed)
    return grown


def _shadows(rows: Sequence[tuple[int, RowOutcome]], watched: Sequence[int]) -> list[Shadow]:
    if not rows or not rows[0][1].shadows:
        return []
    counts = np.array([outcome.shadows for _, outcome in rows], np.int64).reshape(len(rows), len(watched), 4)
    return [Shadow(layer, *counts[:, at].T) for at, layer in enumerate(watched)]
