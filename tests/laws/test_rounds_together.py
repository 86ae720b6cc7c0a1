"""Rounds that run together: what one by one gives, in tokens, bits and counts, for every plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ee_models import fused_kernel, fused_pass
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec import LLM
from hispec.config import EngineConfig, Plan, SchedulingConfig, SpeculativeConfig
from hispec.decoding.rounds_numba import Stage
from hispec.decoding.stages import Stages
from hispec.drafters.ngram import NgramDrafter
from hispec.engine import Engine
from hispec.engine.step_loop import StepLoop
from hispec.errors import build
from hispec.runner.launchers import PackedLauncher
from hispec.runner.round_runner import _MOST_TOGETHER
from hispec.sampling_params import SamplingParams
from hispec.stats import RoundCounts
from tests.helpers.adapter_engines import CASES
from tests.helpers.drafters import ALL, KINDS, drafter_engine
from tests.helpers.restless import flat_latency, make_restless
from tests.helpers.support import GREEDY, make_engine, random_prompts, run, run_through_interrupts, threads
from tests.helpers.sweeps import sweep

PROMPTS = random_prompts((1, 7, 9, 33, 70, 2))
LONG = 10_000.0  # milliseconds: as many together as can be, on any machine
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8", "kv_dtype": torch.bfloat16},
    "sdpa": {"attention": "sdpa"},
}
COUNTS = ("rounds", "tokens", "committed", "verify_undrafted", "accept_length_histogram", "layer_passes")


@pytest.fixture(scope="module", params=NUMBERS)
def decoder(request: pytest.FixtureRequest, tiny_path: Path) -> Decoder:
    options = NUMBERS[request.param]
    return Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"), **options)


def but(params: SamplingParams, **fields: Any) -> SamplingParams:
    return params.model_copy(update=fields)


def one_by_one(decoder: Decoder, **options: Any) -> Engine:
    return make_engine(decoder, max_run_ms=0.0, **options)


def together(decoder: Decoder, **options: Any) -> Engine:
    return make_engine(decoder, max_run_ms=LONG, **options)


GREEDY_ROWS = [but(GREEDY, max_tokens=number) for number in (24, 23, 5, 1, 17, 40)]
ROWS = {
    "greedy": GREEDY_ROWS,
    "sampled": [but(each, temperature=0.9, seed=number) for number, each in enumerate(GREEDY_ROWS)],
    "mixed": [but(each, temperature=0.7 * (at % 2), seed=at) for at, each in enumerate(GREEDY_ROWS)],
    "no speculation wanted": [but(each, speculative=False) for each in GREEDY_ROWS],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 2, "block_size": 4}, {"num_kv_blocks": 14}], ids=str)
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
    tiny_path: Path, quantization: str | None
) -> None:
    """In one call, over more rows than such passes take tokens."""
    num_rows = 2 * fused_kernel._OWN_TOKENS + 3
    prompts = random_prompts((9,) * num_rows)
    with threads(2):
        decoder = Decoder.load(
            open_checkpoint(tiny_path), torch.float32, torch.device("cpu"), quantization=quantization
        )
        found = []
        for size in (num_rows, 4):
            engine = together(decoder, max_num_seqs=size, num_kv_blocks=512, max_prefill_tokens=2048)
            with spied(Stages, "run_linked") as calls:
                found.append(run(engine, prompts, but(GREEDY, max_tokens=12, ignore_eos=True)))
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


def lengths_of_steps(engine: Engine, params: SamplingParams) -> Iterator[int]:
    """Tokens that each step gives the only request."""
    engine.add_request(PROMPTS[1], params)
    while engine.has_unfinished():
        yield sum(len(delta.token_ids) for delta in engine.step())


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
        rounds._last_rounds[choice.plan] = milliseconds, 1
        assert rounds.num_together(runtime, choice, ()) == expected
    engine.add_request(PROMPTS[0], but(GREEDY, max_tokens=3))
    (request,) = engine._loop.requests.values()
    assert rounds.num_together(runtime, choice, [request]) == 3, "its room"
    for changed, expected in (({"stop": ["x"]}, 1), ({"logprobs": 0}, 0), ({"min_tokens": 1}, 0)):
        with patch.object(request, "params", but(request.params, **changed)):
            assert rounds.num_together(runtime, choice, [request]) == expected
    rounds._last_rounds[choice.plan] = 7.4, 2
    assert [rounds.num_together(runtime, choice, [request] * rows) for rows in (2, 4, 8)] == [3, 2, 1]


# ---- plans ----

EVERY_COUNT = sorted({field.name for field in fields(RoundCounts)} | {"layer_passes", "layer_positions"})
COMPILED = [name for name, values in KINDS.items() if values["draft"].get("kind") != "model"]
Make = Callable[..., Engine]


@contextmanager
def spied(owner: type, name: str) -> Iterator[list[Any]]:
    """What the method has returned."""
    returned, original = [], getattr(owner, name)

    def spy(*inputs: Any) -> Any:
        returned.append(original(*inputs))
        return returned[-1]

    with patch.object(owner, name, spy):
        yield returned


def repetitive(length: int, seed: int) -> list[int]:
    """A prompt in which lookups find something."""
    period = random_prompts((5,), seed=seed)[0]
    return (period * length)[:length]


TEXTS = [*PROMPTS, *(repetitive(length, length) for length in (12, 40))]
MIXED = [
    but(GREEDY, max_tokens=number, tiers=True, speculative=at != 3)
    for at, number in enumerate((24, 23, 5, 9, 17, 40, 33, 60))
]


@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 2, "block_size": 4}, {"num_kv_blocks": 16}], ids=str)
@pytest.mark.parametrize("name", COMPILED)
def test_every_plan_does_in_one_call_what_it_does_round_by_round(
    tiny_decoder: Decoder, name: str, sizes: dict[str, int]
) -> None:
    single = drafter_engine(tiny_decoder, KINDS[name], max_run_ms=0.0, **sizes)
    several = drafter_engine(tiny_decoder, KINDS[name], **sizes)
    expected = run(single, TEXTS, MIXED)
    with spied(Stages, "run_linked") as calls:
        assert run(several, TEXTS, MIXED) == expected
    assert calls
    before, after = single.stats(), several.stats()
    assert after["steps"] < before["steps"], "or nothing ran together"
    if not sizes:  # else who shares a round with whom hangs on when rows end
        assert {count: after[count] for count in EVERY_COUNT} == {
            count: before[count] for count in EVERY_COUNT
        }


@pytest.mark.parametrize("name", ["ngram", "exit gated", "hybrid sure gated"])
def test_a_round_by_itself_is_one_call_too(tiny_decoder: Decoder, name: str) -> None:
    """Also while another's prompt is computed; but not where logits are asked for, or any row is sampled."""
    single, several = (
        drafter_engine(tiny_decoder, KINDS[name], max_run_ms=each, max_prefill_tokens=8)
        for each in (0.0, 1e-3)
    )
    expected = run(single, TEXTS, MIXED)
    with spied(Stages, "run_linked") as calls:
        assert run(several, TEXTS, MIXED) == expected
    before, after = single.stats(), several.stats()
    assert after["steps"] == before["steps"] and len(calls) > after["steps"] // 2
    for each in calls:
        assert sum(each[stage].passes for stage in (Stage.VERIFY, Stage.VERIFY_DRAFTS) if stage in each) == 1
    assert {count: after[count] for count in EVERY_COUNT} == {count: before[count] for count in EVERY_COUNT}
    for changed in ({"logprobs": 1}, {"temperature": 0.8, "seed": 1}):
        with spied(Stages, "run_linked") as calls:
            run(several, [TEXTS[1], TEXTS[4]], [GREEDY, but(GREEDY, max_tokens=60, **changed)])
        assert not calls


