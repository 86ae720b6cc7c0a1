"""A model that gives nan or infinite logits for one request: that one ends, named, and no other notices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec import LLM
from hispec.config import EngineConfig, Plan, SpeculativeConfig
from hispec.decoding.row_steps import sum_of_chosen
from hispec.engine import Engine
from hispec.sampling.logits import Logits
from hispec.sampling_params import SamplingParams
from tests.faults.plans import PLANS, make
from tests.helpers.drafters import ALL, draft_decoder, drafter_engine
from tests.helpers.faults import run_on
from tests.helpers.restless import flat_latency
from tests.helpers.scripted import Script, ScriptedDecoder, true_next
from tests.helpers.support import make_engine, random_prompts, run
from tests.helpers.sweeps import sweep

PROMPTS = random_prompts((5, 9, 33, 7), vocab=250, seed=11)
PARAMS = SamplingParams(temperature=0.0, max_tokens=16)
SAMPLED = SamplingParams(temperature=1.1, top_k=40, seed=5, max_tokens=16, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def decoder(tiny_path: Path) -> Decoder:
    """Of its own, since its weights are damaged here."""
    return Decoder.load(open_checkpoint(tiny_path), torch.float32, torch.device("cpu"))


@contextmanager
def damaged(decoder: Decoder, token: int, value: float = math.nan) -> Iterator[None]:
    """Whoever has `token` in its text gets hidden states that are no numbers from there on."""
    before = decoder.embedding[token].clone()
    decoder.embedding[token] = value
    try:
        yield
    finally:
        decoder.embedding[token] = before


@sweep(
    "plan, is_static",
    itertools.product(PLANS, [False, True]),
    lambda case: list(PLANS).index(case[0]) % 2 == case[1],  # greedy; or static and sampled
)
def test_a_row_of_nan_ends_alone(decoder: Decoder, plan: str, is_static: bool) -> None:
    """Token 255 in a prompt; and a token that a request writes itself, which others only draft."""
    params = SAMPLED if is_static else PARAMS
    wanted = run(make_engine(decoder), PROMPTS, params)
    own = next(token for token in wanted[0][3:] if all(token not in text for text in [*PROMPTS, *wanted[1:]]))
    with damaged(decoder, 255), damaged(decoder, own, math.inf):
        engine = make(decoder, plan, is_static=is_static)
        tokens, errors = run_on(engine, [*PROMPTS, [4, 255, 6]], params)
    assert tokens[1:4] == wanted[1:] and errors[1:4] == [None] * 3
    assert tokens[4] == [] and "logits are nan after 0 output tokens (position 3)" in str(errors[4])
    upto = wanted[0].index(own) + 1
    assert tokens[0] == wanted[0][:upto] and f"nan after {upto} output tokens" in str(errors[0])
    # Nothing of it is found again: once the weights are right, so is everything.
    assert run(engine, [*PROMPTS, [4, 255, 6]], params)[:4] == wanted


def scripted(values: Tensor) -> Script:
    """The full model says `values` after token 13."""

    def script(exit_layer: int, position: int, token: int) -> Tensor:
        logits = torch.zeros(50)
        logits[true_next(position, token)] = 20.0
        return values if token == 13 and exit_layer == 9 else logits

    return script


SEEN = {
    "nan": torch.full((50,), math.nan),
    "inf": torch.zeros(50).index_fill(0, torch.tensor([7]), math.inf),
    "-inf": torch.full((50,), -math.inf),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("plan", [Plan(), Plan(3, None, 3, 1), Plan(3, 6, 2, 2)], ids=str)
def test_what_was_seen_is_named(seen: str, temperature: float, plan: Plan) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=1)
    plain = run(make_engine(ScriptedDecoder(scripted(torch.zeros(50)))), [[2, 3], [5, 7, 11]], params)
    assert all(13 not in tokens for tokens in plain)
    engine = make_engine(ScriptedDecoder(scripted(SEEN[seen])), plan, block_size=2)
    tokens, errors = run_on(engine, [[2, 3], [2, 13], [5, 7, 11]], params)
    assert tokens == [plain[0], [], plain[1]]
    assert errors[0] is errors[2] is None
    assert f"the model's logits are {seen} after 0 output tokens" in str(errors[1])


def test_a_controller_learns_nothing_of_it(decoder: Decoder) -> None:
    """A request that is alone in its rounds, which then have no row to tell of."""
    config = SpeculativeConfig(draft={"layer": 3}, control="goodput", goodput={"interval": 2})
    engine = Engine(
        decoder,
        EngineConfig(max_num_seqs=2, max_model_len=128, block_size=8, num_kv_blocks=64, max_run_ms=0.0),
        config,
        latency=flat_latency([3]),
    )
    wanted = run(make_engine(decoder), PROMPTS, PARAMS)
    with damaged(decoder, 255):
        for _ in range(3):
            tokens, errors = run_on(engine, [[4, 255, 6]], PARAMS)
            assert tokens == [[]] and "logits are nan" in str(errors[0])
    assert [run(engine, [prompt], PARAMS)[0] for prompt in PROMPTS] == wanted


def test_rejection_sampling_notices_too(decoder: Decoder) -> None:
    engine = make_engine(decoder, Plan(3, 6, 2, 2), rejection=True)
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=3)
    wanted = run(make_engine(decoder, Plan(3, 6, 2, 2), rejection=True), PROMPTS, params)
    with damaged(decoder, 255):
        tokens, errors = run_on(engine, [*PROMPTS, [4, 255, 6]], params)
    assert tokens[:3] == wanted[:3] and tokens[4] == [] and "nan" in str(errors[4])
    assert len(tokens[3]) == 8 and errors[:4] == [None] * 4  # it drafts 255, and starts over


@pytest.mark.parametrize("kind", ["model", "model tree", "model gated"])
def test_a_draft_model_of_nan_costs_speed_alone(decoder: Decoder, tiny_path: Path, kind: str) -> None:
    wanted = run(make_engine(decoder), PROMPTS, PARAMS)
    broken = draft_decoder(tiny_path)
    with damaged(broken, PROMPTS[1][2]):
        assert run(drafter_engine(decoder, ALL[kind], broken), PROMPTS, PARAMS) == wanted


@pytest.mark.parametrize("bad", [12, 13, 15])
def test_a_prefix_that_another_request_has_spoilt_is_computed_again(
    decoder: Decoder, bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention multiplies what a token does not see by 0, which of nan is nan: so what stands shortly before
    the bad token is spoilt, and others find it, while the rest of a long prompt is still to be computed."""
    stem, tail = PROMPTS[2][:bad], random_prompts((60,), vocab=250)[0]
    prompts = [[*stem, first] for first in (1, 2, 3)]
    wanted = run(make_engine(decoder), prompts, PARAMS)
    token = next(token for token in range(250, 256) if all(token not in output for output in wanted))
    engine = make_engine(decoder, Plan(3, 6, 2, 2), max_num_seqs=3, block_size=1)
    with damaged(decoder, token):
        spoiler = engine.add_request([*stem, token, *tail], PARAMS)
        assert engine.step() == []
        tokens, errors = run_on(engine, prompts, PARAMS, others=(spoiler,))
        assert engine.stats()["cached_tokens"] >= 2 * bad
        assert (tokens, errors) == (wanted, [None] * 3)
        caplog.clear()
        assert run(engine, prompts, PARAMS) == wanted
    assert "starts over" not in caplog.text, "it is found again"


