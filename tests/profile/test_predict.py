"""Predictions: arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec.config import CheckConfig, DraftConfig, NgramConfig, SpeculativeConfig
from hispec.errors import ConfigError
from hispec.latency.drift import Drift
from hispec.latency.model import LatencyModel, Linear
from hispec.measure.latency import measure_latency
from hispec.profile.candidates import Candidates
from hispec.profile.options import ProfileOptions
from hispec.profile.plans import all_plans, lookups_of, ngram_sizes
from hispec.profile.predict import (
    Calibration,
    Prediction,
    Predictor,
    best_by_layers,
    best_of_each_kind,
    calibrate,
    search,
)
from hispec.profile.record_answers import look_up
from hispec.profile.recording import NOTHING, Answer, LookedUp, Recording, flat, said_of
from hispec.profile.replay import RoundCounter, sum_of
from hispec.profile.round_cost import PassTimes, _shares_of_batch, round_costs
from hispec.profile.timed_runs import Step
from tests.helpers.adapters import loaded, make_exits

LAYERS = (2, 5)
STAGES = {"draft": 2.0, "fill": 1.0, "shadow": 3.0, "verify": 8.0}
SIZES = NgramConfig()


def constant_costs() -> LatencyModel:
    """A draft pass takes 2 ms, a fill 1, a check 4, verify 8, a plain step 10, whatever the width; a lookup
    0.25, the logits of a wide pass 3."""
    ms = {"plain": 10.0, "lookup": 0.25}
    ms |= {f"check/{lo}-{hi}": 4.0 for lo in (0, *LAYERS) for hi in LAYERS if hi > lo}
    ms |= {f"{stage}/{lo}": cost for stage, cost in STAGES.items() for lo in LAYERS}
    ms |= {"verify/0": 8.0}
    return LatencyModel({name: Linear(constant_ms=cost) for name, cost in ms.items()})


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
        PassTimes(constant_costs(), 30),
        Calibration(batch_size, 10.0, 9.5, host_ms, prefill_s, prefill_tokens=40.0),
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
    cost = round_costs(checked, rounds, [1], PassTimes(constant_costs(), 30), 9)[1]
    assert cost.ms == pytest.approx(0.25 + (4 * 8 + 2 * (4 + 8)) / 6) and cost.layers == pytest.approx(9)


def test_the_first_of_several_passes_over_the_first_layers_takes_more() -> None:
    """Of a drafting exit in each cycle; of checks of what was looked up once a round that has one."""
    stages = dict(constant_costs().stages)
    cold = {f"cold/{layer}": Linear(constant_ms=0.5 + layer) for layer in LAYERS}
    warm, times = (PassTimes(LatencyModel(each), 30) for each in (stages, stages | cold))

    def more(plan: SpeculativeConfig, rows: int = 1) -> float:
        rounds = RoundCounter(hand_recording()).count(plan)
        ms = [round_costs(plan, rounds, [rows], each, 9)[rows].ms for each in (warm, times)]
        return ms[1] - ms[0]

    assert more(THREE_TIER) == pytest.approx(2.5 * 4 / 3), "four cycles in three rounds"
    assert more(exit_plan(3)) == more(exit_plan(3), 4) == pytest.approx(2.5)
    looked_up = {"draft": DraftConfig(kind="ngram", ngram=SIZES), "num_draft_tokens": 3}
    assert more(SpeculativeConfig(**looked_up, num_checks=1)) == 0.0, "a verify of all layers comes alone"
    checked = SpeculativeConfig(**looked_up, check=CheckConfig(layer=5), num_checks=1)
    assert more(checked) == pytest.approx(5.5 * 2 / 6), "of six rounds four have nothing to check"
    assert more(checked, 2) == pytest.approx(5.5 * (1 - (4 / 6) ** 2))
    several = SpeculativeConfig(**looked_up, check=CheckConfig(layer=5), num_checks=2)
    assert more(several) == pytest.approx(5.5)


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
    assert sure.round_ms == pytest.approx(0.5 + (8 * 2 + 2 * 1) / 3 + 8), "8 draft passes, and 2 fills"
    tree = predictor.predict(exit_plan(2, num_branches=2))
    levels = RoundCounter(hand_recording()).count(exit_plan(2, num_branches=2)).levels
    first, second, last = (int(level.sum()) for level in levels)
    rounds = 8 / tree.tokens_per_round
    assert first == rounds and tree.round_ms == pytest.approx(
        0.5 + (first * 2 + second * (1 + 3) + last * 1) / rounds + 8
    ), "a level of several branches takes the layers of a fill and the logits of a wide pass"


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
    cost = round_costs(plan, rounds, [2], PassTimes(constant_costs(), 30), 9)[2]
    none = (4 / 6) ** 2
    assert cost.ms == pytest.approx(0.25 + none * 8 + (1 - none) * (4 + 8)) and cost.layers == pytest.approx(
        9
    )


def test_the_positions_of_a_pass_and_its_context_cost_what_the_latency_model_says() -> None:
    """Of one row by each width as often as it was counted, of two by the sums of both; a pass bends at
    its own tokens, not at their average."""
    stages = dict(constant_costs().stages)
    stages["verify/2"] = cost = Linear(constant_ms=8.0, token_ms=1.0, context_ms=0.5, knots=((3.0, 0.5),))
    plan = exit_plan(3)
    rounds = RoundCounter(hand_recording()).count(plan)
    assert rounds.verifies.tolist() == [0, 0, 1, 0, 2]
    found = round_costs(plan, rounds, [1, 2], PassTimes(LatencyModel(stages), 30), 9)
    drafts = (8 * 2 + 2 * 1) / 3
    assert found[1].ms == pytest.approx(drafts + (cost(1, 2, 30) + 2 * cost(1, 4, 30)) / 3)
    of_two = (cost(2, 4, 60) + 4 * cost(2, 6, 60) + 4 * cost(2, 8, 60)) / 9
    of_drafts = 2 * (2 + (1 - (1 / 3) ** 2)) + 1 * (1 - (1 / 3) ** 2)
    assert found[2].ms == pytest.approx(of_drafts + of_two)


def test_a_stage_that_was_not_measured_is_refused() -> None:
    stages = dict(constant_costs().stages)
    del stages["verify/2"]
    plan = exit_plan(3)
    with pytest.raises(ConfigError, match=r"no stage 'verify/2', only check/0-2, .*; measure again"):
        round_costs(
            plan, RoundCounter(hand_recording()).count(plan), [1], PassTimes(LatencyModel(stages), 30), 9
        )


def test_tasks_are_run_one_after_the_other() -> None:
    answers = [Answer([0], [1] * length, length, task) for length, task in ((2, "a"), (3, "b"), (1, "a"))]
    recording = Recording(answers, {}, {})
    predictor = Predictor(
        recording, PassTimes(constant_costs(), 30), Calibration(4, None, 10.0, 0.0, 0.0), 4, 9
    )
    assert predictor.predict(None).tokens_per_full_pass == pytest.approx(6 / (2 + 3))


def test_answers_that_are_served_together_may_be_others_than_those_of_a_task() -> None:
    answers = [Answer([0], [1] * length, length, task) for length, task in ((2, "a"), (3, "b"), (1, "a"))]
    predictor = Predictor(
        Recording(answers, {}, {}),
        PassTimes(constant_costs(), 30),
        Calibration(4, None, 10.0, 0.0, 0.0),
        4,
        9,
        groups=[np.array([0, 1]), np.array([2])],
    )
    assert predictor.predict(None).tokens_per_full_pass == pytest.approx(6 / (3 + 1))


@pytest.mark.parametrize("plan", [None, THREE_TIER, exit_plan(2)], ids=["plain", "three-tier", "two-tier"])
def test_answers_alone_add_up_to_all(plan: SpeculativeConfig | None) -> None:
    """Of the hand-made answer, which stands there twice, cut in the second place."""
    one = hand_recording()
    answers = [*one.answers, Answer([0], list(range(1, 6)), 5, "all")]
    said = {
        layer: said_of(np.append(each.tokens, [*each.tokens[:5], NOTHING]))
        for layer, each in one.exits.items()
    }
    predictor = predictor_of(Recording(answers, said, {}), host_ms=0.0, prefill_s=0.0)
    (first, second), found = predictor.by_answer(plan), predictor.predict(plan)
    (alone,) = predictor_of(one).by_answer(plan)
    assert first == alone and (first.tokens, second.tokens) == (8, 5)
    assert found.tokens_per_round == pytest.approx(13 / (first.rounds + second.rounds))
    assert found.tokens_per_full_pass == pytest.approx(13 * 9 / (first.layers + second.layers))
    assert found.tokens_per_s == pytest.approx(1e3 * 13 / (first.ms + second.ms))


def test_what_a_step_takes_beside_its_pass_is_told_from_plain_steps() -> None:
    steps = [
        Step(0.050, 20, 0),
        Step(0.030, 5, 2),
        *[Step(0.012, 0, 2)] * 3,
        Step(0.099, 0, 2),
        Step(0.011, 0, 1),
    ]
    found = calibrate(steps, PassTimes(constant_costs(), 30), 2)
    assert (
        found.plain_step_ms == pytest.approx(12.0)
        and found.plain_parts_ms == 10.0
        and found.host_ms == pytest.approx(2.0)
    )
    assert found.prefill_s == pytest.approx(0.050 + 0.030 - 0.012)
    assert calibrate(steps[:2], PassTimes(constant_costs(), 30), 2) == Calibration(
        2, None, 10.0, 0.0, pytest.approx(0.070), prefill_tokens=12.5
    )


def test_what_the_host_adds_to_calls_is_told_from_calls_of_one_round_and_of_several() -> None:
    """Half a millisecond to one of a round, two to one of eight; their passes tell what they took."""
    by_stage, one, eight = (
        Step(0.012, 0, 1),
        Step(0.0095, 0, 1, 1, True, 0.009),
        Step(0.074, 0, 1, 8, True, 0.072),
    )
    found = calibrate([by_stage, one, eight] * 4, PassTimes(constant_costs(), 30), 1, 50.0, links=True)
    assert found.host_ms == pytest.approx(2.0) and found.token_ms == pytest.approx(1.5 / 7)
    assert found.call_ms == pytest.approx(0.5 - 1.5 / 7)
    slower = calibrate([one, eight], PassTimes(constant_costs(), 30), 1, 50.0, drift=Drift((1.0,), (2.0,)))
    assert slower.call_ms == pytest.approx(found.call_ms / 2) and slower.token_ms == pytest.approx(
        found.token_ms / 2
    )
    unmeasured = calibrate([Step(0.0105, 0, 1, 1, True)], PassTimes(constant_costs(), 30), 1, 50.0)
    assert (unmeasured.call_ms, unmeasured.token_ms) == (
        pytest.approx(0.5),
        0.0,
    ) and unmeasured.host_ms == 0.5
    prompt = calibrate(
        [one, eight, Step(0.0295, 20, 1, 1, True, 0.009)], PassTimes(constant_costs(), 30), 1, 50.0
    )
    assert prompt.prefill_s == pytest.approx(0.020)
    joins = Step(0.094, 20, 1, 8, True, 0.072)  # a prompt of 20 ms, and a call of eight rounds after it
    prompt = calibrate([one, eight, joins], PassTimes(constant_costs(), 30), 1, 50.0)
    assert prompt.prefill_s == pytest.approx(0.020)


def test_rounds_that_run_together_share_what_the_host_adds_to_a_call() -> None:
    """Eight plain ones of 10 ms: four within 50 ms, so two calls. Of the plan 3 of 13.33 ms: one call."""

    def predicted(plan: SpeculativeConfig | None, links: bool, batch_size: int = 1) -> Prediction:
        calibration = Calibration(
            1, None, 10.0, 0.5, 0.1, call_ms=0.3, token_ms=0.2, max_run_ms=50.0, links=links
        )
        recording = hand_recording()
        return Predictor(recording, PassTimes(constant_costs(), 30), calibration, batch_size, 9).predict(plan)

    for links in (False, True):
        plain = predicted(None, links)
        assert 8 / plain.tokens_per_s == pytest.approx(0.1 + 1e-3 * (8 * 10 + 2 * 0.3 + 8 * 0.2))
        assert plain.round_ms == pytest.approx(10 + 0.3 / 4 + 0.2)
    alone, together = (predicted(exit_plan(3), links) for links in (False, True))
    assert 8 / alone.tokens_per_s - 8 / together.tokens_per_s == pytest.approx(
        1e-3 * (3 * 0.5 - 0.3 - 8 * 0.2)
    )
    tree = exit_plan(2, num_branches=2)
    assert predicted(tree, True) == replace(
        predicted(tree, False), ratio_to_plain=predicted(tree, True).ratio_to_plain
    )


def test_a_machine_that_was_slower_meanwhile_is_no_work_of_the_engine() -> None:
    """Here by a half for the two tokens of plain steps, by an eighth from 12 on, and by 0.3 of the way from
    there for the five of a prompt beside a round, which are a pass of their own."""
    drift = Drift((2.0, 12.0), (1.5, 1.125))
    steps = [Step(0.050, 20, 0), Step(0.030, 5, 2), *[Step(0.012, 0, 2)] * 3]
    seconds = [1.125 * 0.050, 1.5 * 0.012 + 1.3875 * 0.018, *[1.5 * 0.012] * 3]
    slower = [replace(step, seconds=each) for each, step in zip(seconds, steps, strict=True)]
    found = calibrate(slower, PassTimes(constant_costs(), 30), 2, drift=drift)
    expected = calibrate(steps, PassTimes(constant_costs(), 30), 2)
    assert found.drift == drift and found.host_ms == pytest.approx(expected.host_ms)
    assert found.prefill_s == pytest.approx(expected.prefill_s)


def test_plans_are_predicted_at_the_speed_that_the_machine_had_while_they_ran() -> None:
    """Twice as slow at one token and as fast as ever at four: prompts take what they took, plain rounds twice
    as long, wide ones hardly longer."""
    steady, plan = predictor_of(hand_recording()), exit_plan(3)
    slower = steady.during(Drift((1.0, 4.0), (2.0, 1.0)))
    plain, before = slower.predict(None), steady.predict(None)
    assert plain.round_ms == pytest.approx(2.0 * before.round_ms)
    rounds = 8  # of one token each
    assert 8 / plain.tokens_per_s - 8 / before.tokens_per_s == pytest.approx(1e-3 * rounds * before.round_ms)
    assert slower.predict(plan).ratio_to_plain > steady.predict(plan).ratio_to_plain
    assert steady.predict(None) == before, "the other is a predictor of its own"


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
        three: list[Prediction] = []
        for each in found:
            is_new = all(replace(each, plan=None) != replace(other, plan=None) for other in three)
            if each.plan is not None and each.plan.check is not None and is_new:  # what does the same is one
                three.append(each)
        assert [prediction for prediction in chosen if prediction.as_dict()["check_layer"] == 5] == three[
            :top
        ]
    assert len(best_by_layers(found, 3)) == 6


def test_every_plan_within_the_limits_has_its_cost(
    tiny_path: Path, tiny_decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hispec.measure.latency._SAMPLES", 1)
    checkpoint = open_checkpoint(tiny_path)
    infos = [ExitInfo(layer=2), ExitInfo(layer=5, num_blocks=0)]
    exits = loaded(make_exits(tmp_path, checkpoint, infos), tiny_decoder, checkpoint)
    options = ProfileOptions(max_drafts=3, max_checks=4, max_window=8)
    by_model = SpeculativeConfig(draft={"kind": "model", "path": "itself"})
    plans = all_plans(options, Candidates([2, 5], exits), by_model)
    latency = measure_latency(
        tiny_decoder,
        [2, 5],
        exits,
        max_num_seqs=3,
        max_window=8,
        max_context=40,
        draft_model=tiny_decoder,
    )
    assert max(point.context_tokens / point.rows for point in latency.points) <= 40
    # Of the widest rounds that there can be: nothing is ever rejected.
    answers = [Answer([0], [1] * 40, 40, "all") for _ in range(4)]
    said = said_of(flat([[1] * 40] * 4))
    sizes, most = lookups_of(plans)
    assert most == 6 and set(ngram_sizes(None)) < set(sizes)
    looked_up = {each: look_up(each, answers, most, 3, tiny_decoder.device) for each in sizes}
    recording = Recording(answers, {2: said, 5: said}, {}, looked_up, said)
    calibration = Calibration(3, None, 1.0, 0.0, 0.0)
    predictions = Predictor(recording, PassTimes(latency.model(), 21), calibration, 3, 9).predict_all(plans)
    assert (
        len(predictions) == len(plans) and max(prediction.verify_positions for prediction in predictions) > 6
    )
    assert all(prediction.round_ms > 0 for prediction in predictions)
