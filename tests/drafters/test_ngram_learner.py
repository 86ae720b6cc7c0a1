"""Guesses that are learnt while requests are served: what the table says, when it changes, and that outputs
do not."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from ee_models.checkpoint.ngram_file import Ngrams
from ee_models.decoder import Decoder
from hispec.drafters import ngram_learner
from hispec.drafters.lookup import SEPARATOR
from hispec.drafters.ngram_learner import NgramLearner
from hispec.drafters.ngram_table import Entries, NgramTable, hash_contexts, make_table
from hispec.engine import Engine
from tests.helpers.drafters import drafter_engine
from tests.helpers.support import GREEDY, make_engine, random_prompts, run
from tests.helpers.sweeps import sweep

CPU = torch.device("cpu")


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learns from every output at once."""
    monkeypatch.setattr(ngram_learner, "_FIRST_TOKENS", 1)
    monkeypatch.setattr(ngram_learner, "_GROWTH", 0.0)


def said(table: NgramTable) -> dict[int, tuple[int, float]]:
    return {
        key: (token, round(share, 5))
        for key, token, share in zip(*(each.tolist() for each in table.entries), strict=True)
    }


def key(*context: int) -> int:
    return int(hash_contexts(torch.tensor([context]))[0])


def known_table(path: str | None = None) -> NgramTable:
    contexts, follow = np.array([[1], [2], [3]]), np.array([11, 12, 13])
    return make_table(path, {1: Ngrams(contexts, follow, np.array([128, 64, 192], np.uint8))}, CPU)


def test_it_says_what_followed_most_often_and_how_often(early: None) -> None:
    learner = NgramLearner(None, 8192, CPU)
    assert said(learner.table) == {}
    learner.add([5, 6, 7] * 3)
    learner.add([5, 6, 8])
    # Of three 7 only two are followed by anything, and 8 by nothing: no output goes on in the next one.
    assert said(learner.table) == {key(5): (6, round(4 / 6, 5)), key(6): (7, 0.5)}
    learner.add([7, 5, 6, 9, 7, 5, 6, 9])
    found = said(learner.table)
    assert found[key(7)] == (5, round(4 / 6, 5)) and found[key(6)] == (7, round(3 / 8, 5))
    assert key(7, 5, 6) not in found, (
        "of 7 and 9, as frequent, the smaller: what 6 alone says, nearly as often"
    )


def test_of_what_was_counted_beforehand_that_stays_of_which_outputs_do_not_tell(early: None) -> None:
    learner = NgramLearner(known_table("folder"), 8192, CPU)
    assert learner.table.path == "folder"
    assert said(learner.table) == {key(1): (11, 0.5), key(2): (12, 0.25), key(3): (13, 0.75)}
    learner.add([2, 9] * 9)
    found = said(learner.table)
    assert found[key(2)] == (12, 0.25), "nine places say less than what was counted"
    learner.add([2, 9])
    found = said(learner.table)
    assert found[key(2)] == (9, round(10 / 12, 5)), "ten say more"
    assert found[key(1)] == (11, 0.5) and found[key(3)] == (13, 0.75)
    assert found[key(9)] == (2, 0.8)


@pytest.mark.parametrize("size", [2, 7])
def test_what_outputs_say_goes_before_longer_contexts_that_were_counted(early: None, size: int) -> None:
    """Else the longest context would decide, which says what it said before."""
    context = list(range(1, size + 1))
    known = {size: Ngrams(np.array([context]), np.array([99]), np.array([128], np.uint8))}
    learner = NgramLearner(make_table(None, known, CPU), 8192, CPU)
    assert said(learner.table) == {key(*context): (99, 0.5)}
    for _ in range(20):
        learner.add([*context, 50])
    found = said(learner.table)
    assert found[key(*context)] == (50, round(20 / 22, 5)) == found[key(size)]
    assert size == 2 or key(*context[1:]) not in found, "of others the shortest alone tells"


def test_the_latest_outputs_take_the_place_of_the_oldest(early: None) -> None:
    learner = NgramLearner(None, 8192, CPU)
    learner.add([1, 2] * 2000)
    assert said(learner.table)[key(1)][0] == 2
    learner.add([1, 3] * 2000)
    assert len(said(learner.table)) > 0 and said(learner.table)[key(1)][1] < 0.51, "both are kept"
    learner.add([1, 3] * 2000)  # in the place of the first
    found = said(learner.table)
    assert found[key(1)][0] == 3 and key(2) not in found
    learner.add([4, 5] * 10_000)
    assert said(learner.table).keys() >= {key(4), key(5)}
    assert key(1) not in said(learner.table), "of an output that is longer than all, its last tokens"
    assert len(learner._outputs) == 8192


def test_nothing_old_stays_behind_the_last_output_that_found_room(early: None) -> None:
    learner = NgramLearner(None, 8192, CPU)
    for number in range(30):  # three in a round and a rest, which was smaller in the first one
        learner.add([7, 100 + number] * (1300 if number < 3 else 1250))
    assert set(learner._outputs.tolist()) == {7, 127, 128, 129, SEPARATOR}


def test_it_counts_at_first_and_then_when_a_quarter_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = NgramLearner(None, 1 << 16, CPU)
    at: list[int] = []
    monkeypatch.setattr(learner, "_learn", lambda: at.append(learner._used))
    for _ in range(600):
        learner.add([1, 2, 3, 4] * 25)
    assert 2048 <= at[0] < 2250
    assert all(2048 <= after - before < max(2048, 0.25 * before) + 202 for before, after in pairwise(at))
    num_counted = len(at)
    for _ in range(2000):  # now in circles
        learner.add([1, 2, 3, 4] * 25)
    assert len(at) - num_counted == pytest.approx(2000 * 101 / (0.25 * (1 << 16)), abs=1)


