"""Rounds of plain decoding that run together: what one by one gives, in tokens, bits and counts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ee_models import fused_kernel
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec import LLM
from hispec.config import EngineConfig, SchedulingConfig
from hispec.decoding.stages import Stages
from hispec.engine import Engine
from hispec.runner.round_runner import _MOST_TOGETHER
from hispec.sampling_params import SamplingParams
from tests.helpers.runs import LONG, NUMBERS, PROMPTS, but, lengths_of_steps, one_by_one, spied, together
from tests.helpers.support import GREEDY, make_engine, random_prompts, run, threads
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint

COUNTS = ("rounds", "tokens", "committed", "verify_undrafted", "accept_length_histogram", "layer_passes")


@pytest.fixture(scope="module", params=NUMBERS)
def decoder(request: pytest.FixtureRequest, tiny_path: Path) -> Decoder:
    options = NUMBERS[request.param]
    return Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"), **options)


GREEDY_ROWS = [but(GREEDY, max_tokens=number) for number in (24, 23, 5, 1, 17, 40)]
ROWS = {
    "greedy": GREEDY_ROWS,
    "sampled": [but(each, temperature=0.9, seed=number) for number, each in enumerate(GREEDY_ROWS)],
    "mixed": [but(each, temperature=0.7 * (at % 2), seed=at) for at, each in enumerate(GREEDY_ROWS)],
    "no speculation wanted": [but(each, speculative=False) for each in GREEDY_ROWS],
}


SIZES: list[dict[str, int]] = [{}, {"max_num_seqs": 2, "block_size": 4}, {"num_kv_blocks": 14}]


@sweep("rows, sizes", itertools.product(ROWS, SIZES), 2, ids=str)
def test_outputs_and_counts_are_those_of_single_rounds(
    decoder: Decoder, rows: str, sizes: dict[str, int]
) -> None:
    single, several = one_by_one(decoder, **sizes), together(decoder, **sizes)
    assert run(several, PROMPTS, ROWS[rows]) == run(single, PROMPTS, ROWS[rows])
    before, after = single.stats(), several.stats()
    assert after["steps"] < before["steps"], "or nothing ran together"
    if "num_kv_blocks" not in sizes:  # when blocks run out hangs on who has how many
        assert {name: after[name] for name in COUNTS} == {name: before[name] for name in COUNTS}


def test_all_end_with_the_first(tiny_decoder: Decoder) -> None:
    """So no pass is computed for tokens beyond an end: positions are those of single rounds."""
    outputs = run(one_by_one(tiny_decoder), PROMPTS)
    stop = outputs[0][9]
    params = but(GREEDY, stop_token_ids=[stop])
    single, several = one_by_one(tiny_decoder), together(tiny_decoder)
    cut = run(single, PROMPTS, params)
    assert run(several, PROMPTS, params) == cut and cut != outputs
    assert several.stats()["layer_positions"] == single.stats()["layer_positions"]
    assert several.stats()["steps"] < single.stats()["steps"]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_bits_of_keys_and_values_are_those_of_single_rounds(tiny_path: Path, num_threads: int) -> None:
    with threads(num_threads):
        decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"))
        found = []
        for max_run_ms in (0.0, LONG):
            engine = make_engine(decoder, max_run_ms=max_run_ms, enable_prefix_caching=False)
            run(engine, PROMPTS[4:5], but(GREEDY, max_tokens=64))
            found.append(engine._plans.runtime.kv.data[:, :, : 70 + 63].clone())
    assert torch.equal(*found) and bool(found[0].any())


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_passes_of_which_threads_have_tokens_of_their_own_change_no_output(
    tmp_path: Path, quantization: str | None
) -> None:
    """In one call, over more rows than such passes take tokens. A few such passes of a few layers, since
    threads wait for each other where other tests have their cores."""
    num_rows = 2 * fused_kernel._OWN_TOKENS + 3
    prompts, path = random_prompts((9,) * num_rows), tiny_checkpoint(tmp_path / "model", num_layers=3)
    with threads(2):
        decoder = Decoder.load(
            open_checkpoint(path), torch.float32, torch.device("cpu"), quantization=quantization
        )
        found = []
        for size in (num_rows, 16):
            engine = together(decoder, max_num_seqs=size, num_kv_blocks=512, max_prefill_tokens=2048)
            with spied(Stages, "run_linked") as calls:
                found.append(run(engine, prompts, but(GREEDY, max_tokens=4, ignore_eos=True)))
            assert calls
    assert found[0] == found[1]


def test_passes_in_one_call_give_what_one_by_one_gives(tiny_decoder: Decoder) -> None:
    """Of plain decoding, the compiled run and its twin."""
    params = but(GREEDY, stop_token_ids=[run(one_by_one(tiny_decoder), PROMPTS)[3][13]])
    compiled, twin = together(tiny_decoder), together(tiny_decoder)
    with spied(Stages, "run_linked") as calls:
        outputs = run(compiled, PROMPTS, params)
    assert calls
    with patch.object(Stages, "can_link", lambda *_: False):
        assert run(twin, PROMPTS, params) == outputs
    for name in (*COUNTS, "steps", "layer_positions"):
        assert twin.stats()[name] == compiled.stats()[name], name


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_row_ends_as_it_would_alone(tiny_decoder: Decoder, temperature: float) -> None:
    """At every offset within a run: by a stop token, and by its room; whose tokens they are, too."""
    params = but(GREEDY, max_tokens=30, temperature=temperature, seed=3, ignore_eos=True, tiers=True)
    whole = run(one_by_one(tiny_decoder), PROMPTS, params)
    first = [row.index(token) + 1 for row in whole for token in row[4:22:3]]
    stops = [token for row in whole for token in row[4:22:3]]
    for number, (token, length) in enumerate(zip(stops, first, strict=True)):
        row = number // 6
        mixed = [but(params, seed=3 + at) for at in range(len(PROMPTS))]
        mixed[row] = but(params, stop_token_ids=[token])
        assert run(together(tiny_decoder), PROMPTS, mixed)[row] == whole[row][:length]
        mixed[row] = but(params, max_tokens=length)
        assert run(together(tiny_decoder), PROMPTS, mixed)[row] == whole[row][:length]


def test_a_choice_of_the_controller_is_not_run_past(tiny_decoder: Decoder) -> None:
    engine = together(tiny_decoder)
    params = but(GREEDY, max_tokens=60, ignore_eos=True)
    assert max(lengths_of_steps(engine, params)) == _MOST_TOGETHER
    engine._recorder.control.rounds_left = 3
    assert max(lengths_of_steps(engine, params)) == 3


@pytest.mark.parametrize("policy", ["mlfq", "laps"])
def test_the_policy_reviews_as_often_as_ever(tiny_decoder: Decoder, policy: str) -> None:
    """While others wait, no step has more rounds than are left until it looks who runs."""
    scheduling = SchedulingConfig(policy=policy, review_rounds=3)
    config = EngineConfig(max_num_seqs=2, max_model_len=256, num_kv_blocks=256, max_run_ms=LONG)
    engine = Engine(tiny_decoder, config, scheduling=scheduling)
    params = but(GREEDY, max_tokens=40, ignore_eos=True)
    for prompt in PROMPTS[:4]:
        engine.add_request(prompt, params)
    longest = {True: 0, False: 0}
    while engine.has_unfinished():
        deltas = engine.step()
        others_wait = bool(engine._scheduler.waiting)  # and did, when the step was scheduled
        for delta in deltas:
            longest[others_wait] = max(longest[others_wait], len(delta.token_ids))
    assert longest == {True: 3, False: _MOST_TOGETHER}


def test_what_ends_by_its_text_is_computed_no_further(tiny_path: Path) -> None:
    """A stop string: as many rounds as tokens."""
    found = {}
    for max_run_ms in (0.0, LONG):
        with LLM(str(tiny_path), max_model_len=128, num_kv_blocks=64, max_run_ms=max_run_ms) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
            (whole,) = llm.generate(["one"], params, use_tqdm=False)
            stop = whole.outputs[0].text[9:11]
            llm.reset_stats()
            (cut,) = llm.generate(["one"], but(params, stop=[stop]), use_tqdm=False)
            stats = llm.stats()
            found[max_run_ms] = cut.outputs[0].token_ids, {name: stats[name] for name in (*COUNTS, "steps")}
            assert cut.outputs[0].finish_reason == "stop" and stats["rounds"] == len(cut.outputs[0].token_ids)
    assert found[0.0] == found[LONG]


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 40, "stop_token_ids": [3]},
        {"logit_bias": {5: 1.0}},
    ],
    ids=str,
)
def test_what_is_asked_between_two_rounds_keeps_them_apart(
    tiny_decoder: Decoder, asked: dict[str, Any]
) -> None:
    params = but(GREEDY, max_tokens=40, ignore_eos=True)
    assert max(lengths_of_steps(together(tiny_decoder), params)) == _MOST_TOGETHER
    assert set(lengths_of_steps(together(tiny_decoder), but(params, **asked))) == {1}
    assert set(lengths_of_steps(one_by_one(tiny_decoder), params)) == {1}


def test_a_prompt_that_is_computed_in_pieces_waits_for_one_round_only(tiny_decoder: Decoder) -> None:
    engine = together(tiny_decoder, max_prefill_tokens=8)
    engine.add_request(PROMPTS[0], but(GREEDY, max_tokens=60), "first")
    for _ in range(3):
        engine.step()
    engine.add_request(PROMPTS[4], GREEDY, "second")  # 70 tokens
    for _ in range(8):
        (delta,) = engine.step()
        assert (delta.request_id, len(delta.token_ids)) == ("first", 1)
    while engine.has_unfinished():
        engine.step()


def test_a_run_lasts_no_longer_than_asked(tiny_decoder: Decoder) -> None:
    """Rounds of before, of the same plan, tell how many that are."""
    engine = Engine(tiny_decoder, EngineConfig(max_num_seqs=1, max_model_len=256, max_run_ms=30.0))
    rounds, runtime = engine._rounds, engine._runtime
    choice = engine._loop._choice
    assert rounds.num_together(runtime, choice, ()) == 1, "nothing is known yet"
    for milliseconds, expected in ((100.0, 1), (30.0, 1), (14.9, 2), (7.4, 4), (0.1, _MOST_TOGETHER)):
        rounds._last_rounds[None, choice.plan] = milliseconds, 1
        assert rounds.num_together(runtime, choice, ()) == expected
    engine.add_request(PROMPTS[0], but(GREEDY, max_tokens=3))
    (request,) = engine._loop.requests.values()
    assert rounds.num_together(runtime, choice, [request]) == 3, "its room"
    for changed, expected in (({"stop": ["x"]}, 1), ({"logprobs": 0}, 0), ({"min_tokens": 1}, 0)):
        with patch.object(request, "params", but(request.params, **changed)):
            assert rounds.num_together(runtime, choice, [request]) == expected
    rounds._last_rounds[None, choice.plan] = 7.4, 2
    assert [rounds.num_together(runtime, choice, [request] * rows) for rows in (2, 4, 8)] == [3, 2, 1]
