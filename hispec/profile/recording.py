"""What every tier says at every place of the target's own answers (`reading`), and what follows from it about
drafts and checks.

Under greedy decoding a draft's context is the true one for as long as all drafts before it were right, so
what a round commits can be read off these tokens, exactly (`replay_numba.walk`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import NgramConfig

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NOTHING = -1  # stands after the last token of each answer


@dataclass(frozen=True)
class Answer:
    """A prompt with the target's own greedy answer, and how many tokens that could have had."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    cap: int
    task: str


@dataclass(frozen=True)
class Said:
    """What an exit or a model says.

    ranked        [places, ranks]: its likeliest tokens, the likeliest first; of a draft model that one alone
    probability   [places] float32: of the likeliest
    """

    ranked: Ints
    probability: NDArray[np.float32]

    @property
    def tokens(self) -> Ints:
        """[places]: the likeliest token."""
        return self.ranked[:, 0]


@dataclass(frozen=True)
class LookedUp:
    """What prompt lookup proposes after the true text: counts [places], tokens [places, most]."""

    counts: Ints
    tokens: Ints


class Recording:
    """Tokens at the places of all answers, answer after answer; after each answer's last place comes one
    without a token.

    exits       {layer: what the candidate exit there says}
    own         {layer: tokens [places]} of the model's own norm and head after each layer, the last one
                included
    looked_up   {sizes: what prompt lookup of these sizes proposes}
    model       what the draft model says; None = there is none
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        exits: Mapping[int, Said],
        own: Mapping[int, Ints],
        looked_up: Mapping[NgramConfig, LookedUp] | None = None,
        model: Said | None = None,
    ) -> None:
        self.answers, self.exits, self.own = list(answers), dict(exits), dict(own)
        self.looked_up, self.model = dict(looked_up or {}), model
        self.lengths = np.array([len(answer.token_ids) for answer in answers], np.int64)
        self.caps = np.array([answer.cap for answer in answers], np.int64)
        self.starts = np.cumsum(self.lengths + 1) - self.lengths - 1
        self.truth = flat([answer.token_ids for answer in answers])
        self._ends = np.repeat(self.starts + self.lengths, self.lengths + 1)

    # ---- of drafts that are said one after the other ----

    def right(self, tokens: Ints) -> Ints:
        """[places]: how many of `tokens` from here on are the answer's."""
        return self._runs(tokens == self.truth)

    def kept(self, tokens: Ints, check: Said, confidence: float | None = None) -> Ints:
        """[places]: how many of `tokens` from here on a check keeps: says itself, or does not overrule with
        this confidence."""
        kept = check.tokens == tokens
        return self._runs(kept if confidence is None else kept | (check.probability < np.float32(confidence)))

    def sure(self, said: Said, confidence: float) -> Ints:
        """[places]: how many tokens from here on have at least this probability."""
        return self._runs(said.probability >= np.float32(confidence))

    @staticmethod
    def rank(said: Said, tokens: Ints, most: int) -> Ints:
        """[places]: which of the `most` likeliest tokens this one is, from 0; -1 if none."""
        same = said.ranked[:, :most] == tokens[:, None]
        return np.where(same.any(-1), same.argmax(-1), -1)

    def after(self, runs: Ints) -> Ints:
        """[places]: `runs` of the next place; 0 after an answer's last."""
        return np.where(self.truth == NOTHING, 0, np.append(runs[1:], 0))

    # ---- of what is looked up all at once ----

    def right_looked_up(self, found: LookedUp) -> Ints:
        """[places]: how many leading proposals are the answer's tokens."""
        return self._leading(found, found.tokens == self._ahead(self.truth, found))

    def kept_looked_up(self, found: LookedUp, check: Said, confidence: float | None = None) -> Ints:
        """[places]: how many leading proposals a check keeps, as in `kept`. What it says after a wrong one
        that it keeps is not known. What follows there was said after that token once, and so is taken to be
        kept where the answer's own token would be: a check that overrules only where it is sure keeps most
        of it, and verify pays for it all."""
        said = self._ahead(check.tokens, found)
        first_wrong = self.right_looked_up(found)[:, None]
        is_beyond = np.arange(found.tokens.shape[1]) > first_wrong
        kept = said == np.where(is_beyond, self._ahead(self.truth, found), found.tokens)
        if confidence is not None:
            kept |= self._ahead(check.probability, found) < np.float32(confidence)
        return self._leading(found, kept)

    # ---- shares ----

    def places(self, task: str | None = None) -> Bools:
        """[places]: where a token of an answer is, of those of `task` if given."""
        wanted = [task is None or answer.task == task for answer in self.answers]
        return (self.truth != NOTHING) & np.repeat(wanted, self.lengths + 1)

    def tasks(self) -> list[str]:
        """Names of the tasks, in the order in which they first appear."""
        return list(dict.fromkeys(answer.task for answer in self.answers))

    def groups(self) -> list[Ints]:
        """The numbers of each task's answers."""
        return [
            np.array([at for at, answer in enumerate(self.answers) if answer.task == task], np.int64)
            for task in self.tasks()
        ]

    def agreement(self, tokens: Ints, task: str | None = None) -> float:
        """Share of `tokens` that are the answer's."""
        places = self.places(task)
        return float((tokens == self.truth)[places].mean())

    def found(self, found: LookedUp, task: str | None = None) -> float:
        """Share of places at which prompt lookup proposes anything."""
        return float((found.counts > 0)[self.places(task)].mean())

    def first_right(self, right: Ints, most: int, drafts: Ints | None = None) -> list[float | None]:
        """[j - 1] = probability that the first j drafts from a random place are all right; None where no
        place has j.

        right   [places]: drafts in a row that are right; drafts [places]: how many there are, None = as many
                as the answer has left
        """
        there = self._ends - np.arange(len(right))
        if drafts is not None:
            there = np.minimum(there, drafts)
        return [
            float((right[there >= j] >= j).mean()) if bool((there >= j).any()) else None
            for j in range(1, most + 1)
        ]

    # ---- inside ----

    def _runs(self, equal: Bools) -> Ints:
        equal = equal & (self.truth != NOTHING)
        index = np.arange(len(equal))
        next_other = np.where(
            equal, len(equal), index
        )  # every answer is followed by a place that counts as other
        return np.minimum.accumulate(next_other[::-1])[::-1] - index

    def _ahead(self, values: NDArray[Any], found: LookedUp) -> NDArray[Any]:
        """values [places] at the places of the proposals [places, most]."""
        places = np.arange(len(self.truth))[:, None] + np.arange(found.tokens.shape[1])
        return values[np.minimum(places, self._ends[:, None])]

    def _leading(self, found: LookedUp, good: Bools) -> Ints:
        """[places]: how many leading proposals are there, are for a place of the answer, and are `good`
        [places, most]."""
        there = np.minimum(found.counts, self._ends - np.arange(len(self.truth)))
        good = good & (np.arange(good.shape[1]) < there[:, None])
        return np.cumprod(good, axis=1, dtype=np.int64).sum(axis=1)


def said_of(tokens: Ints, probability: float = 1.0) -> Said:
    """An exit that says these tokens [places], always with this probability."""
    return Said(tokens[:, None], np.full(len(tokens), probability, np.float32))


def flat(rows: Sequence[Sequence[int]]) -> Ints:
    """Rows of tokens one after the other, each followed by NOTHING: the layout of a Recording."""
    return np.concatenate([np.array([*row, NOTHING], np.int64) for row in rows])