def test_one_failure_that_does_not_come_again_costs_nothing_but_time(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that was changed where it lies: of one request, in the middle of its output."""
    wanted = run(make_engine(decoder), PROMPTS, SAMPLED)
    engine = make_engine(decoder, Plan(3, 6, 2, 2), is_static=True)
    ids = [engine.add_request(prompt, SAMPLED) for prompt in PROMPTS]
    got: dict[str, list[int]] = {request_id: [] for request_id in ids}
    for step in range(100):
        if step == 2:
            kv, request = engine._runtime.kv, engine._loop.requests[ids[1]]
            kv.values(5)[request.table.blocks[0] * 8 + 3] = math.nan
        for delta in engine.step() if engine.has_unfinished() else ():
            assert delta.error is None
            got[delta.request_id] += delta.token_ids
        engine.check()
    assert [got[request_id] for request_id in ids] == wanted


def test_the_sum_of_what_is_committed_is_all_that_counts() -> None:
    """Two rows of three and one nodes; what is not on the path, or not committed, may be anything."""
    values = torch.arange(20.0).reshape(4, 5)
    span: Any = SimpleNamespace(view=SimpleNamespace(cu_q_lens=torch.tensor([0, 3, 4])), num_tokens=4)
    tokens = torch.tensor([[9, 1, 2, 0], [9, 4, 0, 0]])
    path = torch.tensor([[0, 2, 2], [0, 0, 0]])

    def found(counts: list[int]) -> list[float]:
        return sum_of_chosen(Logits(values, 5), span, tokens, torch.tensor(counts), path).tolist()

    assert found([2, 1]) == [1.0 + 12.0, 19.0] and found([1, 0]) == [1.0, 0.0]
    values[1] = values[2, 0] = math.nan  # off the path; beyond what is committed
    assert found([2, 1]) == [13.0, 19.0]
    values[2, 2] = math.inf
    assert found([2, 1]) == [math.inf, 19.0] and found([1, 1]) == [1.0, 19.0]
    values[0, 1] = -math.inf
    assert math.isnan(found([2, 1])[0]) and found([2, 1])[1] == 19.0


def test_an_output_says_what_was_wrong(tiny_path: Path) -> None:
    with LLM(str(tiny_path), max_model_len=64, num_kv_blocks=32) as llm:
        good, bad = [[1, 2, 3]], [[1, 255, 3]]
        wanted = llm.generate(good, PARAMS, use_tqdm=False)[0].outputs[0]
        with damaged(llm.decoder, 255):
            outputs = llm.generate(good + bad, PARAMS, use_tqdm=False)
        assert outputs[0].outputs[0].text == wanted.text and outputs[0].error is None
        assert "logits are nan" in str(outputs[1].error)
        assert outputs[1].outputs[0].finish_reason == "error" and outputs[1].outputs[0].token_ids == []
        assert llm.generate(good, PARAMS, use_tqdm=False)[0].outputs[0].text == wanted.text