@pytest.mark.parametrize("name", COMPILED)
def test_a_row_alone_has_the_counts_the_tiers_and_the_kv_of_single_rounds(
    tiny_decoder: Decoder, name: str
) -> None:
    """All of it, whatever happens when: by tokens of every Delta, and bits of all that was computed."""
    for number, text in enumerate(TEXTS):
        params = but(GREEDY, max_tokens=50, tiers=True, stop_token_ids=[7 * number])
        found = []
        for max_run_ms in (0.0, LONG):
            engine = drafter_engine(
                tiny_decoder,
                KINDS[name],
                max_run_ms=max_run_ms,
                max_num_seqs=1,
                enable_prefix_caching=False,
            )
            engine.add_request(text, params)
            deltas = []
            while engine.has_unfinished():
                deltas += engine.step()
            (done,) = (delta for delta in deltas if delta.finish_reason is not None)
            tokens = [token for delta in deltas for token in delta.token_ids]
            tiers = [tier for delta in deltas for tier in delta.tiers or ()]
            stats = engine.stats()
            kv = engine._runtime.kv.data[:, :, : len(text) + len(tokens) - 1].clone()
            counts = {name: stats[name] for name in (*EVERY_COUNT, "adapter_passes")}
            assert done.metrics is not None
            found.append((tokens, tiers, counts, done.finish_reason, done.metrics.rounds, kv))
        assert found[0][:-1] == found[1][:-1]
        assert torch.equal(found[0][-1], found[1][-1]) and bool(found[0][-1].any())


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_trained_exits_do_so_too(engine_of: Make, name: str, plan: Plan, num_threads: int) -> None:
    """Those with blocks of their own, and with a vocabulary of their own."""
    with threads(num_threads):
        single, several = (engine_of(name, plan, max_run_ms=each) for each in (0.0, LONG))
        outputs = run(single, TEXTS, MIXED)
        with spied(Stages, "run_linked") as calls:
            assert run(several, TEXTS, MIXED) == outputs
        assert calls
    for count in (*EVERY_COUNT, "adapter_passes"):
        assert several.stats()[count] == single.stats()[count], count


