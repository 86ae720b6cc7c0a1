"""The results of rounds: packed on the device, read on the host row by row for the engine, and as arrays for
the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import Plan
from ..control.choice import Choice, Observation, Shadow
from ..decoding.batch import RoundResult, Watch
from ..decoding.drafter import Source
from ..outputs import TokenTier
from ..scheduling.policy import Service

_LOOKED_UP = int(Source.LOOKED_UP)
_NO_SUMS = (0, 0), (0, 0)  # by Source
Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(slots=True)  # not frozen, which would triple the time that making one takes
class RowOutcome:
    """The result of a round for one row; nobody changes one.

    drafted, kept, source   by cycle that the row took part in: drafts that could be judged, drafts that the
                            tier above kept, and the Source of the drafts
    shadows                 four counts of each exit that was watched, in the order of control.choice.Shadow:
                            places, right, drafts, agreed
    evidence                RoundResult's; where it is not finite, token_ids mean nothing
    """

    token_ids: list[int]
    tentative: int
    accepted: int
    drafted: list[int]
    kept: list[int]
    source: list[int]
    shadows: list[int] = field(default_factory=list)
    evidence: float = 0.0

    def tiers(self) -> list[TokenTier]:
        """Whose choice each of token_ids is.

        What verify accepted begins with the first cycle: its kept drafts, then the check's own token, then
        the next cycle's. Whatever the round commits beyond that is verify's own. Without a check tier no more
        is accepted than the first cycle kept, so there only drafts are, and in plain decoding nothing.
        """
        tentative: list[TokenTier] = []
        for kept in self.kept:
            tentative.extend("draft" for _ in range(kept))
            tentative.append("check")
        accepted = tentative[: min(self.accepted, len(self.token_ids))]
        return accepted + ["verify"] * (len(self.token_ids) - len(accepted))

    def make_service(self, passes: float, seconds: float) -> Service:
        """What the round gave the row, for a scheduling policy. Some tentative tokens are the check's own, so
        that more may be accepted than were drafted."""
        drafted = sum(self.drafted)
        return Service(1, len(self.token_ids), drafted, min(drafted, self.accepted), passes, seconds)

    def sums_by_source(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Drafts, and kept ones, of all cycles, each by the Source of the drafts."""
        if not self.drafted:
            return _NO_SUMS
        looked_up = kept = 0
        if any(self.source):  # else all are Source.COMPUTED
            for source, of_cycle, kept_of_cycle in zip(self.source, self.drafted, self.kept, strict=True):
                if source == _LOOKED_UP:
                    looked_up += of_cycle
                    kept += kept_of_cycle
        return (sum(self.drafted) - looked_up, looked_up), (sum(self.kept) - kept, kept)


def pack(result: RoundResult, watch: Watch | None) -> Tensor:
    """All that the host reads of a round as one tensor [rows, ...], so that one copy brings it there: counts,
    tentative, accepted, the bits of the evidence; by cycle drafted, kept, source; tokens; counts of watched
    exits."""
    bits = result.evidence.view(torch.int32).to(torch.int64)
    columns = (each.unsqueeze(1) for each in (result.counts, result.tentative, result.accepted, bits))
    parts = [*columns, result.drafted, result.kept, result.source, result.tokens[:, 1:]]
    if watch is not None:
        parts.append(watch.count_agreements(result.tokens, result.counts).flatten(1))
    return torch.cat(parts, dim=1)


def copy_to_host(packed: Tensor, plan: Plan) -> Callable[[], list[RowOutcome]]:
    """Begins the copy to the host -> a function that waits for it."""
    if packed.device.type != "cuda":
        return partial(unpack, packed.clone(), plan)  # the next round overwrites `packed`
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[RowOutcome]:
        done.synchronize()
        return unpack(host, plan)

    return wait


def unpack(packed: Tensor, plan: Plan) -> list[RowOutcome]:
    """packed [rows, ...] as `pack` has made it -> one RowOutcome per row."""
    values, checks = packed.numpy(), plan.num_checks
    by_cycle = [values[:, 4 + at * checks : 4 + (at + 1) * checks] for at in range(3)]
    first, end = 4 + 3 * checks, 4 + 3 * checks + plan.window
    evidence = values[:, 3].astype(np.int32).view(np.float32)
    return _outcomes(plan, values[:, :3].T, evidence, by_cycle, values[:, first:end], values[:, end:])


