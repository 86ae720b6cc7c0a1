"""Law 5: after every step of any history, blocks held are what live requests hold, and nothing leaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hispec.config import Plan
from hispec.errors import ClosedError, RequestError
from hispec.sampling_params import SamplingParams
from hispec.scheduling.request import Request
from tests.helpers.scripted import ScriptedDecoder, one_hot_script, true_next
from tests.helpers.support import make_engine

PLANS = [Plan(), Plan(2, None, 3, 1), Plan(2, 5, 2, 2), Plan(1, 8, 1, 3)]


def unreliable_exits(seed: int) -> ScriptedDecoder:
    """Exits that are right or wrong by position and layer; the full model says the truth."""

    def next_token(exit_layer: int, position: int, token: int) -> int:
        wrong = exit_layer < 9 and random.Random(hash((seed, exit_layer, position))).random() < 0.4
        return (true_next(position, token) + (exit_layer if wrong else 0)) % 50

    return ScriptedDecoder(one_hot_script(next_token))


def true_output(prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(true_next(len(tokens) - 1, tokens[-1]))
    return tokens[len(prompt) :]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 14), st.booleans()),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    operations=OPERATIONS,
    plan=st.sampled_from(PLANS),
    block_size=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 99),
    caching=st.booleans(),
)
def test_any_history_keeps_integrity_and_exact_output(
    operations: list[tuple], plan: Plan, block_size: int, seed: int, caching: bool
) -> None:
    # 48 positions of KV for up to 4 rows: preemption is common, and refusal at admission happens.
    engine = make_engine(
        unreliable_exits(seed),
        plan,
        max_num_seqs=4,
        max_model_len=48,
        block_size=block_size,
        num_kv_blocks=-(-44 // block_size),
        max_prefill_tokens=7,
        enable_prefix_caching=caching,
    )
    generator = random.Random(seed)
    stem = [generator.randrange(50) for _ in range(30)]
    wanted: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    aborted: set[str] = set()

    def step() -> None:
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids
        engine.check()

    for operation in operations:
        if operation[0] == "add":
            _, length, max_tokens, shared = operation
            prompt = stem[:length] if shared else [generator.randrange(50) for _ in range(length)]
            try:
                request_id = engine.add_request(
                    prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens)
                )
            except RequestError as error:
                assert "KV blocks" in str(error)
                continue
            wanted[request_id], got[request_id] = true_output(prompt, max_tokens), []
        elif operation[0] == "step":
            for _ in range(operation[1]):
                step()
        elif wanted:
            request_id = sorted(wanted)[operation[1] % len(wanted)]
            if len(got[request_id]) < len(wanted[request_id]):
                aborted.add(request_id)
            engine.abort([request_id])
            engine.check()
    for _ in range(2000):
        if not engine.has_unfinished():
            break
        step()
    assert not engine.has_unfinished(), "requests starve"
    for request_id, tokens in got.items():
        assert tokens == (wanted[request_id][: len(tokens)] if request_id in aborted else wanted[request_id])
    assert engine.stats()["kv_blocks_used"] == 0


def test_only_committed_blocks_enter_the_prefix_cache() -> None:
    """A later request that shares the tokens a round merely tried must not find their KV; ScriptedDecoder
    would notice."""
    engine = make_engine(unreliable_exits(1), Plan(2, 5, 3, 2), block_size=2, max_num_seqs=2)
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30))
    while engine.has_unfinished():
        engine.step()
        for block, key in enumerate(engine._pool._key):
            if key is not None:
                slots = range(block * 2, block * 2 + 2)
                assert [int(engine._runtime.kv.keys(8)[slot, 0, 0]) for slot in slots] == list(key[1]), (
                    "a published block holds other tokens"
                )


def test_hidden_buffer_and_kv_are_allocated_once() -> None:
    engine = make_engine(unreliable_exits(2), Plan(2, 5, 2, 2))
    before = engine._runtime.kv.data.data_ptr(), engine._runtime.hidden.data.data_ptr(), engine.memory()
    for _ in range(3):
        engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20))
        while engine.has_unfinished():
            engine.step()
    assert before == (
        engine._runtime.kv.data.data_ptr(),
        engine._runtime.hidden.data.data_ptr(),
        engine.memory(),
    )
    assert engine.memory()["kv_bytes"] == engine._runtime.kv.data.untyped_storage().nbytes()


def test_first_come_first_served_even_under_preemption() -> None:
    engine = make_engine(unreliable_exits(3), Plan(2, 5, 2, 2), max_num_seqs=3, num_kv_blocks=7)
    ids = [
        engine.add_request([i, i + 1, i + 2], SamplingParams(temperature=0.0, max_tokens=30))
        for i in range(5)
    ]
    order = []
    while engine.has_unfinished():
        order += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert order == ids and engine.stats()["preemptions"] > 0


def test_limits_never_reach_beyond_what_a_request_may_still_output() -> None:
    request = Request("r", 0, [1], SamplingParams(max_tokens=5), 0, 5, frozenset(), None, 0.0)
    assert [request.round_limit(window) for window in (1, 3, 9)] == [1, 3, 5]
    request.append([2, 3, 4])
    assert request.round_limit(9) == 2


@pytest.mark.parametrize("after", [0, 1, 2])
def test_close_is_idempotent_and_refuses_more(after: int) -> None:
    engine = make_engine(unreliable_exits(4), Plan(2, 5, 2, 2))
    engine.add_request([1, 2], SamplingParams(temperature=0.0, max_tokens=20))
    for _ in range(after):
        engine.step()
    engine.close()
    engine.close()
    assert not engine.has_unfinished() and engine.memory()["kv_bytes"] == 0
    with pytest.raises(ClosedError, match=r"Engine.add_request\(\): this Engine was closed"):
        engine.add_request([1], SamplingParams())
