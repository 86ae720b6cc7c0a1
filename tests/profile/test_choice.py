"""Which of the plans that were run is the best one: what repeats tell, and what they do not."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from hispec.config import SpeculativeConfig
from hispec.errors import build
from hispec.jobs.bench_runs import Group, Runs
from hispec.profile.predict import Prediction
from hispec.profile.results import choose, measured_plans


def speeds(*runs: float) -> dict[str, Any]:
    return {"tokens_per_s": statistics.geometric_mean(runs), "tokens_per_s_runs": list(runs)}


def made_up(plan: dict[str, Any] | None, gains: float, *runs: float) -> dict[str, Any]:
    full = (
        None if plan is None else build(SpeculativeConfig, {"draft": {"kind": "ngram"}, **plan}).model_dump()
    )
    return {"speculative": full, "plan_text": str(plan), "tokens_per_round": gains, **speeds(*runs)}


PLAIN = made_up(None, 1.0, 10.0, 9.0, 11.0)
NARROW, WIDE = {"num_draft_tokens": 2}, {"num_draft_tokens": 8}
THREE = NARROW | {"check": {"layer": 5}, "num_checks": 1}


@pytest.mark.parametrize(
    ("others", "taken", "words"),
    [
        ([made_up(THREE, 1.0, 10.2, 9.2, 11.2)], None, "no other plan that was run gained"),
        ([made_up(THREE, 1.1, 10.4, 9.0, 11.1)], None, "simplest of 2 .* of the fastest, "),
        ([made_up(THREE, 1.6, 14.0, 12.6, 15.3)], THREE, "fastest by more than the noise"),
        (
            [made_up(THREE, 1.6, 14.2, 12.6, 15.3), made_up(NARROW, 1.6, 13.9, 12.7, 15.2)],
            NARROW,
            "simplest of 2 ",
        ),
        (
            [made_up(WIDE, 1.6, 14.2, 12.6, 15.3), made_up(NARROW, 1.6, 13.9, 12.7, 15.2)],
            NARROW,
            "simplest of 2 ",
        ),
        (
            [made_up(NARROW, 1.6, 12.0, 10.8, 13.2), made_up(WIDE, 1.6, 14.0, 12.6, 15.4)],
            WIDE,
            "fastest by more than the noise",
        ),
    ],
)
def test_of_plans_that_the_repeats_do_not_tell_apart_the_simplest_is_taken(
    others: list[dict[str, Any]], taken: dict[str, Any] | None, words: str
) -> None:
    for measured in ([PLAIN, *others], [PLAIN, *reversed(others)]):
        chosen, reason = choose(measured)
        assert chosen["plan_text"] == str(taken) and re.search(words, reason), reason


def test_a_single_repeat_gives_the_fastest_that_gains_and_says_what_it_lacks() -> None:
    runs = [made_up(None, 1.0, 10.0), made_up(NARROW, 1.0, 10.3), made_up(WIDE, 1.2, 10.1)]
    chosen, reason = choose(runs)
    assert chosen is runs[2] and "--repeats 3" in reason
    assert "fastest of plain decoding and the plans that gain a token" in reason  # NARROW was faster


def test_a_ratio_lies_in_the_middle_of_its_interval_however_the_repeats_vary() -> None:
    def timed(*runs: float) -> Runs:
        stats = {"tokens": 40, "rounds": 30, "num_layers": 4, "layer_passes": 130, "prefill_layer_passes": 10}
        outputs = [[list(range(40))] for _ in runs]
        seconds = [[40 / speed] for speed in runs]
        return Runs([Group("all", [0])], seconds, [[0.0] for _ in runs], outputs, stats)

    plan = build(SpeculativeConfig, {"draft": {"kind": "ngram"}, "num_draft_tokens": 2})
    predicted = [Prediction(each, 1.3, 1.3, 1.0, 10.0, 30.0, 1.1) for each in (None, plan)]
    runs = [timed(32.8, 10.4, 11.1), timed(31.0, 33.5, 36.0)]
    plain, measured = measured_plans(predicted, runs, 4)
    low, high = measured["ratio_interval"]
    assert measured["ratio_to_plain"] == pytest.approx((low * high) ** 0.5)
    assert measured["ratio_to_plain"] == measured["tokens_per_s"] / plain["tokens_per_s"]