@pytest.mark.parametrize("name", ["ngram", "ngram gated", "exit gated", "hybrid sure gated"])
def test_plans_run_together_in_other_number_formats(tiny_path: Path, name: str) -> None:
    for options in (NUMBERS["int8"], {"kv_dtype": torch.bfloat16}, {"quantization": "int4"}):
        decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"), **options)
        single = drafter_engine(decoder, KINDS[name], max_run_ms=0.0)
        several = drafter_engine(decoder, KINDS[name])
        assert run(several, TEXTS, MIXED) == run(single, TEXTS, MIXED)
        assert several.stats()["steps"] < single.stats()["steps"]


@sweep("name", ["ngram", "exit gated", "hybrid sure gated"], ("exit gated").__ne__)
def test_every_row_of_a_plan_ends_as_it_would_alone(tiny_decoder: Decoder, name: str) -> None:
    """By a stop token, and by its room, at any place of a round and of a run."""
    params = but(GREEDY, max_tokens=30, ignore_eos=True)
    whole = run(one_by_one(tiny_decoder), TEXTS, params)
    engine = drafter_engine(tiny_decoder, KINDS[name])
    for row, output in enumerate(whole):
        for token in output[2:24:4]:
            length = output.index(token) + 1
            mixed = [params] * len(TEXTS)
            for ended in ({"stop_token_ids": [token]}, {"max_tokens": length}):
                mixed[row] = but(params, **ended)
                found = run(engine, TEXTS, mixed)
                assert found[row] == output[:length]
                assert found[:row] + found[row + 1 :] == whole[:row] + whole[row + 1 :]


