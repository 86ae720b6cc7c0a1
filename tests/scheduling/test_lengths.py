"""Length prediction: what it says, what it forgets, and that nothing a user's predictor does takes a request
down."""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.errors import ConfigError
from hispec.scheduling.lengths import GuardedLengths, OnlineLengths, make_lengths
from tests.helpers.steps import count_steps

PROMPT = list(range(40))


class Hook:
    """Says what `answer` says of (generated)."""

    def __init__(self, answer: Callable[[int], object]) -> None:
        self.answer = answer
        self.seen: list[int] = []

    def predictor(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Callable[[int], float]:
        return self.answer

    def finished(self, prompt_token_ids: Sequence[int], num_output: int) -> None:
        self.seen.append(num_output)


def fail(*_: object) -> float:
    raise RuntimeError("no idea")


def taught(lengths: Sequence[int], expected_tokens: int = 256) -> OnlineLengths:
    predictor = OnlineLengths(expected_tokens)
    for length in lengths:
        predictor.finished(PROMPT, length)
    return predictor


def test_while_nothing_has_finished_the_expected_tokens_are_assumed_whatever_there_is_already() -> None:
    predict = OnlineLengths(100).predictor(PROMPT, 10_000)
    assert [predict(generated) for generated in (0, 50, 500)] == [100.0, 150.0, 600.0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), max_size=40),
    st.integers(1, 400),
    st.integers(0, 500),
)
def test_a_prediction_lies_between_the_next_token_and_the_most(
    finished: list[tuple[int, int]], max_tokens: int, generated: int
) -> None:
    predictor = OnlineLengths(64)
    for kind, length in finished:
        predictor.finished([kind] * (10**kind), length)
    for kind in range(4):
        assert (
            min(generated + 1, max_tokens)
            <= predictor.predictor([kind] * (10**kind), max_tokens)(generated)
            <= max_tokens
        )


def test_it_learns_the_mean_residual_of_those_that_were_longer() -> None:
    lengths = [10] * 50 + [100] * 50
    predict = taught(lengths).predictor(PROMPT, 10_000)
    assert predict(0) == pytest.approx(55, rel=0.05)
    assert predict(5) == pytest.approx(55, rel=0.08)
    assert predict(10) == pytest.approx(100, rel=0.05), "the short ones are out of the question"
    assert predict(60) == pytest.approx(100, rel=0.08)
    assert predict(100) == pytest.approx(155, rel=0.05), (
        "longer than all before: as much again as is expected of a new request"
    )


def test_classes_are_told_apart_by_template_and_by_length_of_prompt() -> None:
    predictor = OnlineLengths(256)
    short, long, other = [1] * 20, [1] * 600, [2] * 20
    for _ in range(60):
        for prompt, length in ((short, 10), (long, 400), (other, 100)):
            predictor.finished(prompt, length)
    assert [predictor.predictor(prompt, 10_000)(0) for prompt in (short, long, other)] == [
        pytest.approx(n, rel=0.35) for n in (10, 400, 100)
    ]
    assert predictor.predictor([3] * 20, 10_000)(0) == pytest.approx(55, rel=0.3), (
        "a new template: as others of its length"
    )
    assert predictor.predictor([3] * 4000, 10_000)(0) == pytest.approx(170, rel=0.3), "a new length: as all"


def test_the_recent_past_replaces_the_distant_one() -> None:
    assert taught([1000] * 300 + [10] * 300).predictor(PROMPT, 10_000)(0) == pytest.approx(10, rel=0.02)


def test_it_is_better_than_the_mean_where_templates_differ() -> None:
    generator = random.Random(0)
    predictor = OnlineLengths(256)
    errors: tuple[list[float], list[float]] = ([], [])
    for index in range(600):
        kind = generator.randrange(3)
        prompt, length = [kind] * 30, max(1, int(generator.gauss(40 * 4**kind, 10)))
        if index > 100:
            errors[0].append(abs(predictor.predictor(prompt, 10_000)(0) - length))
            errors[1].append(abs(280.0 - length))
        predictor.finished(prompt, length)
    assert statistics.fmean(errors[0]) < 0.1 * statistics.fmean(errors[1])


def test_memory_is_bounded_and_a_prediction_takes_few_steps() -> None:
    predictor = OnlineLengths(256)
    for index in range(2000):
        predictor.finished([index, *PROMPT], index % 300)
    assert (
        len(predictor._by_template) == 256
        and len(predictor._all._sorted) == len(predictor._all._recent) == 256
    )
    assert predictor._all._sorted == sorted(predictor._all._recent)
    predict = predictor.predictor(PROMPT, 10_000)
    predict(0)
    sums = predictor._all._sums
    assert count_steps(lambda: [predict(generated) for generated in range(1000)]) < 1000 * 800
    assert predictor._all._sums is sums and sums is not None, "added up anew for every prediction"


@pytest.mark.parametrize(
    "call",
    [
        lambda: OnlineLengths(0),
        lambda: OnlineLengths(1).predictor([1], 0),
        lambda: OnlineLengths(1).finished([1], -1),
    ],
)
def test_impossible_lengths_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        call()


# ---- a user's predictor ----


def test_what_a_users_predictor_says_is_cut_and_it_is_told_what_finished() -> None:
    hook = Hook(lambda generated: {0: 50, 1: -7.0, 2: math.inf, 3: -math.inf}[generated])
    guarded = make_lengths(256, hook)
    assert isinstance(guarded, GuardedLengths) and isinstance(make_lengths(256), OnlineLengths)
    predict = guarded.predictor(PROMPT, 80)
    assert [predict(generated) for generated in range(4)] == [50.0, 2.0, 80.0, 4.0]
    guarded.finished(PROMPT, 33)
    assert hook.seen == [33] and guarded.num_failures == 0


@pytest.mark.parametrize(
    "answer", [fail, lambda generated: math.nan, lambda generated: None, lambda generated: "many"]
)
def test_where_it_fails_the_default_answers_and_it_is_said_once(
    answer: Callable[[int], object], caplog: pytest.LogCaptureFixture
) -> None:
    guarded = GuardedLengths(Hook(answer), OnlineLengths(30))
    with caplog.at_level(logging.WARNING, "hispec.scheduling.lengths"):
        predict = guarded.predictor(PROMPT, 1000)
        assert [predict(0), predict(10)] == [30.0, 40.0]
    assert guarded.num_failures == 2
    assert [record.getMessage().startswith("the length predictor failed (") for record in caplog.records] == [
        True
    ]


def test_a_users_predictor_may_fail_at_any_call() -> None:
    hook = Hook(float)
    hook.predictor = hook.finished = fail
    guarded = GuardedLengths(hook, OnlineLengths(30))
    assert guarded.predictor(PROMPT, 1000)(5) == 35.0
    for _ in range(50):
        guarded.finished(PROMPT, 3)
    assert guarded.num_failures == 51 and guarded.predictor(PROMPT, 1000)(0) < 6, (
        "the default goes on learning"
    )
