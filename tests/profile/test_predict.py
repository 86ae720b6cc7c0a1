"""Predictions: arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hispec.config import CheckConfig, DraftConfig, NgramConfig, SpeculativeConfig
from hispec.profile.costs import Curve, StageCosts
from hispec.profile.predict import Calibration, Predictor, _occupancy, calibrate
from hispec.profile.recording import Answer, LookedUp, Recording, flat, said_of
from hispec.profile.replay import RoundCounter, sum_of
from hispec.profile.round_cost import _shares_of_batch, round_costs
from hispec.profile.search import best_by_layers, best_of_each_kind, search
from hispec.profile.timed_runs import Step

LAYERS = (2, 5)
SIZES = NgramConfig()


def flat_curve(ms: float) -> Curve:
    return Curve((1, 10_000), (ms, ms))


def constant_costs() -> StageCosts:
    """A draft pass takes 2 ms, a fill 1, a check 4, verify 8, a plain step 10, whatever the width; a lookup
    0.25, probabilities 0.125."""
    pairs = {(lo, hi): flat_curve(4.0) for lo in (0, *LAYERS) for hi in LAYERS if hi > lo}
    draft, fill = ({layer: flat_curve(ms) for layer in LAYERS} for ms in (2.0, 1.0))
    verify = {lo: flat_curve(8.0) for lo in (0, *LAYERS)}
    return StageCosts(
        30,
        draft,
        fill,
        pairs,
        verify,
        flat_curve(10.0),
        probability=flat_curve(0.125),
        lookup=flat_curve(0.25),
    )


def hand_recording() -> Recording:
    """Truth 1 .. 8. The draft exit is wrong at places 1 and 5, the check exit at place 5, with the same wrong
    token. 3 4 9 is looked up at place 2, 6 at place 5."""
    answers = [Answer([0], list(range(1, 9)), 8, "all")]
    said = {2: flat([[1, 0, 3, 4, 5, 0, 7, 8]]), 5: flat([[1, 2, 3, 4, 5, 0, 7, 8]])}
    counts, tokens = np.zeros(9, np.int64), np.zeros((9, 3), np.int64)
    counts[2], tokens[2], counts[5], tokens[5, 0] = 3, [3, 4, 9], 1, 6
    return Recording(
        answers,
        {layer: said_of(tokens) for layer, tokens in said.items()},
        said,
        {SIZES: LookedUp(counts, tokens)},
    )


def predictor_of(
    recording: Recording, batch_size: int = 1, host_ms: float = 0.5, prefill_s: float = 0.1
) -> Predictor:
    return Predictor(
        recording,
        constant_costs(),
        Calibration(batch_size, 10.0, 9.5, host_ms, prefill_s),
        batch_size,
        num_layers=9,
    )


def exit_plan(num_drafts: int, num_checks: int = 0, **fields: float) -> SpeculativeConfig:
    """Two tiers without checks."""
    check = CheckConfig(layer=5) if num_checks else None
    return SpeculativeConfig(
        draft=DraftConfig(layer=2),
        check=check,
        num_draft_tokens=num_drafts,
        num_checks=num_checks or 1,
        **fields,
    )


THREE_TIER = exit_plan(2, 2)


def test_a_three_tier_round_by_hand() -> None:
    rounds = RoundCounter(hand_recording()).count(THREE_TIER)
    # Round 1, window 6: [1] kept, 2 corrected; [3 4] kept, 5 the check's own: 5 columns, all right, so 5
    # tokens. Round 2, limit 3: the drafts 0 and 7 are kept, 8 the check's own: verify corrects the first of
    # 3: 1 token. Round 3, limit 2: one draft, kept, and 8 the check's own: 2 tokens.
    assert (rounds.rounds, rounds.tokens, rounds.per_answer.tolist(), rounds.cycles, rounds.unchecked) == (
        3,
        8,
        [3],
        4,
        0,
    )
    assert rounds.levels.sum(1).tolist() == [4, 4, 3] == rounds.levels[:, 1].tolist()
    assert (rounds.checks.sum(), sum_of(rounds.checks), rounds.verifies.sum(), sum_of(rounds.verifies)) == (
        4,
        6 + 3 + 2,
        3,
        5 + 3 + 2,
    )


def test_a_two_tier_round_by_hand() -> None:
    rounds = RoundCounter(hand_recording()).count(exit_plan(3))
    # 1 kept and 2 verify's own; 3 4 5 kept and 6 verify's own; 7 kept (limit 2) and 8 verify's own.
    assert (rounds.rounds, rounds.tokens) == (3, 8)
    assert (
        rounds.levels.sum(1).tolist() == [3, 3, 2, 2]
        and rounds.checks.sum() == 0
        and rounds.verifies.nonzero()[0].tolist() == [2, 4]
    )


def test_looked_up_rounds_by_hand() -> None:
    draft = DraftConfig(kind="ngram", ngram=SIZES)
    rounds = RoundCounter(hand_recording()).count(
        SpeculativeConfig(draft=draft, num_draft_tokens=3, num_checks=1)
    )
    # Nothing is found for 1 and 2; then 3 4, and 5 verify's own in place of 9; 6, and 7 verify's own; 8.
    assert (rounds.rounds, rounds.tokens, rounds.looked_up.tolist()) == (
        5,
        8,
        [0, 0, 1, 0, 1],
    ) and not rounds.levels.any()
    checked = SpeculativeConfig(draft=draft, check=CheckConfig(layer=5), num_draft_tokens=3, num_checks=1)
    rounds = RoundCounter(hand_recording()).count(checked)
    # The same, but for 6, which the check overrules: it says 0, which is wrong. 6 is verify's own then, and 7
    # comes alone.
    assert (rounds.rounds, rounds.unchecked, rounds.checks.tolist(), rounds.verifies.tolist()) == (
        6,
        4,
        [0, 0, 1, 0, 1],
        [0, 1, 0, 1, 0],
    )
    cost = round_costs(checked, rounds, [1], constant_costs(), 9)[1]
    assert cost.ms == pytest.approx(0.25 + (4 * 8 + 2 * (4 + 8)) / 6) and cost.layers == pytest.approx(9)


def test_speed_is_tokens_over_prompts_and_rounds() -> None:
    predictor = predictor_of(hand_recording())
    plain = predictor.predict(None)
    assert (
        plain.tokens_per_s == pytest.approx(8 / (0.1 + 8 * 10.5e-3))
        and plain.ratio_to_plain == 1.0 == plain.tokens_per_round == plain.tokens_per_full_pass
    )
    three = predictor.predict(THREE_TIER)
    seconds = 0.1 + (8 * 2 + 3 * 1 + 4 * 4 + 3 * (8 + 0.5)) * 1e-3
    assert three.tokens_per_s == pytest.approx(8 / seconds)
    assert three.ratio_to_plain == pytest.approx((0.1 + 8 * 10.5e-3) / seconds)
    assert three.tokens_per_full_pass == pytest.approx(8 * 9 / (11 * 2 + 4 * 3 + 3 * 4))
    assert three.round_ms == pytest.approx(
        1e3 * (seconds - 0.1) / 3
    ) and three.verify_positions == pytest.approx(10 / 3)
    sure = predictor.predict(exit_plan(3, draft_confidence=0.5))
    assert sure.round_ms == pytest.approx(0.5 + (8 * 2.125 + 2 * 1) / 3 + 8), (
        "8 draft passes, each followed by probabilities, and 2 fills"
    )


def test_a_batch_runs_what_any_of_its_rows_needs() -> None:
    """Of one row: by each width as often as it was counted. Of several: of all sums of independent rows."""
    assert _shares_of_batch(np.array([0, 0.25, 0, 0.25]), 1).tolist() == [0.5, 0.25, 0.0, 0.25]
    two = _shares_of_batch(np.array([0, 0.25, 0, 0.25]), 2)
    assert two == pytest.approx([0.25, 0.25, 0.0625, 0.25, 0.125, 0.0, 0.0625])
    assert _shares_of_batch(np.array([0, 0, 1.0]), 3).nonzero()[0].tolist() == [6]
    many = _shares_of_batch(np.array([0, 0.25, 0, 0.25]), 20)
    assert (
        many[0] == pytest.approx(0.5**20)
        and many.sum() == pytest.approx(1.0)
        and many @ np.arange(len(many)) == pytest.approx(20 * 1.0)
    )
    assert set(many.nonzero()[0]) == {0, 20, 21} or set(many.nonzero()[0]) == {0, 20}


def test_a_check_is_left_out_only_where_no_row_has_drafts() -> None:
    plan = SpeculativeConfig(
        draft=DraftConfig(kind="ngram", ngram=SIZES),
        check=CheckConfig(layer=5),
        num_draft_tokens=3,
        num_checks=1,
    )
    rounds = RoundCounter(hand_recording()).count(plan)
    cost = round_costs(plan, rounds, [2], constant_costs(), 9)[2]
    none = (4 / 6) ** 2
    assert cost.ms == pytest.approx(0.25 + none * 8 + (1 - none) * (4 + 8)) and cost.layers == pytest.approx(
        9
    )


def test_a_pass_that_was_not_measured_is_refused() -> None:
    costs = constant_costs()
    costs.verify[2] = Curve((1, 3), (8.0, 8.0))
    plan = exit_plan(3)
    with pytest.raises(ValueError, match=r"a pass over 4 positions was not measured; measured were up to 3"):
        round_costs(plan, RoundCounter(hand_recording()).count(plan), [1], costs, 9)


def test_rows_take_answers_in_order_as_they_become_free() -> None:
    # Rows: A 3 then C 1; B 1 then D 5.
    assert _occupancy(np.array([3, 1, 1, 5]), 2).tolist() == [2, 2, 2, 1, 1, 1, 1]
    assert _occupancy(np.array([2, 3]), 8).tolist() == [2, 2, 1]
    assert _occupancy(np.array([2, 3]), 1).tolist() == [1] * 5


def test_tasks_are_run_one_after_the_other() -> None:
    answers = [Answer([0], [1] * length, length, task) for length, task in ((2, "a"), (3, "b"), (1, "a"))]
    recording = Recording(answers, {}, {})
    predictor = Predictor(recording, constant_costs(), Calibration(4, None, 10.0, 0.0, 0.0), 4, num_layers=9)
    assert predictor.predict(None).tokens_per_full_pass == pytest.approx(6 / (2 + 3))


def test_what_a_step_takes_beside_its_pass_is_told_from_plain_steps() -> None:
    steps = [
        Step(0.050, 20, 0),
        Step(0.030, 5, 2),
        *[Step(0.012, 0, 2)] * 3,
        Step(0.099, 0, 2),
        Step(0.011, 0, 1),
    ]
    found = calibrate(steps, constant_costs(), 2)
    assert (
        found.plain_step_ms == pytest.approx(12.0)
        and found.plain_parts_ms == 10.0
        and found.host_ms == pytest.approx(2.0)
    )
    assert found.prefill_s == pytest.approx(0.050 + 0.030 - 0.012)
    assert calibrate(steps[:2], constant_costs(), 2) == Calibration(2, None, 10.0, 0.0, pytest.approx(0.070))


def test_the_best_of_each_kind_are_run() -> None:
    plans = [exit_plan(num, checks) for num in (1, 2, 3) for checks in (0, 1, 2)]
    found, num_predicted = search(predictor_of(hand_recording()), plans)
    speeds = [prediction.tokens_per_s for prediction in found]
    assert speeds == sorted(speeds, reverse=True) and len(
        {prediction.plan for prediction in found}
    ) == num_predicted > len(plans)
    assert {prediction.plan for prediction in found} > set(plans), "confidences are tried around the best"
    for top in (1, 2):
        chosen = best_of_each_kind(found, top)
        kinds = [prediction.as_dict()["kind"] for prediction in chosen]
        assert sorted(kinds) == sorted(["exit_two_tier", "exit_three_tier"] * top)
        three = [
            prediction
            for prediction in found
            if prediction.plan is not None and prediction.plan.check is not None
        ]
        assert [prediction for prediction in chosen if prediction.as_dict()["check_layer"] == 5] == three[
            :top
        ]
    assert len(best_by_layers(found, 3)) == 6