@pytest.mark.parametrize("name", ["tree", "model", "model gated"])
def test_what_is_not_compiled_runs_round_by_round(tiny_decoder: Decoder, name: str) -> None:
    engine = drafter_engine(tiny_decoder, ALL[name], tiny_decoder)
    with spied(Stages, "run_linked") as calls:
        run(engine, TEXTS, but(GREEDY, max_tokens=12))
    assert not calls


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.5, "seed": 3}, {"logprobs": 1}, {"repetition_penalty": 1.1}, {"min_tokens": 9}],
    ids=str,
)
def test_one_row_that_needs_the_host_keeps_the_rounds_of_a_plan_apart(
    tiny_decoder: Decoder, asked: dict[str, Any]
) -> None:
    params = [but(GREEDY, max_tokens=12)] * len(TEXTS)
    params[2] = but(GREEDY, max_tokens=40, ignore_eos=True, **asked)  # it ends last
    engine = drafter_engine(tiny_decoder, KINDS["ngram"])
    with spied(Stages, "run_linked") as calls:
        outputs = run(engine, TEXTS, params)
    assert not calls
    assert outputs == run(one_by_one(tiny_decoder), TEXTS, params)


def test_rows_without_room_for_drafts_run_with_the_others(tiny_decoder: Decoder) -> None:
    """Whose requests opted out, beside some that did not; and all of them, which is plain decoding."""
    for speculates in (lambda at: at % 2 == 0, lambda _: False):
        params = [but(GREEDY, speculative=speculates(at)) for at in range(len(TEXTS))]
        engine = drafter_engine(tiny_decoder, KINDS["hybrid"])
        assert run(engine, TEXTS, params) == run(one_by_one(tiny_decoder), TEXTS)


def test_rows_that_all_opted_out_of_a_plan_run_together_as_plain_decoding(tiny_decoder: Decoder) -> None:
    params = but(GREEDY, max_tokens=60, ignore_eos=True, speculative=False)
    lengths = list(lengths_of_steps(drafter_engine(tiny_decoder, KINDS["ngram"]), params))
    assert lengths == list(lengths_of_steps(together(tiny_decoder), params))
    assert max(lengths) == _MOST_TOGETHER


@pytest.mark.parametrize("name", ["ngram gated", "tree", "model"])
def test_what_does_not_run_together_takes_no_blocks_for_it(tiny_path: Path, name: str) -> None:
    options = NUMBERS["sdpa"] if name == "ngram gated" else {}
    decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"), **options)
    found = []
    for max_run_ms in (0.0, LONG):
        engine = drafter_engine(decoder, ALL[name], decoder, max_run_ms=max_run_ms)
        with spied(PackedLauncher, "launch") as flights:
            outputs = run(engine, TEXTS, but(GREEDY, max_tokens=20))
        found.append((outputs, [flight.rows.context_len for flight in flights]))
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["fcfs", "laps"])
@pytest.mark.parametrize("seed", range(3))
def test_plans_that_change_between_runs_and_runs_that_are_lost(
    tiny_decoder: Decoder, policy: str, seed: int
) -> None:
    """A controller that changes its mind, also about single requests, few blocks, and interrupts before the
    host has read a run: of drafters that several plans share."""
    ways = {**KINDS["hybrid sure gated"], "control": "goodput", "goodput": {}}
    config = EngineConfig(max_num_seqs=4, max_model_len=256, block_size=4, num_kv_blocks=80, max_run_ms=LONG)
    engine = Engine(
        tiny_decoder,
        config,
        build(SpeculativeConfig, ways),
        latency=flat_latency([5, 8]),
        scheduling=SchedulingConfig(policy=policy),
    )
    control, chance = make_restless(engine, seed, watches=0.1), random.Random(seed)
    engine._rounds._last_rounds = AlwaysShort()
    original, lost = StepLoop.read, []

    def lose(loop: StepLoop, flight: Any) -> None:
        if chance.random() < 0.2:
            lost.append(flight.num_rounds)
            raise KeyboardInterrupt
        original(loop, flight)

    params = but(GREEDY, max_tokens=80, ignore_eos=True)
    expected = run(one_by_one(tiny_decoder), TEXTS, params)
    with patch.object(StepLoop, "read", lose), spied(Stages, "run_linked") as calls:
        assert run_through_interrupts(engine, TEXTS, params) == expected
    assert len(calls) > 9 and max(lost) > 1
    assert len({choice.plan for choice in control.choices}) > 5


