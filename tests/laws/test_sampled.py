"""Law 2, `coupled`: with a seed, sampled output is plain sampled output with that seed, alone or in any
batch."""

from __future__ import annotations

import pytest

from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.sampling_params import SamplingParams
from tests.helpers.support import PLANS, make_engine, random_prompts, run

PROMPTS = random_prompts((3, 12, 1, 30, 17, 6))
PARAMS = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=24),
    SamplingParams(temperature=0.7, top_k=20, seed=2, max_tokens=24),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02, seed=3, max_tokens=24, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=24, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(
        temperature=0.9,
        seed=1,
        max_tokens=24,
        logit_bias={5: 4.0, 7: -50.0},
        min_tokens=10,
        stop_token_ids=list(range(0, 250, 3)),
    ),
    SamplingParams(temperature=0.0, max_tokens=24, speculative=False),
]


@pytest.fixture(scope="module")
def plain(tiny_decoder: Decoder) -> list[list[int]]:
    """Each request alone, decoded plainly."""
    return [
        run(make_engine(tiny_decoder), [prompt], params)[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_mixed_sampling_in_one_batch_equals_plain_alone(
    tiny_decoder: Decoder, plain: list[list[int]], plan: Plan
) -> None:
    assert run(make_engine(tiny_decoder, plan), PROMPTS, PARAMS) == plain


def test_sampled_output_survives_preemption(tiny_decoder: Decoder, plain: list[list[int]]) -> None:
    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2), num_kv_blocks=9)
    assert run(engine, PROMPTS, PARAMS) == plain
    assert engine.stats()["preemptions"] > 0


def test_seeds_matter_and_are_all_that_matters(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2))
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24) for seed in (5, 6, 5)]
    first, second, third = run(engine, [PROMPTS[0]] * 3, params)
    assert first == third != second


def test_tiers_agree_more_often_than_independent_draws_would(tiny_decoder: Decoder) -> None:
    """The point of coupling: with the same noise, a good exit's choice is often the full model's."""
    engine = make_engine(tiny_decoder, Plan(8, None, 1, 1))
    run(engine, PROMPTS, SamplingParams(temperature=1.0, seed=3, max_tokens=60))
    stats = engine.stats()
    assert stats["accepted"] / stats["tentative"] > 0.2
    assert stats["committed"] > stats["rounds"]


@pytest.mark.parametrize("plan", [Plan(8, None, 2, 1), Plan(7, 8, 2, 2)], ids=str)
def test_rejection_with_a_seed_is_reproducible_and_greedy_rows_stay_exact(
    tiny_decoder: Decoder, plan: Plan
) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=4, max_tokens=24),
        SamplingParams(temperature=0.0, max_tokens=24),
    ]
    once = run(make_engine(tiny_decoder, plan, rejection=True), PROMPTS[:2], params)
    engine = make_engine(tiny_decoder, plan, rejection=True, num_kv_blocks=64)
    assert run(engine, PROMPTS[:2], params) == once
    assert once[1] == run(make_engine(tiny_decoder), [PROMPTS[1]], params[1])[0]
    assert engine.stats()["accepted"] > 0
