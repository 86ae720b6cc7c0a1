"""The rounds of every plan, counted over a recording: exact in what they commit, nearly so in what they
compute."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..config import NgramConfig, SpeculativeConfig
from .recording import Bools, Ints, Recording, Said


@dataclass(frozen=True)
class Rounds:
    """A plan's rounds over all answers: of each (`per_answer`), and in all, row by row.

    reached     [num_checks]: rounds with so many draft cycles at least, from 1 on
    unchecked   rounds whose only check was left out for want of drafts; they are in neither `checks` nor
                `verifies`
    looked_up   [positions]: cycles with looked-up drafts, by their number and the token before them
    levels      [drafts + 1, positions]: passes of computed drafts by level; of the last one nobody asks for
                logits
    checks, verifies   [positions]: passes
    """

    per_answer: Ints
    rounds: int
    tokens: int
    reached: Ints
    unchecked: int
    looked_up: Ints
    levels: Ints
    checks: Ints
    verifies: Ints

    @property
    def cycles(self) -> int:
        """Draft cycles."""
        return int(self.reached.sum())

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds

    @property
    def verify_positions(self) -> float:
        """Positions of a row that verify computes in an average round."""
        return (sum_of(self.verifies) + self.unchecked) / self.rounds


def sum_of(passes: Ints) -> int:
    """Positions of all passes, which are counted by their positions [..., positions]."""
    return int((passes * np.arange(passes.shape[-1])).sum())


_Check = tuple[int, float | None]  # layer, confidence


class _LookedUp(NamedTuple):
    """[places] each, as in `replay_numba.walk`."""

    found: Ints
    right: Ints
    kept: Ints


class _Computed(NamedTuple):
    """[places] each, as in `replay_numba.walk`."""

    rank: Ints
    right: Ints
    kept: Ints
    sure: Ints


class RoundCounter:
    """Counts rounds over one recording. What plans have in common is worked out once."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._none = np.zeros(len(recording.truth), np.int64)
        self._always = np.full(len(recording.truth), 1 << 30, np.int64)
        self._never = np.zeros(len(recording.truth), np.bool_)
        self._ever = ~self._never
        self._cache: dict[Hashable, Any] = {}

    def count(self, plan: SpeculativeConfig | None, answer: int | None = None) -> Rounds:
        """The rounds of `plan`, row by row; of plain decoding for None. answer: the number of the one that is
        counted; None = all.

        What a round commits is exact: its drafts and checks are on the true context up to the first tentative
        token that is wrong, and nothing is committed beyond that. After it, the tiers go on in that round
        from a wrong token, and what they would say there was not recorded. They are taken to find, say and
        keep what they do at those places on the true context, a proposal that was looked up before it as if
        it were right (`Recording.kept_looked_up`); only the costs of the round depend on that.
        Those of gated cycles come out too high by it: after a wrong token a check is less sure. Not exact is
        a plan that keeps outputs, for several rows.
        """
        taken = slice(None) if answer is None else slice(answer, answer + 1)
        lengths = self._recording.lengths[taken]
        if plan is None:
            total = int(lengths.sum())
            none = np.zeros((1, 2), np.int64)
            reached, verifies = np.array([total]), np.array([0, total])
            return Rounds(lengths, total, total, reached, 0, none[0], none, none[0], verifies)
        from . import replay_numba  # here: numba

        check = (plan.check.layer, plan.check.confidence) if plan.check is not None else None
        draft, drafted = plan.draft, plan.num_draft_tokens
        looked_up = _LookedUp(self._none, self._none, self._none)
        computed = _Computed(self._none, self._none, self._none, self._always)
        if (sizes := draft.lookup) is not None:
            looked_up = self._once(("looked up", sizes, check), lambda: self._looked_up(sizes, check))
            drafted = 0 if not draft.traits.computes else min(draft.num_exit_tokens or drafted, drafted)
        if drafted:
            shape = draft.layer, plan.num_branches, check
            computed = self._once(("computed", *shape), lambda: self._computed(*shape))
            if (confidence := plan.draft_confidence) is not None:
                key, said = ("sure", draft.layer, confidence), self._said(draft.layer)
                sure = self._once(key, lambda: self._recording.sure(said, confidence))
                computed = computed._replace(sure=sure)
        own_right, goes_on = self._never, self._ever
        if check is not None:
            own_right = self._once(("own", check[0]), lambda: self._own_right(check[0]))
            if (gate := plan.check.continue_confidence if plan.check else None) is not None:
                goes_on = self._said(check[0]).probability >= np.float32(gate)
        num_checks = plan.num_checks if check else 1
        most_found = plan.num_draft_tokens if sizes is not None else 0
        window = num_checks * (max(most_found, plan.num_branches * drafted) + 1)
        per_answer, totals = np.zeros(len(lengths), np.int64), np.zeros(replay_numba.NUM_TOTALS, np.int64)
        reached = np.zeros(num_checks, np.int64)
        widths = np.zeros((replay_numba.LEVELS + drafted + 1, window + 1), np.int64)
        answers = self._recording.starts[taken], lengths, self._recording.caps[taken]
        sizes_of_round = most_found, drafted, plan.num_branches, num_checks, check is not None
        replay_numba.walk(
            *answers,
            *looked_up,
            *computed,
            own_right,
            goes_on,
            *sizes_of_round,
            per_answer,
            totals,
            reached,
            widths,
        )
        return Rounds(
            per_answer=per_answer,
            rounds=int(totals[replay_numba.ROUNDS]),
            tokens=int(totals[replay_numba.TOKENS]),
            reached=reached,
            unchecked=int(totals[replay_numba.UNCHECKED]),
            looked_up=widths[replay_numba.LOOKED_UP],
            levels=widths[replay_numba.LEVELS :],
            checks=widths[replay_numba.CHECK],
            verifies=widths[replay_numba.VERIFY],
        )

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def _looked_up(self, sizes: NgramConfig, check: _Check | None) -> _LookedUp:
        recording, found = self._recording, self._recording.looked_up[sizes]
        kept = self._none
        if check is not None:
            kept = recording.kept_looked_up(found, self._said(check[0]), check[1])
        return _LookedUp(found.counts, recording.right_looked_up(found), kept)

    def _computed(self, layer: int | None, num_branches: int, check: _Check | None) -> _Computed:
        recording, said = self._recording, self._said(layer)
        right = recording.right(said.tokens)
        kept = self._none if check is None else recording.kept(said.tokens, self._said(check[0]), check[1])
        if num_branches == 1:
            return _Computed(self._none, right, kept, self._always)
        # The next tier goes along the branch that begins with its own token, and from there on as it would
        # along a chain.
        assert check is None or check[1] is None, "a lenient check may go along several branches"
        rank = recording.rank(
            said, recording.truth if check is None else self._said(check[0]).tokens, num_branches
        )
        first_right = rank >= 0 if check is None else self._own_right(check[0])
        right, kept = 1 + recording.after(right), 1 + recording.after(kept)
        return _Computed(rank, np.where(first_right, right, 0), np.where(first_right, kept, 1), self._always)

    def _own_right(self, layer: int) -> Bools:
        """[places]: whether the check's own token is the answer's."""
        return self._recording.right(self._said(layer).tokens) > 0

    def _said(self, layer: int | None) -> Said:
        """What the exit at `layer` says, or the draft model for None."""
        said = self._recording.model if layer is None else self._recording.exits[layer]
        assert said is not None, "a plan drafts by a model that was not recorded"
        return said
