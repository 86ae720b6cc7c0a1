"""Law 1: in fp32 on the CPU the output is plain decoding's and transformers' greedy, token for token,
whatever happens."""

from __future__ import annotations

import itertools

import pytest
from transformers import PreTrainedModel

from ee_models.decoder import Decoder
from hispec.config import Plan
from hispec.sampling_params import SamplingParams
from tests.helpers.support import GREEDY, PLANS, make_engine, random_prompts, run, transformers_greedy

# From one token to several prefill chunks, all ragged.
LENGTHS = (1, 2, 7, 8, 9, 31, 33, 70)
PROMPTS = random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(tiny_reference: PreTrainedModel) -> list[list[int]]:
    return [transformers_greedy(tiny_reference, prompt, 24) for prompt in PROMPTS]


def test_the_tiny_model_proves_something(expected: list[list[int]], tiny_decoder: Decoder) -> None:
    """Its text varies, and its exits are sometimes right and sometimes wrong."""
    assert all(len(set(output)) >= 12 for output in expected)
    for layer, lowest, highest in ((3, 0.005, 0.5), (8, 0.3, 0.95)):
        engine = make_engine(tiny_decoder, Plan(layer, None, 1, 1))
        run(engine, PROMPTS)
        stats = engine.stats()
        assert lowest < stats["accepted"] / stats["tentative"] < highest, layer


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan_gives_transformers_greedy(
    tiny_decoder: Decoder, expected: list[list[int]], plan: Plan
) -> None:
    assert run(make_engine(tiny_decoder, plan), PROMPTS) == expected


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 64])
def test_every_block_size(tiny_decoder: Decoder, expected: list[list[int]], block_size: int) -> None:
    engine = make_engine(
        tiny_decoder, Plan(3, 6, 2, 2), block_size=block_size, num_kv_blocks=2048 // block_size
    )
    assert run(engine, PROMPTS) == expected


@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("max_prefill_tokens", [1, 5, 1000])
def test_every_batch_mix_and_prefill_chunk(
    tiny_decoder: Decoder, expected: list[list[int]], max_num_seqs: int, max_prefill_tokens: int
) -> None:
    engine = make_engine(
        tiny_decoder, Plan(3, 8, 2, 2), max_num_seqs=max_num_seqs, max_prefill_tokens=max_prefill_tokens
    )
    assert run(engine, PROMPTS) == expected


@pytest.mark.parametrize("backend", ["sdpa", "numba"])
def test_every_attention_backend(tiny_path: object, expected: list[list[int]], backend: str) -> None:
    import torch

    from ee_models.checkpoint.loader import open_checkpoint

    decoder = Decoder.load(
        open_checkpoint(str(tiny_path)), torch.float32, torch.device("cpu"), attention=backend
    )
    assert run(make_engine(decoder, Plan(3, 6, 2, 2)), PROMPTS) == expected


@pytest.mark.parametrize("plan", [Plan(), Plan(3, None, 4, 1), Plan(3, 6, 2, 2)], ids=str)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_forced_preemption_changes_nothing(
    tiny_decoder: Decoder, expected: list[list[int]], plan: Plan, prefix_caching: bool
) -> None:
    # The longest request alone takes 12 of the 14 blocks.
    engine = make_engine(tiny_decoder, plan, num_kv_blocks=14, enable_prefix_caching=prefix_caching)
    assert run(engine, PROMPTS) == expected
    assert engine.stats()["preemptions"] > 0, "nothing was preempted, so nothing was shown"


def test_shared_prefixes_are_reused_and_change_nothing(
    tiny_decoder: Decoder, tiny_reference: PreTrainedModel
) -> None:
    stem = random_prompts([40], seed=1)[0]
    prompts = [stem + tail for tail in ([], [5], [6, 7], [5, 5, 5])]
    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2))
    first = run(engine, prompts)
    before = engine.stats()["cached_tokens"]
    again = run(engine, prompts)
    assert engine.stats()["cached_tokens"] - before >= 4 * 32, "no prefix was found again"
    assert first == again == [transformers_greedy(tiny_reference, prompt, 24) for prompt in prompts]