def test_the_table_is_written_where_it_is(early: None) -> None:
    """As captured graphs and compiled rounds read it there."""
    learner = NgramLearner(known_table(), 8192, CPU)
    table = learner.table
    before = [each.data_ptr() for each in (table.keys, table.tokens, table.shares)]
    for number in range(5):
        learner.add([7 + number, 8] * 20)
    assert learner.table is table
    assert [each.data_ptr() for each in (table.keys, table.tokens, table.shares)] == before
    assert learner.num_bytes >= table.num_bytes + 4 * 8192


def test_where_there_is_no_room_the_most_frequent_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_learner, "_FIRST_TOKENS", 64)
    monkeypatch.setattr(ngram_learner, "_GROWTH", 0.0)
    monkeypatch.setattr(ngram_learner, "_TOKENS_PER_CONTEXT", 1 << 20)  # so 64 contexts at most
    learner = NgramLearner(None, 8192, CPU)
    for token in range(0, 200, 2):
        learner.add([token, token + 1] * (3 + token // 10))
    found = said(learner.table)
    assert len(found) == 64 and key(190) in found and key(0) not in found
    full = NgramTable.empty(None, 1, 16, 2, 0, CPU)
    crowd = torch.tensor([16, 32, 48])  # all at home in the first slot
    assert not full.fill(Entries(crowd, crowd, torch.ones(3)))
    assert full.entries.keys.tolist() == [], "nothing was written"
    assert full.fill(Entries(crowd[1:], crowd[1:], torch.ones(2)))
    learner.table = full
    learner._fill(Entries(crowd.repeat(4)[:9] + 16 * torch.arange(9), crowd.repeat(3), torch.ones(9)))
    assert 0 < len(full.entries.keys) <= 5


PLANS: dict[str, dict[str, Any]] = {
    "ngram": {"draft": {"kind": "ngram"}, "num_draft_tokens": 4},
    "ngram gated": {
        "draft": {"kind": "ngram"},
        "check": {"layer": 8, "continue_confidence": 0.5},
        "num_draft_tokens": 3,
        "num_checks": 2,
    },
    "hybrid": {
        "draft": {"kind": "hybrid", "layer": 3, "exit": "exit", "num_exit_tokens": 1},
        "num_draft_tokens": 4,
    },
}


def learning_engine(decoder: Decoder, plan: str, **options: Any) -> Engine:
    values = PLANS[plan]
    ngram = {"max_size": 4, "min_size": 4, "guess_confidence": 0.3, "learn_tokens": 8192}
    return drafter_engine(decoder, {**values, "draft": {**values["draft"], "ngram": ngram}}, **options)


@pytest.fixture(params=["together", "single", "static"])
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    each = {"together": {}, "single": {"max_run_ms": 0.0}, "static": {"is_static": True}}
    yield each[request.param]


@sweep(
    "plan, temperature",
    itertools.product(PLANS, [0.0, 0.8]),
    lambda case: case[1] > 0.0 or case[0] == next(iter(PLANS)),
)
def test_it_learns_and_outputs_stay(
    early: None, tiny_decoder: Decoder, plan: str, temperature: float, options: dict[str, Any]
) -> None:
    prompts = random_prompts((5, 17, 30, 9))
    params = [
        GREEDY.model_copy(update={"temperature": temperature, "seed": number, "max_tokens": 40})
        for number in range(len(prompts))
    ]
    expected = run(make_engine(tiny_decoder), prompts, params)
    engine, rounds = learning_engine(tiny_decoder, plan, **options), []
    for _ in range(4):
        engine.reset_stats()
        assert run(engine, prompts, params) == expected
        rounds.append(engine.stats()["rounds"])
    assert rounds[-1] < rounds[0], "once it has seen these outputs, it guesses them"


def test_what_fails_while_it_learns_takes_no_request_down(
    early: None, tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts((5, 17))
    expected = run(make_engine(tiny_decoder), prompts, GREEDY)
    engine = learning_engine(tiny_decoder, "ngram")

    def fails(*_: object) -> None:
        raise MemoryError("no room to count")

    monkeypatch.setattr(ngram_learner, "count", fails)
    assert run(engine, prompts, GREEDY) == expected
    assert engine.stats()["drafter_failures"] == 2


def test_as_much_as_the_rule_says(early: None) -> None:
    """Beside a count that is written as the rule reads."""
    draw = random.Random(3)
    outputs = [[draw.randrange(6) for _ in range(draw.randrange(1, 30))] for _ in range(40)]
    learner = NgramLearner(None, 8192, CPU)
    for output in outputs:
        learner.add(output)
    following: dict[tuple[int, ...], Counter[int]] = {}
    for output in outputs:
        for place in range(1, len(output)):
            for size in range(1, min(5, place) + 1):
                context = tuple(output[place - size : place])
                following.setdefault(context, Counter())[output[place]] += 1
    expected: dict[int, tuple[int, float]] = {}
    for context, counts in sorted(following.items(), key=lambda each: len(each[0])):
        token, times = min(counts.items(), key=lambda each: (-each[1], each[0]))
        share, shorter = times / (counts.total() + 2), (-1, 0.0)
        for size in range(1, len(context)):
            shorter = expected.get(key(*context[-size:]), shorter)
        is_new = token != shorter[0] or abs(share - shorter[1]) > 0.05
        if counts.total() >= 3 and is_new and max(share, shorter[1]) >= 0.1:
            expected[key(*context)] = token, share
    assert said(learner.table) == {of: (token, round(share, 5)) for of, (token, share) in expected.items()}
    assert len(expected) > 100
