"""Predictions: rounds against the engine, token for token, and arithmetic by hand."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ee_models.decoder import Decoder
from ee_models.exit_files import ExitInfo
from ee_models.exits import Exit
from ee_models.loader import open_checkpoint
from hispec.config import PLAIN, Plan
from hispec.errors import ConfigError, build
from hispec.profile.costs import Curve, StageCosts
from hispec.profile.options import ProfileOptions
from hispec.profile.predict import Calibration, Predictor, _occupancy, calibrate, count_rounds
from hispec.profile.recording import Answer, Recording, flat, record
from hispec.profile.run import best_of_each_kind
from hispec.profile.runs import Step
from hispec.sampling_params import SamplingParams
from tests.adapters import TINY_MLP, adapter_engine, loaded, make_exits, whole_trunk
from tests.support import make_engine, random_prompts, run

LAYERS = [1, 3, 6, 8]
PLANS = [
    Plan(1, None, 1),
    Plan(3, None, 4),
    Plan(8, None, 8),
    Plan(1, 3, 1, 1),
    Plan(3, 6, 2, 2),
    Plan(3, 8, 3, 4),
    Plan(6, 8, 1, 5),
    Plan(6, 8, 5, 1),
    Plan(1, 8, 2, 8),
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=30)


def flat_curve(ms: float) -> Curve:
    return Curve((1, 10_000), (ms, ms))


def constant_costs(layers: list[int]) -> StageCosts:
    """A draft pass takes 2 ms, a fill 1, a check 4, verify 8, a plain step 10, whatever the width."""
    pairs = {(draft, check): flat_curve(4.0) for draft in layers for check in layers if check > draft}
    draft, fill, verify = ({layer: flat_curve(ms) for layer in layers} for ms in (2.0, 1.0, 8.0))
    return StageCosts(30, draft, fill, pairs, verify, flat_curve(10.0))


def predictor_of(recording: Recording, batch_size: int = 1, host_ms: float = 0.5, prefill_s: float = 0.1) -> Predictor:
    costs = constant_costs(sorted(recording.said))
    return Predictor(recording, costs, Calibration(batch_size, 10.0, 9.5, host_ms, prefill_s), batch_size, num_layers=9)


def check_against_engine(decoder: Decoder, exits: list[Exit], layers: list[int], plans: list[Plan], eos: list[int]) -> None:
    """Rounds and tokens are the engine's, exactly; plans take turns in running alone and in a batch of three."""
    prompts = random_prompts([5, 9, 40, 1, 22])
    outputs = run(make_engine(decoder, eos=eos), prompts, PARAMS)
    recording = record(decoder, layers, exits, [Answer(prompt, output, 30, "all") for prompt, output in zip(prompts, outputs, strict=True)])
    predictor = predictor_of(recording)
    for number, plan in enumerate(plans):
        expected, batch_size = predictor.rounds(plan), 1 + 2 * (number % 2)
        engine = make_engine(decoder, plan, eos=eos, max_num_seqs=batch_size) if not exits else adapter_engine(decoder, plan, exits, max_num_seqs=batch_size)
        assert run(engine, prompts, PARAMS) == outputs
        stats = engine.stats()
        assert (stats["rounds"], stats["tokens"]) == (expected.rounds, expected.tokens), plan
        assert predictor.predict(plan).tokens_per_round == stats["tokens"] / stats["rounds"]
        assert expected.per_answer.sum() == expected.rounds


def test_rounds_are_the_engines(tiny_decoder: Decoder) -> None:
    check_against_engine(tiny_decoder, [], LAYERS, PLANS, eos=[])


def test_rounds_are_the_engines_when_answers_end_early(tiny_decoder: Decoder) -> None:
    prompts = random_prompts([5, 9, 40, 1, 22])
    outputs = run(make_engine(tiny_decoder), prompts, PARAMS)
    eos = [outputs[0][6], outputs[2][17]]
    lengths = [len(output) for output in run(make_engine(tiny_decoder, eos=eos), prompts, PARAMS)]
    assert min(lengths) < 10 and max(lengths) == 30, "EOS must end some answers, and not all"
    check_against_engine(tiny_decoder, [], LAYERS, PLANS[2:7], eos=eos)