def test_a_continued_conversation_reuses_generated_blocks(
    tiny_decoder: Decoder, tiny_reference: PreTrainedModel
) -> None:
    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2))
    prompt = PROMPTS[5]
    longer = prompt + run(engine, [prompt])[0] + [1, 2, 3]
    assert run(engine, [longer]) == [transformers_greedy(tiny_reference, longer, 24)]
    assert engine.stats()["cached_tokens"] >= len(prompt) + 8, "generated blocks were not found"


@pytest.mark.parametrize("abort_after", range(14))
def test_aborts_at_every_step_leave_the_others_alone(
    tiny_decoder: Decoder, expected: list[list[int]], abort_after: int
) -> None:
    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2), max_num_seqs=5)
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    reasons = {}
    for step in itertools.count():
        if step == abort_after:
            engine.abort([ids[0], ids[4], ids[7], "unknown"])
            engine.abort([ids[4]])  # idempotent
            engine.check()
        if not engine.has_unfinished():
            break
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                reasons[delta.request_id] = delta.finish_reason
        engine.check()
    assert engine.stats()["kv_blocks_used"] == 0
    for index, request_id in enumerate(ids):
        if reasons[request_id] == "length":
            assert outputs[request_id] == expected[index]
        else:
            assert (
                reasons[request_id] == "abort"
                and outputs[request_id] == expected[index][: len(outputs[request_id])]
            )
    assert sum(reason == "length" for reason in reasons.values()) >= 5


def test_a_request_may_opt_out_of_speculation(tiny_decoder: Decoder, expected: list[list[int]]) -> None:
    params = [GREEDY.model_copy(update={"speculative": index % 2 == 0}) for index in range(len(PROMPTS))]
    engine = make_engine(tiny_decoder, Plan(7, 8, 2, 2))
    assert run(engine, PROMPTS, params) == expected
    alone = make_engine(tiny_decoder, Plan(7, 8, 2, 2))
    run(alone, PROMPTS[:1], GREEDY.model_copy(update={"speculative": False}))
    stats = alone.stats()
    assert stats["drafted"] == 0 and stats["rounds"] == stats["committed"] == 24


@pytest.mark.parametrize("confidence", [0.05, 0.5, 0.999])
def test_confidence_exit_changes_nothing(
    tiny_decoder: Decoder, expected: list[list[int]], confidence: float
) -> None:
    engine = make_engine(tiny_decoder, Plan(3, None, 5, 1), confidence=confidence)
    assert run(engine, PROMPTS) == expected
    if confidence == 0.999:
        assert engine.stats()["drafted"] < 3 * engine.stats()["rounds"], "drafting never stopped early"


def test_drain_finishes_all_and_refuses_more(tiny_decoder: Decoder, expected: list[list[int]]) -> None:
    from hispec.errors import RequestError

    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2))
    request_id = engine.add_request(PROMPTS[0], GREEDY)
    tokens: list[int] = []
    for delta in engine.drain():
        assert delta.request_id == request_id
        tokens += delta.token_ids
        if delta.finish_reason is None:
            with pytest.raises(RequestError, match="draining"):
                engine.add_request([1], GREEDY)
    assert tokens == expected[0]
    assert run(engine, PROMPTS[:1]) == expected[:1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(d, c, k, r)
        for d in range(1, 9)
        for c in (None, *range(d + 1, 10))
        for k in (1, 2, 5)
        for r in ((1,) if c is None else (1, 2, 3))
    ],
    ids=str,
)
def test_exhaustive_sweep_of_plans(tiny_decoder: Decoder, expected: list[list[int]], plan: Plan) -> None:
    engine = make_engine(tiny_decoder, plan, num_kv_blocks=20)
    assert run(engine, PROMPTS) == expected


def test_max_tokens_of_one_and_mixed_lengths(tiny_decoder: Decoder, expected: list[list[int]]) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=1 + 3 * index) for index in range(len(PROMPTS))]
    outputs = run(make_engine(tiny_decoder, Plan(3, 8, 2, 2)), PROMPTS, params)
    assert outputs == [output[: 1 + 3 * index] for index, output in enumerate(expected)]
