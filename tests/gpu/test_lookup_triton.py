"""Prompt lookup by Triton against the rule as it reads, and against what is tested of its twins; in Triton's
interpreter without a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from hispec.drafters import lookup_torch, lookup_triton
from tests.drafters import test_lookup as lookup
from tests.drafters import test_lookup_ahead as ahead
from tests.drafters.test_lookup import MAKERS, MAX_LEN, NUM_ROWS, Known, known_ngrams, replay, scripts
from tests.helpers.sweeps import sweep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the twins' tests run on a CPU")
make = MAKERS["tensors"]


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks so small that a text has several."""
    monkeypatch.setattr(lookup_torch, "runs_triton", lambda device: True)
    monkeypatch.setattr(lookup_triton, "_CHUNK", 16)


@sweep("num_scripts", [15, 100], (15).__eq__)
def test_proposals_are_those_of_the_rule(num_scripts: int) -> None:
    @settings(max_examples=num_scripts, deadline=None)
    @given(script=scripts())
    def check(script: tuple[tuple[Any, ...], list[Any]]) -> None:
        replay(make, *script)

    check()


@sweep("num_scripts", [10, 100], (10).__eq__)
def test_guesses_are_those_of_the_rule(num_scripts: int) -> None:
    @settings(max_examples=num_scripts, deadline=None)
    @given(script=scripts(), known=known_ngrams, confidence=st.sampled_from([0.01, 0.2, 0.6]))
    @example(**lookup.CHAINED)
    def check(script: tuple[tuple[Any, ...], list[Any]], known: Known, confidence: float) -> None:
        replay(make, *script, known=(known, confidence))

    check()


@sweep("seed", range(2), 2)
def test_long_texts_are_searched_to_both_ends(seed: int) -> None:
    """The store, then a text of several chunks, with matches at any distance."""
    generator = random.Random(seed)
    text = [generator.randrange(4) for _ in range(90)]
    asked = [(row, [generator.randrange(4) for _ in range(2)], 5) for row in range(NUM_ROWS)]
    steps: list[Any] = [("store", [generator.randrange(4) for _ in range(20)]) for _ in range(3)]
    for length in (3, 17, 48, 90):
        steps += [("reset", row, text[row : row + length]) for row in range(NUM_ROWS)]
        steps += [("propose", asked), ("propose", [(row, [], 7) for row in range(NUM_ROWS)])]
    assert replay(make, (1, 4, 60, 0.1), steps, max_len=96) > 20
    assert MAX_LEN < 90


@pytest.mark.parametrize(
    "test",
    [
        lookup.test_a_period_repeats_past_the_end,
        lookup.test_a_longer_match_gives_more_proposals,
        lookup.test_of_a_copy_and_a_guess_the_surer_is_proposed,
        lookup.test_the_store_keeps_the_last_tokens_and_forgets_the_oldest,
        ahead.test_a_row_that_is_reset_forgets_what_it_was_extended_by,
        ahead.test_a_text_that_is_extended_beyond_its_end_stops_there,
        ahead.test_rows_of_padding_share_a_place_and_change_nothing,
        ahead.test_a_text_longer_than_what_is_searched_within_is_left_alone,
        *(
            lambda make, seed=seed: ahead.test_extending_is_appending_that_the_host_does_not_know_of(
                make, seed
            )
            for seed in range(2)
        ),
    ],
    ids=[
        *("period", "longer match", "surer", "store", "reset", "beyond its end", "padding", "within"),
        *("extended 0", "extended 1"),
    ],
)
def test_what_holds_of_the_twins_holds(test: Callable[[Any], None]) -> None:
    test(make)