def test_rounds_are_the_engines_with_trained_exits(tiny_path: Path, tiny_decoder: Decoder, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_path)
    infos = [ExitInfo(layer=1, num_blocks=5, intermediate_size=TINY_MLP), ExitInfo(layer=4, num_blocks=4, intermediate_size=TINY_MLP), whole_trunk(7)]
    exits = loaded(make_exits(tmp_path, checkpoint, infos, from_trunk=True), tiny_decoder, checkpoint)
    for plan in (Plan(4, None, 6), Plan(1, 4, 2, 3), Plan(4, 7, 2, 2)):
        wanted: list[Exit] = [exit_ for exit_ in exits if exit_.layer in (plan.draft_layer, plan.check_layer)]
        check_against_engine(tiny_decoder, wanted, [exit_.layer for exit_ in wanted], [plan], eos=[])


def test_passes_are_the_engines_where_nothing_is_off_the_true_context(tiny_decoder: Decoder) -> None:
    """Two tiers always, and three if the check is never wrong: layers run, beside those of the prompts, are counted exactly."""
    prompts = random_prompts([4, 4, 4])
    outputs = run(make_engine(tiny_decoder), prompts, PARAMS)
    answers = [Answer(prompt, output, 30, "all") for prompt, output in zip(prompts, outputs, strict=True)]
    recording = record(tiny_decoder, [3, 6, 9], [], answers)
    predictor = predictor_of(recording)
    for plan in (Plan(3, None, 3), Plan(6, 9, 2, 3)):
        engine = make_engine(tiny_decoder, plan, max_num_seqs=1, max_prefill_tokens=3)
        run(engine, prompts, PARAMS)
        stats = engine.stats()
        of_rounds = stats["layer_passes"] - 9 * len(prompts)
        assert predictor.predict(plan).tokens_per_full_pass == pytest.approx(stats["tokens"] * 9 / of_rounds)


def hand_recording() -> Recording:
    """Truth 1 .. 8. The draft exit is wrong at places 1 and 5, the check exit at place 5, with the same wrong token."""
    draft, check = [1, 0, 3, 4, 5, 0, 7, 8], [1, 2, 3, 4, 5, 0, 7, 8]
    said = {2: flat([draft]), 5: flat([check])}
    return Recording([Answer([0], list(range(1, 9)), 8, "all")], said, said)


def test_a_three_tier_round_by_hand() -> None:
    recording = hand_recording()
    same, right = recording.same(recording.said[2], recording.said[5]), recording.right(recording.said[5])
    rounds = count_rounds(recording, Plan(2, 5, 2, 2), same, right)
    # Round 1, window 6: [1] kept, 2 corrected; [3 4] kept, 5 the check's own: 5 columns, all right, so 5 tokens.
    # Round 2, limit 3: the drafts 0 and 7 are kept, 8 the check's own: verify corrects the first of 3: 1 token.
    # Round 3, limit 2: one draft, kept, and 8 the check's own: 2 tokens.
    assert (rounds.rounds, rounds.tokens, rounds.per_answer.tolist()) == (3, 8, [3])
    assert (rounds.draft_passes, rounds.fill_passes) == (4 + 2 + 2, 2 + 1 + 0)
    assert (rounds.checks, rounds.check_positions, rounds.verify_positions) == (4, 6 + 3 + 2, 5 + 3 + 2)


def test_a_two_tier_round_by_hand() -> None:
    recording = hand_recording()
    right = recording.right(recording.said[2])
    rounds = count_rounds(recording, Plan(2, None, 3), right, right)
    # 1 kept and 2 verify's own; 3 4 5 kept and 6 verify's own; 7 kept (limit 2) and 8 verify's own.
    assert (rounds.rounds, rounds.tokens) == (3, 8)
    assert (rounds.draft_passes, rounds.fill_passes, rounds.checks, rounds.verify_positions) == (3 + 3 + 2, 2, 0, 4 + 4 + 2)


