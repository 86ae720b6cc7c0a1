"""What a controller decides for a round, and what it is told of rounds: the words that engine, simulator and
controllers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import PLAIN, TRAITS, DraftKind, DraftKindTraits, Plan

Ints = NDArray[np.int64]


def _none() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Route:
    """The tiers of a plan without its sizes: who drafts, and which exits are read.

    kind             who drafts
    draft_layer      D; 0 = the drafter is outside of the trunk
    check_layer      C; None = two tiers
    most_drafts      K at most
    most_checks      R at most (1 without a check tier)
    num_exit_tokens  of hybrid: drafts of the exit at most, where nothing matches
    has_confidence   whether rows stop drafting early
    lookup           what counts as a match of prompt lookup, where there are several ways
    """

    kind: DraftKind
    draft_layer: int
    check_layer: int | None
    most_drafts: int
    most_checks: int = 1
    num_exit_tokens: int | None = None
    has_confidence: bool = False
    lookup: str | None = None

    @property
    def traits(self) -> DraftKindTraits:
        return TRAITS[self.kind]

    def plan(self, num_drafts: int, num_checks: int = 1) -> Plan:
        return Plan(self.draft_layer, self.check_layer, num_drafts, num_checks)

    def __str__(self) -> str:
        layers = ([f"D={self.draft_layer}"] if self.draft_layer else []) + (
            [f"C={self.check_layer}"] if self.check_layer is not None else []
        )
        return " ".join([self.kind, *([self.lookup] if self.lookup is not None else []), *layers])


@dataclass(frozen=True)
class Choice:
    """What a round does.

    route            index among the controller's routes; None = plain decoding
    plan             one of the route's: K and R of the round, the most that any row has
    most_drafts      K of single requests, by number; who is not in it has the plan's; 0 = plain decoding
    most_checks      likewise R
    watches          whether exits that are not in use are read too
    is_probe         whether it was chosen to learn, not to gain
    """

    route: int | None = None
    plan: Plan = PLAIN
    most_drafts: Mapping[int, int] = field(default_factory=dict)
    most_checks: Mapping[int, int] = field(default_factory=dict)
    watches: bool = False
    is_probe: bool = False

    def window(self, number: int) -> int:
        """Places that the round may process for a request."""
        if number not in self.most_drafts and number not in self.most_checks:
            return self.plan.window
        num_drafts = self.most_drafts.get(number, self.plan.num_draft_tokens)
        return self.most_checks.get(number, self.plan.num_checks) * (num_drafts + 1) if num_drafts else 1


@dataclass(frozen=True)
class Shadow:
    """What the exit at `layer`, not in use, would have said at the places whose context proved right, by row.

    places, right    places; of them, those where it said what was committed
    drafts, agreed   places where a draft stood; of them, those where a check there would have kept it
    """

    layer: int
    places: Ints
    right: Ints
    drafts: Ints
    agreed: Ints


@dataclass(frozen=True)
class Observation:
    """What `rounds` rounds of one choice did, all over the same rows. Rows that were padded or synthetic are
    not in it.

    seconds         of all of them; nan = not to be learnt from (something else was timed too)
    context_tokens  positions that the rows attended to, summed over rows, mean of the rounds
    tokens          that were committed
    numbers, caps, drafted, kept, looked_up   one entry per row and cycle: the request; the drafts that it
                                              might have had (its K, or
                    what was left of its output); those that it had; those that the tier above kept; 1 =
                    prompt lookup made them
    rows, tentative, accepted                 one entry per row and verify: the request; tokens put before
                                              verify; those that it kept
    """

    choice: Choice
    num_rows: int
    context_tokens: float
    seconds: float
    tokens: int
    rounds: int = 1
    numbers: Ints = field(default_factory=_none)
    caps: Ints = field(default_factory=_none)
    drafted: Ints = field(default_factory=_none)
    kept: Ints = field(default_factory=_none)
    looked_up: Ints = field(default_factory=_none)
    rows: Ints = field(default_factory=_none)
    tentative: Ints = field(default_factory=_none)
    accepted: Ints = field(default_factory=_none)
    shadows: Sequence[Shadow] = ()


class Control(Protocol):
    """Decides what rounds do. Knows requests by their number only."""

    @property
    def routes(self) -> Sequence[Route]: ...

    @property
    def is_due(self) -> bool:
        """Whether the next `choose` may say something else than the last one did, with one round under way
        that was not observed yet."""

    @property
    def rounds_left(self) -> int:
        """For how many rounds the last choice holds, counted from the last one observed, while the rows stay
        what they are; at least 1."""

    def choose(self, numbers: Sequence[int], context_tokens: int) -> Choice:
        """For the next round, of these requests, which attend to so many positions in all. `numbers` may be
        empty: it then says what it would do for one request."""

    def observe(self, seen: Observation) -> None: ...

    def failed(self, route: int) -> None:
        """The drafter of a route failed: the round went on with plain decoding."""

    def forget(self, number: int) -> None:
        """A request has ended."""

    def stats(self) -> dict[str, Any]:
        """Counts and the last decision, in plain types."""


class FixedControl:
    """Always the same plan."""

    is_due = False
    rounds_left = 1 << 62

    def __init__(self, route: Route | None, plan: Plan = PLAIN) -> None:
        self.routes: Sequence[Route] = () if route is None else (route,)
        self._choice = Choice(None if route is None else 0, plan)

    def choose(self, numbers: Sequence[int], context_tokens: int) -> Choice:
        return self._choice

    def observe(self, seen: Observation) -> None:
        pass

    def failed(self, route: int) -> None:
        pass

    def forget(self, number: int) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}
