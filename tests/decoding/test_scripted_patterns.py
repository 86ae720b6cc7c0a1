"""Every pattern of who agrees with whom: accepted by the check and rejected by verify, the reverse, and all
others."""

from __future__ import annotations

import itertools

import pytest

from hispec.config import Plan
from hispec.sampling_params import SamplingParams
from tests.helpers.scripted import ScriptedDecoder, one_hot_script, true_next
from tests.helpers.support import make_engine

PROMPT = [3]


def first_round(plan: Plan, wrong_draft: set[int], wrong_check: set[int]) -> dict:
    """Stats of one round in which the draft (check) exit is wrong exactly at the given columns of the first
    round."""

    def next_token(exit_layer: int, position: int, token: int) -> int:
        wrong = position in (
            wrong_draft
            if exit_layer == plan.draft_layer
            else wrong_check
            if exit_layer == plan.check_layer
            else ()
        )
        # Both tiers are wrong in the same way where both are: then the check keeps the draft, and verify must
        # reject it.
        return (true_next(position, token) + (17 if wrong else 0)) % 50

    engine = make_engine(ScriptedDecoder(one_hot_script(next_token)), plan)
    engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=40))
    deltas = engine.step()
    tokens = [PROMPT[0]]
    for position in range(len(deltas[0].token_ids)):
        tokens.append(true_next(position, tokens[-1]))
    assert deltas[0].token_ids == tokens[1:], "a round committed what the full model does not say"
    return engine.stats()


def simulate(plan: Plan, wrong_draft: set[int], wrong_check: set[int]) -> tuple[int, int, int, int]:
    """(draft tokens kept, tentative, accepted, committed), told from the patterns alone."""
    offset, kept_in_all, on_track = 0, 0, True
    accepted = 0
    for _ in range(plan.num_checks):
        kept = 0
        while kept < plan.num_draft_tokens:
            column = offset + kept
            # Off the track the tokens differ, but the scripts still agree with each other unless just one is
            # wrong.
            if (column in wrong_draft) != (column in wrong_check):
                break
            kept += 1
        for column in range(offset, offset + kept + 1):
            if column in wrong_check:
                on_track = False
            if on_track:
                accepted += 1
        offset += kept + 1
        kept_in_all += kept
    return kept_in_all, offset, accepted, min(accepted + 1, offset)


@pytest.mark.parametrize("plan", [Plan(2, 5, 2, 1), Plan(2, 5, 1, 2), Plan(2, 5, 2, 2)], ids=str)
def test_every_pattern_of_agreement(plan: Plan) -> None:
    columns = range(plan.window if plan.window <= 4 else 4)
    seen = set()
    for wrong_draft, wrong_check in itertools.product(
        *[[set(s) for n in range(len(columns) + 1) for s in itertools.combinations(columns, n)]] * 2
    ):
        stats = first_round(plan, wrong_draft, wrong_check)
        got = stats["draft_kept"], stats["tentative"], stats["accepted"], stats["committed"]
        assert got == simulate(plan, wrong_draft, wrong_check), (wrong_draft, wrong_check)
        seen.add(got)
    assert len(seen) >= 6, "the patterns did not lead to different rounds"


@pytest.mark.parametrize("num_wrong", range(5))
def test_two_tiers_commit_up_to_the_first_wrong_draft(num_wrong: int) -> None:
    stats = first_round(Plan(2, None, 4, 1), {num_wrong}, set())
    assert stats["committed"] == min(num_wrong, 4) + 1 and stats["accepted"] == min(num_wrong, 4)