def test_speed_is_tokens_over_prompts_and_rounds() -> None:
    predictor = predictor_of(hand_recording())
    plain = predictor.predict(PLAIN)
    assert plain.tokens_per_s == pytest.approx(8 / (0.1 + 8 * 10.5e-3)) and plain.ratio_to_plain == 1.0 and plain.tokens_per_round == 1.0
    three = predictor.predict(Plan(2, 5, 2, 2))
    seconds = 0.1 + (8 * 2 + 3 * 1 + 4 * 4 + 3 * (8 + 0.5)) * 1e-3
    assert three.tokens_per_s == pytest.approx(8 / seconds)
    assert three.ratio_to_plain == pytest.approx((0.1 + 8 * 10.5e-3) / seconds)
    assert three.tokens_per_full_pass == pytest.approx(8 * 9 / (11 * 2 + 4 * 3 + 3 * 4))
    assert three.round_ms == pytest.approx(1e3 * (seconds - 0.1) / 3) and three.verify_positions == pytest.approx(10 / 3)


def test_rows_take_answers_in_order_as_they_become_free() -> None:
    # Rows: A 3 then C 1; B 1 then D 5.
    assert _occupancy(np.array([3, 1, 1, 5]), 2).tolist() == [2, 2, 2, 1, 1, 1, 1]
    assert _occupancy(np.array([2, 3]), 8).tolist() == [2, 2, 1]
    assert _occupancy(np.array([2, 3]), 1).tolist() == [1] * 5


def test_what_a_step_takes_beside_its_pass_is_told_from_plain_steps() -> None:
    steps = [Step(0.050, 20, 0), Step(0.030, 5, 2), *[Step(0.012, 0, 2)] * 3, Step(0.099, 0, 2), Step(0.011, 0, 1)]
    found = calibrate(steps, constant_costs([2]), 2)
    assert found.plain_step_ms == pytest.approx(12.0) and found.plain_parts_ms == 10.0 and found.host_ms == pytest.approx(2.0)
    assert found.prefill_s == pytest.approx(0.050 + 0.030 - 0.012)
    assert calibrate(steps[:2], constant_costs([2]), 2) == Calibration(2, None, 10.0, 0.0, pytest.approx(0.070))


def test_every_plan_within_the_limits_is_looked_at_once() -> None:
    options = build(ProfileOptions, {"max_drafts": 3, "max_checks": 4, "max_window": 8})
    plans = list(options.plans([6, 2]))
    assert len(plans) == len(set(plans)) and max(plan.window for plan in plans) == 8
    assert {plan for plan in plans if plan.check_layer is None} == {Plan(layer, None, k) for layer in (2, 6) for k in (1, 2, 3)}
    assert {plan for plan in plans if plan.check_layer} == {Plan(2, 6, k, r) for k in (1, 2, 3) for r in (1, 2, 3, 4) if r * (k + 1) <= 8}
    with pytest.raises(ConfigError, match=r"max_drafts=8 takes 9 positions.*max_window=8; lower max_drafts to 7"):
        build(ProfileOptions, {"max_window": 8})


def test_the_best_of_each_kind_are_run() -> None:
    predictor = predictor_of(hand_recording())
    predictions = predictor.predict_all(ProfileOptions().plans([2, 5]))
    speeds = [prediction.tokens_per_s for prediction in predictions]
    assert speeds == sorted(speeds, reverse=True)
    chosen = [prediction.plan for prediction in best_of_each_kind(predictions, 2)]
    assert [plan.check_layer for plan in chosen] == [None, None, 5, 5]
    assert chosen[2] == next(prediction.plan for prediction in predictions if prediction.plan.check_layer == 5)
