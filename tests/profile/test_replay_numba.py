"""The walk over a recording, against the round written out in tokens and lists."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hispec.config import NgramConfig, SpeculativeConfig
from hispec.profile.plans import short_text
from hispec.profile.recording import Answer, Ints, LookedUp, Recording, Said, flat
from hispec.profile.replay import RoundCounter, sum_of
from tests.profile.test_replay import MODEL, SIZES, exit_, hybrid, ngram, plan


class Reference:
    """One answer's rounds in tokens and lists, as `hispec.decoding.round` does them; what is said at a place
    is what was recorded there."""

    def __init__(self, recording: Recording, plan: SpeculativeConfig, answer: int) -> None:
        self.recording, self.plan = recording, plan
        self.start, self.length, self.cap = (
            int(recording.starts[answer]),
            int(recording.lengths[answer]),
            int(recording.caps[answer]),
        )
        self.cycles = self.rounds = self.checked = self.unchecked = self.looked_up = self.computed_passes = (
            self.computed_positions
        ) = 0
        self.verify_positions = 0
        nodes = plan.num_branches * plan.num_draft_tokens + 1
        self.window = nodes * (plan.num_checks if plan.check else 1)
        done = 0
        while done < self.length:
            self.rounds += 1
            done += self.round(done)

    def at(self, place: int) -> int:
        return self.start + min(place, self.length)

    def said(self, place: int) -> tuple[list[int], float]:
        said = (
            self.recording.model
            if self.plan.draft.layer is None
            else self.recording.exits[self.plan.draft.layer]
        )
        assert said is not None
        return said.ranked[self.at(place)].tolist(), float(said.probability[self.at(place)])

    def own(self, place: int) -> tuple[int, bool]:
        """The check's token there, and whether it overrules."""
        assert self.plan.check is not None
        said = self.recording.exits[self.plan.check.layer]
        sure = self.plan.check.confidence is None or said.probability[self.at(place)] >= np.float32(
            self.plan.check.confidence
        )
        return int(said.ranked[self.at(place), 0]), bool(sure)

    def goes_on(self, place: int) -> bool:
        """Whether the check is sure enough of its own token there for another cycle."""
        assert self.plan.check is not None
        gate = self.plan.check.continue_confidence
        said = self.recording.exits[self.plan.check.layer]
        return gate is None or bool(said.probability[self.at(place)] >= np.float32(gate))

    def truth(self, place: int) -> int | None:
        return int(self.recording.truth[self.at(place)]) if place < self.length else None

    def computed(self, place: int, most: int, room: int) -> list[list[int]]:
        """Branches of drafts."""
        confidence = self.plan.draft_confidence
        first, _ = self.said(place)
        branches = [[token] for token in first[: self.plan.num_branches]]
        columns = [[branch * most + 1] for branch in range(len(branches))]
        for level in range(most + 1):
            live = (
                1
                if level == 0
                else sum(branch * most + level < room for branch in range(self.plan.num_branches))
            )
            if not live or (
                level > 0
                and confidence is not None
                and self.said(place + level - 1)[1] < np.float32(confidence)
            ):
                break
            self.computed_passes += 1
            self.computed_positions += live
            if 0 < level < most:
                for branch, column in zip(branches, columns, strict=True):
                    branch.append(self.said(place + level)[0][0])
                    column.append(column[0] + level)
        if confidence is not None:
            sure = next((j for j in range(most) if self.said(place + j)[1] < np.float32(confidence)), most)
            return [branches[0][: min(sure, room - 1)]]
        return [
            [token for token, at in zip(branch, column, strict=True) if at < room]
            for branch, column in zip(branches, columns, strict=True)
        ]

    def draft(self, place: int, room: int) -> tuple[list[list[int]], bool]:
        """Branches, and whether they were looked up."""
        draft, most = self.plan.draft, self.plan.num_draft_tokens
        if draft.kind in ("ngram", "hybrid"):
            found = self.recording.looked_up[draft.ngram or NgramConfig()]
            at = self.at(place)
            tokens = found.tokens[at, : min(int(found.counts[at]), most, room - 1)].tolist()
            if tokens or draft.kind == "ngram":
                self.looked_up += bool(tokens)
                return [tokens], True
            most = draft.num_exit_tokens or most
        return self.computed(place, most, room), False

    def kept(self, place: int, branches: list[list[int]], is_looked_up: bool) -> list[int]:
        """The drafts that the check keeps, of the branch that it goes along."""
        if len(branches) > 1:
            own = self.own(place)[0]
            branches = [branch for branch in branches if branch[:1] == [own]] or [[]]
            if own != self.truth(place):
                return branches[0][:1]
        kept, is_right = [], True
        for step, token in enumerate(branches[0]):
            own, sure = self.own(place + step)
            asked = token if is_right else self.truth(place + step)
            if place + step >= self.length or (own != asked and sure):
                break
            kept.append(token)
            is_right = is_right and not (is_looked_up and token != self.truth(place + step))
        return kept

    def round(self, done: int) -> int:
        limit, tentative = min(self.window, self.cap - done), list[int]()
        for _ in range(self.plan.num_checks if self.plan.check else 1):
            self.cycles += 1
            place, room = done + len(tentative), limit - len(tentative)
            branches, is_looked_up = self.draft(place, room)
            num_drafts = sum(map(len, branches))
            if self.plan.check is None:
                self.verify_positions += num_drafts + 1
                return 1 + max(self.num_right(place, branch) for branch in branches)
            if num_drafts == 0 and self.plan.num_checks == 1:
                self.unchecked += 1
                self.verify_positions += 1
                return 1
            self.checked += num_drafts + 1
            kept = self.kept(place, branches, is_looked_up)
            tentative += [*kept, self.own(place + len(kept))[0]]
            if len(tentative) >= limit or not self.goes_on(place + len(kept)):
                break
        self.verify_positions += len(tentative)
        return min(self.num_right(done, tentative) + 1, len(tentative))

    def num_right(self, place: int, tokens: Sequence[int]) -> int:
        return next(
            (step for step, token in enumerate(tokens) if token != self.truth(place + step)), len(tokens)
        )


