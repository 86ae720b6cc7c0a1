"""What prompts share is computed once, also where they come together."""

from __future__ import annotations

import random
from itertools import product

import pytest

from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.sampling_params import SamplingParams
from tests.helpers.support import make_engine, run
from tests.helpers.sweeps import sweep

BLOCK = 8  # make_engine's
FEW = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def least(prompts: list[list[int]]) -> int:
    """Positions that have to be computed: each block once, whoever has it, and what is no whole block."""
    blocks = {tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK, len(prompt), BLOCK)}
    return BLOCK * len(blocks) + sum((len(prompt) - 1) % BLOCK for prompt in prompts)


def branching(seed: int) -> list[list[int]]:
    """Prompts in an order of chance, each of which goes on from a part of an earlier one."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(5, 90) for _ in range(60)]]
    for _ in range(11):
        before = chance.choice(prompts)
        own = [chance.randrange(5, 90) for _ in range(chance.randint(0, 30))]
        prompts.append(before[: chance.randint(1, len(before))] + own)
    chance.shuffle(prompts)
    return prompts


@sweep("budget, rows, is_static, seed", product([5, 20, 64, 1000], [3, 16], [False, True], range(3)), 9)
def test_little_more_is_computed_than_has_to_be(
    tiny_decoder: Decoder, budget: int, rows: int, is_static: bool, seed: int
) -> None:
    sizes = {"max_prefill_tokens": budget, "max_num_seqs": rows, "num_kv_blocks": 400}
    prompts = branching(seed)
    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2), is_static=is_static, **sizes)
    alone = make_engine(tiny_decoder, Plan(3, 6, 2, 2), enable_prefix_caching=False, **sizes)
    assert run(engine, prompts, FEW) == run(alone, prompts, FEW)
    stats, whole = engine.stats(), sum(len(prompt) - 1 for prompt in prompts)
    assert least(prompts) <= stats["prefill_tokens"] < 2 * least(prompts)
    assert stats["prefill_tokens"] < 0.75 * whole == 0.75 * alone.stats()["prefill_tokens"]
    assert stats["cached_tokens"] == whole - stats["prefill_tokens"]


@pytest.mark.parametrize("budget", [20, 1000])
def test_of_prompts_after_the_same_examples_no_whole_block_is_computed_twice(
    tiny_decoder: Decoder, budget: int
) -> None:
    examples = [7 + at for at in range(80)]
    prompts = [[*examples, 5, number, *range(9, 9 + number)] for number in range(20, 32)]
    engine = make_engine(tiny_decoder, max_prefill_tokens=budget, max_num_seqs=12, num_kv_blocks=400)
    run(engine, prompts, FEW)
    assert engine.stats()["prefill_tokens"] == least(prompts)


@pytest.mark.parametrize("order", [1, -1])
def test_prompts_each_of_which_goes_on_from_the_one_before_wait_for_few_steps(
    tiny_decoder: Decoder, order: int
) -> None:
    """As the turns of a conversation do."""
    text = [5 + at for at in range(200)]
    prompts = [text[: BLOCK * turns + 1] for turns in range(1, 25)][::order]
    engine = make_engine(
        tiny_decoder, max_prefill_tokens=4000, max_num_seqs=24, num_kv_blocks=800, max_run_ms=0.0
    )
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    num_steps = 0
    while engine.has_unfinished():
        engine.step()
        num_steps += 1
    assert num_steps <= 4 and engine.stats()["prefill_tokens"] <= 4 * least(prompts)


def test_who_waits_for_anothers_prompt_says_what_it_found(tiny_decoder: Decoder) -> None:
    """And takes its first token in the step after."""
    engine = make_engine(tiny_decoder, max_prefill_tokens=1000, max_run_ms=0.0)
    prompt = [7 + at for at in range(50)]
    ids = [engine.add_request(prompt, FEW) for _ in range(4)] + [engine.add_request(prompt[1:], FEW)]
    came = [[delta.request_id for delta in engine.step()] for _ in range(2)]
    assert [sorted(step) for step in came] == [sorted([ids[0], ids[4]]), sorted(ids)]
    while engine.has_unfinished():
        for delta in engine.step():
            if delta.metrics is not None:
                is_alone = delta.request_id in (ids[0], ids[4])
                assert delta.metrics.num_cached_tokens == (0 if is_alone else 48)


def test_without_a_prefix_cache_nobody_waits(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, max_prefill_tokens=1000, enable_prefix_caching=False, max_run_ms=0.0)
    for _ in range(4):
        engine.add_request([7 + at for at in range(50)], FEW)
    assert len(engine.step()) == 4