class AlwaysShort(dict[Plan, tuple[float, int]]):
    """Rounds of any plan take no time, as the runner is told."""

    def get(self, plan: Plan, _: Any = None) -> tuple[float, int]:
        return 0.1, 1


def test_texts_that_a_lost_run_has_extended_are_set_right(tiny_decoder: Decoder) -> None:
    """The tokens of a run that the host never saw are in no text afterwards."""
    engine = drafter_engine(tiny_decoder, KINDS["ngram"], max_num_seqs=2)
    expected = run(drafter_engine(tiny_decoder, KINDS["ngram"], max_num_seqs=2), TEXTS[-2:])
    drafter, lost = engine._runtime.drafter, []
    assert isinstance(drafter, NgramDrafter)
    original = StepLoop.read

    def lose(loop: StepLoop, flight: Any) -> None:
        if flight.num_rounds > 1 and len(lost) < 2:
            lost.append(flight.num_rounds)
            raise KeyboardInterrupt
        original(loop, flight)

    original_follow = NgramDrafter.follow

    def follow(self: NgramDrafter, rows: Any) -> None:
        original_follow(self, rows)
        for number, token_ids in rows:
            row = self._index_row_of[number]
            assert self._lookup._texts.tokens[row, : self._lookup.length(row)].tolist() == token_ids

    with patch.object(StepLoop, "read", lose), patch.object(NgramDrafter, "follow", follow):
        assert run_through_interrupts(engine, TEXTS[-2:]) == expected
    assert len(lost) == 2 and min(lost) > 1


def test_the_time_of_linked_passes_is_that_of_their_tiers(tiny_decoder: Decoder) -> None:
    engine = drafter_engine(tiny_decoder, KINDS["hybrid sure gated"])
    with spied(Stages, "run_linked") as calls:
        run(engine, TEXTS, but(GREEDY, max_tokens=40))
    stats = engine.stats()
    seconds = [stats[f"{tier}_pass_s"] for tier in ("draft", "check", "verify")]
    assert calls and min(seconds) > 0.0 and sum(seconds) < stats["round_s"]


def test_without_a_clock_all_time_is_verifys(tiny_decoder: Decoder) -> None:
    with patch.object(fused_pass, "find_clock", lambda: 0):
        engine = drafter_engine(tiny_decoder, KINDS["exit gated"])
        engine.add_request(TEXTS[0], but(GREEDY, max_tokens=60))
        engine.step(), engine.step()
        before = engine.stats()
        engine.step()
        after = engine.stats()
    assert after["rounds"] > before["rounds"] + 1
    assert after["verify_pass_s"] > before["verify_pass_s"]
    assert after["draft_pass_s"] == before["draft_pass_s"]


def test_a_run_has_blocks_for_all_of_its_rounds(engine_of: Make) -> None:
    """Also where each of them commits all that it can."""
    engine = engine_of("right", Plan(3, None, 3, 1), max_run_ms=LONG)
    with spied(PackedLauncher, "launch") as flights:
        run(engine, [TEXTS[2]], but(GREEDY, max_tokens=1 + 4 * (1 + 2 * _MOST_TOGETHER)))
    committed = [(flight.num_rounds, int(flight.result.counts[0])) for flight in flights]
    assert committed[1:3] == [(_MOST_TOGETHER, 4 * _MOST_TOGETHER)] * 2


def test_a_run_takes_no_more_blocks_than_there_are(tiny_decoder: Decoder) -> None:
    """It ends where the next round would lack places, and gives back what it has not used."""
    engine = drafter_engine(tiny_decoder, KINDS["ngram"], block_size=4, num_kv_blocks=13)
    expected = run(one_by_one(tiny_decoder), TEXTS[:2], but(GREEDY, max_tokens=30))
    assert run(engine, TEXTS[:2], but(GREEDY, max_tokens=30)) == expected