def random_recording(seed: int) -> Recording:
    """Answers over ten tokens, of which exits say the right one more often the deeper they lie."""
    generator = random.Random(seed)
    lengths = [generator.randrange(1, 14) for _ in range(6)]
    answers = [
        Answer(
            [0], [generator.randrange(10) for _ in range(length)], length + generator.choice([0, 0, 5]), "all"
        )
        for length in lengths
    ]

    def said(share: float) -> Said:
        ranked = []
        for answer in answers:
            for token in answer.token_ids:
                others = generator.sample([other for other in range(10) if other != token], 8)
                place = 0 if generator.random() < share else generator.randrange(1, 8)
                ranked.append([*others[:place], token, *others[place:]][:8])
            ranked.append([-1] * 8)
        return Said(
            np.array(ranked),
            np.array([generator.random() if one[0] >= 0 else -1.0 for one in ranked], np.float32),
        )

    truth = flat([answer.token_ids for answer in answers])

    def proposals(at: int) -> list[int]:
        ahead = [int(truth[min(at + step, len(truth) - 1)]) for step in range(6)]
        return [token if generator.random() < 0.7 else generator.randrange(10) for token in ahead]

    counts: Ints = np.array([generator.choice([0, 0, 1, 3, 6]) for _ in truth]) * (truth >= 0)
    found = LookedUp(counts, np.array([proposals(at) for at in range(len(truth))]))
    return Recording(answers, {2: said(0.5), 5: said(0.75)}, {}, {SIZES: found}, said(0.6))


def of_recording() -> list[SpeculativeConfig]:
    drafts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (exit_(2), {}),
        (exit_(2), {"draft_confidence": 0.4}),
        (exit_(2), {"num_branches": 3}),
        (MODEL, {}),
        (ngram(), {}),
        (hybrid(2, 1), {}),
        (hybrid(2, 2), {"draft_confidence": 0.6}),
    ]
    plans = []
    for draft, fields in drafts:
        for num_drafts in (2, 3):
            plans.append(plan(draft, num_drafts, **fields))
            for num_checks in (1, 3):
                plans += [
                    plan(draft, num_drafts, 5, num_checks, sure=sure, **fields)
                    for sure in ((None,) if "num_branches" in fields else (None, 0.5))
                ]
            plans += [plan(draft, num_drafts, 5, 4, gate=gate, **fields) for gate in (0.3, 0.7)]
    return plans


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_those_of_the_round_written_out(seed: int) -> None:
    recording = random_recording(seed)
    counter = RoundCounter(recording)
    for one in of_recording():
        counted, references = (
            counter.count(one),
            [Reference(recording, one, answer) for answer in range(len(recording.answers))],
        )
        assert counted.per_answer.tolist() == [reference.rounds for reference in references], short_text(one)
        assert counted.tokens == recording.lengths.sum()
        assert counted.cycles == sum(reference.cycles for reference in references), short_text(one)

        def total(name: str, references: list[Reference] = references) -> int:
            return sum(getattr(reference, name) for reference in references)

        assert (sum_of(counted.checks), counted.unchecked) == (
            total("checked"),
            total("unchecked"),
        ), short_text(one)
        assert (int(counted.levels.sum()), sum_of(counted.levels)) == (
            total("computed_passes"),
            total("computed_positions"),
        ), short_text(one)
        assert int(counted.looked_up.sum()) == total("looked_up") and sum_of(
            counted.verifies
        ) + counted.unchecked == total("verify_positions"), short_text(one)