def read_rows(result: RoundResult, watch: Watch | None, plan: Plan) -> list[RowOutcome]:
    """As `unpack` of `pack`, of a round that ran on a CPU."""
    by_cycle = [each.numpy() for each in (result.drafted, result.kept, result.source)]
    by_row = [each.numpy() for each in (result.counts, result.tentative, result.accepted)]
    tokens, shadows = result.tokens.numpy()[:, 1:], None
    if watch is not None:
        shadows = watch.count_agreements(result.tokens, result.counts).flatten(1).numpy()
    return _outcomes(plan, by_row, result.evidence.numpy(), by_cycle, tokens, shadows)


def _outcomes(
    plan: Plan,
    by_row: Iterable[Ints],
    evidence: Floats,
    by_cycle: Sequence[Ints],
    tokens: Ints,
    shadows: Ints | None,
) -> list[RowOutcome]:
    """by_row: counts, tentative, accepted [rows]; by_cycle: drafted, kept, source [rows, cycles]; tokens
    [rows, at least counts]; shadows [rows, ...], None or empty = no exit was watched."""
    # Lists are made only where they hold something: many of them have Python look for garbage.
    nothing: list[list[int]] = [[]] * len(tokens)
    parts = [nothing] * 3 if plan.is_plain else [part.tolist() for part in by_cycle]
    for row, drafted in enumerate(parts[0]):
        if drafted and drafted[-1] == -1:  # cycles that it took no part in; they come last
            num_cycles = drafted.index(-1)
            for part in parts:
                del part[row][num_cycles:]
    watched = shadows.tolist() if shadows is not None and shadows.shape[1] else nothing
    columns = (*(each.tolist() for each in by_row), tokens.tolist(), *parts, watched, evidence.tolist())
    return [
        RowOutcome(token_ids[:count], tentative, accepted, drafts, keeps, sources, seen, sum_of_chosen)
        for count, tentative, accepted, token_ids, drafts, keeps, sources, seen, sum_of_chosen in zip(
            *columns, strict=True
        )
    ]


def make_observation(
    choice: Choice,
    rows: Sequence[tuple[int, RowOutcome]],
    *,
    limits: Sequence[int],
    most_drafts: Sequence[int],
    watched: Sequence[int],
    context_tokens: int,
    seconds: float,
) -> Observation:
    """What the controller is told of one round.

    rows          number and outcome of each request
    limits        places of each request in the round at most
    most_drafts   drafts of each request in a cycle at most
    watched       layers of the exits that were watched
    """
    cycles: list[tuple[int, int, int, int, int]] = []
    verified: list[tuple[int, int, int, int, int]] = []
    if choice.route is not None:
        for (number, outcome), limit, most in zip(rows, limits, most_drafts, strict=True):
            first = 0
            for drafted, kept, source in zip(outcome.drafted, outcome.kept, outcome.source, strict=True):
                cap = min(limit - first - 1, most)
                if cap <= 0:  # it could not have drafted, so there is nothing to learn
                    break
                cycles.append((number, cap, drafted, kept, source))
                first += kept + 1
            if first:
                went_on = len(outcome.drafted) - 1
                is_stopped = went_on + 1 < choice.plan.num_checks and outcome.tentative < limit
                verified.append((number, outcome.tentative, outcome.accepted, went_on, went_on + is_stopped))
    by_cycle, by_row = (
        np.array(cycles, np.int64).reshape(-1, 5).T,
        np.array(verified, np.int64).reshape(-1, 5).T,
    )
    return Observation(
        choice=choice,
        num_rows=len(rows),
        context_tokens=context_tokens,
        seconds=seconds,
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


def _shadows(rows: Sequence[tuple[int, RowOutcome]], watched: Sequence[int]) -> list[Shadow]:
    if not rows or not rows[0][1].shadows:
        return []
    counts = np.array([outcome.shadows for _, outcome in rows], np.int64).reshape(len(rows), len(watched), 4)
    return [Shadow(layer, *counts[:, at].T) for at, layer in enumerate(watched)]
