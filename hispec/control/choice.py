"""What a controller decides for a round (`Choice`) and what it is told of rounds (`Observation`): the
interface that engine, simulator and controllers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import PLAIN, TRAITS, DraftKind, DraftKindTraits, Plan

Ints = NDArray[np.int64]


def _no_ints() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Route:
    """The tiers of a plan without its sizes: who drafts, and which exits are read.

    kind             the drafter's kind
    draft_layer      D; 0 = the drafter is outside of the trunk
    check_layer      C; None = two tiers
    most_drafts      largest K
    most_checks      largest R (1 without a check tier)
    num_exit_tokens  of hybrid: most drafts of the exit, where prompt lookup finds nothing
    has_confidence   whether rows stop drafting early, below a confidence
    is_gated         whether a further cycle follows only where the check is sure of its own token
    lookup           name of the prompt-lookup settings, where there are several
    """

    kind: DraftKind
    draft_layer: int
    check_layer: int | None
    most_drafts: int
    most_checks: int = 1
    num_exit_tokens: int | None = None
    has_confidence: bool = False
    is_gated: bool = False
    lookup: str | None = None

    @property
    def traits(self) -> DraftKindTraits:
        return TRAITS[self.kind]

    @property
    def most_computed(self) -> int:
        """Drafts that an exit or a model makes in a cycle at most."""
        return min(self.num_exit_tokens or self.most_drafts, self.most_drafts) * self.traits.computes

    def plan(self, num_drafts: int, num_checks: int = 1) -> Plan:
        return Plan(self.draft_layer, self.check_layer, num_drafts, num_checks)

    def __str__(self) -> str:
        parts = [self.kind, self.lookup]
        parts += [f"D={self.draft_layer}" if self.draft_layer else None]
        parts += [f"C={self.check_layer}" if self.check_layer is not None else None]
        return " ".join(part for part in parts if part is not None)


@dataclass(frozen=True)
class Choice:
    """A plan for one round, and how it is run.

    route        index among the controller's routes; None = plain decoding
    plan         a plan of the route: K and R of the round, the most that any row has
    usual        the plan with K and R of requests that have none of their own; None = `plan` itself
    most_drafts  {request number: K} of requests whose K is not the usual one; 0 = plain decoding
    most_checks  {request number: R}, likewise
    watches      whether exits that are not in use are read too, as shadows
    is_probe     whether it was chosen to learn, not for its speed
    """

    route: int | None = None
    plan: Plan = PLAIN
    usual: Plan | None = None
    most_drafts: Mapping[int, int] = field(default_factory=dict)
    most_checks: Mapping[int, int] = field(default_factory=dict)
    watches: bool = False
    is_probe: bool = False

    def num_drafts(self, number: int) -> int:
        """K of request `number`."""
        return self.most_drafts.get(number, (self.usual or self.plan).num_draft_tokens)

    def num_checks(self, number: int) -> int:
        """R of request `number`."""
        return self.most_checks.get(number, (self.usual or self.plan).num_checks)

    def window(self, number: int) -> int:
        """Positions that the round may process for request `number`."""
        if self.usual is None and number not in self.most_drafts and number not in self.most_checks:
            return self.plan.window
        num_drafts = self.num_drafts(number)
        return self.num_checks(number) * (num_drafts + 1) if num_drafts else 1


@dataclass(frozen=True)
class Shadow:
    """Predictions of an exit that was read but not used [DEL's shadow tokens], by row. Only positions whose
    context turned out right count.

    layer           of the exit
    places, right   [rows] positions; of them, those where the exit predicted the committed token
    drafts, agreed  [rows] positions with a draft; of them, those whose draft a check there would have kept
    """

    layer: int
    places: Ints
    right: Ints
    drafts: Ints
    agreed: Ints


@dataclass(frozen=True)
class Observation:
    """What `rounds` consecutive rounds of one choice did, all over the same rows (padded and synthetic rows
    left out).

    seconds         sum over the rounds; nan = the time is not theirs alone, and is not learnt from
    context_tokens  positions that the rows attended to: sum over rows, mean over rounds
    tokens          committed tokens

    One entry per row and cycle:
    numbers         the request's number
    caps            most drafts possible: its K, or what was left of its output
    drafted, kept   drafts made; of them, those that the tier above kept
    looked_up       1 = prompt lookup made them

    One entry per row and verify:
    rows            the request's number
    tentative, accepted   tokens judged by verify; of them, those that it accepted
    went_on, asked   cycles that followed another; the same and one more if the check ended them. Where a row
                     had no room or had all its cycles, nobody asked whether it goes on
    """

    choice: Choice
    num_rows: int
    context_tokens: float
    seconds: float
    tokens: int
    rounds: int = 1
    numbers: Ints = field(default_factory=_no_ints)
    caps: Ints = field(default_factory=_no_ints)
    drafted: Ints = field(default_factory=_no_ints)
    kept: Ints = field(default_factory=_no_ints)
    looked_up: Ints = field(default_factory=_no_ints)
    rows: Ints = field(default_factory=_no_ints)
    tentative: Ints = field(default_factory=_no_ints)
    accepted: Ints = field(default_factory=_no_ints)
    went_on: Ints = field(default_factory=_no_ints)
    asked: Ints = field(default_factory=_no_ints)
    shadows: Sequence[Shadow] = ()


class Control(Protocol):
    """Decides what rounds do. Knows requests by their number only."""

    @property
    def routes(self) -> Sequence[Route]: ...

    @property
    def is_due(self) -> bool:
        """Whether the next `choose` may differ from the last one, with one round in flight that is not
        observed yet."""

    @property
    def rounds_left(self) -> int:
        """For how many rounds the last choice holds, counted from the last one observed, while the rows stay
        what they are; at least 1."""

    def holds_for(self, num_rows: int) -> bool:
        """Whether the last choice holds for another number of requests, too."""
        return False

    def choose(self, numbers: Sequence[int], context_tokens: int) -> Choice:
        """The next round of requests `numbers`, which attend to `context_tokens` positions in all. With no
        numbers: the choice for one unknown request."""

    def observe(self, seen: Observation) -> None:
        return

    def failed(self, route: int) -> None:
        """The drafter of a route failed: the round went on with plain decoding."""
        return

    def forget(self, number: int) -> None:
        """A request has ended."""
        return

    def stats(self) -> dict[str, Any]:
        """Counts and the last decision, in plain types."""


class FixedControl(Control):
    """The same plan in every round."""

    is_due = False
    rounds_left = 1 << 62
    routes: Sequence[Route] = ()

    def __init__(self, route: Route | None, plan: Plan = PLAIN) -> None:
        if route is not None:
            self.routes = (route,)
        self._choice = Choice(None if route is None else 0, plan)

    def holds_for(self, num_rows: int) -> bool:
        return True

    def choose(self, numbers: Sequence[int], context_tokens: int) -> Choice:
        return self._choice

    def stats(self) -> dict[str, Any]:
        return {}
