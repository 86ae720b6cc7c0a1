"""Bad input gets an error that names the value, the limit and the way out, and leaves the engine working."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ee_models.decoder import Decoder
from ee_models.errors import CheckpointError
from hispec import LLM, ConfigError, RequestError, SamplingParams
from hispec.config import Plan
from tests.helpers.support import GREEDY, make_engine, run

SMALL: dict[str, Any] = {"max_model_len": 64, "num_kv_blocks": 16, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> LLM:
    return LLM(str(tiny_path), **SMALL)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "prompt is empty"),
        ([1, 999], {}, "0 to 259.*999"),
        ([-1], {}, "0 to 259.*-1"),
        ([1.5], {}, "1.5"),
        ([True], {}, "True"),
        (list(range(64)), {}, "64 tokens.*max_model_len=64"),
        ([1, 2], {"logit_bias": {260: 1.0}}, "logit_bias names token 260.*259"),
        ([1, 2], {"stop_token_ids": [300]}, "stop_token_ids names token 300"),
        ([1, 2], {"stop": ["x"]}, "tokenizer"),
        ([1, 2], {"n": 2}, "n=2"),
    ],
)
def test_engine_refuses_and_goes_on(
    tiny_decoder: Decoder, prompt: list[Any], params: dict[str, Any], words: str
) -> None:
    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2), **SMALL)
    with pytest.raises(RequestError, match=words):
        engine.add_request(prompt, SamplingParams(**params))
    engine.check()
    assert len(run(engine, [[1, 2, 3]], GREEDY)[0]) == 24


def test_a_request_that_never_fits_is_refused_with_the_numbers(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, num_kv_blocks=4, block_size=8)
    with pytest.raises(
        RequestError, match=r"42 tokens = 6 KV blocks of 8, but there are 4; lower max_tokens to 13"
    ):
        engine.add_request([1] * 20, SamplingParams(max_tokens=22))
    with pytest.raises(RequestError, match=r"40 tokens take 5 KV blocks of 8.*raise num_kv_blocks"):
        engine.add_request([1] * 40, SamplingParams(max_tokens=1))
    assert len(run(engine, [[1] * 20], SamplingParams(temperature=0.0, max_tokens=13))[0]) == 13


@pytest.mark.parametrize("max_tokens", [9, 8, 7, None])
def test_an_output_that_fills_the_context_says_so(tiny_decoder: Decoder, max_tokens: int | None) -> None:
    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2), max_model_len=20)
    engine.add_request([1] * 12, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    deltas = []
    while engine.has_unfinished():
        deltas += engine.step()
    expected = "max_model_len" if max_tokens in (9, None) else None
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", expected)
    assert sum(len(delta.token_ids) for delta in deltas) == (7 if max_tokens == 7 else 8)


def test_all_that_is_wrong_is_said_in_one_error(tiny_decoder: Decoder) -> None:
    with pytest.raises(RequestError) as caught:
        make_engine(tiny_decoder).add_request([999], SamplingParams(stop=["x"], logit_bias={999: 1.0}))
    for words in ("prompt token ids", "stop strings", "logit_bias"):
        assert words in str(caught.value)


def test_one_bad_prompt_does_not_take_the_others_down(llm: LLM) -> None:
    outputs = llm.generate(
        ["ab", "", [5, 6], [999], {"prompt_token_ids": [7]}, {"nothing": 1}],
        SamplingParams(temperature=0.0, max_tokens=4),
        use_tqdm=False,
    )
    assert [output.error is None for output in outputs] == [True, False, True, False, True, False]
    assert all(len(output.outputs[0].token_ids) == 4 for output in outputs if output.error is None)
    assert not llm.has_unfinished() and llm.stats()["kv_blocks_used"] == 0


def test_duplicate_ids_are_refused_while_they_live(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder)
    engine.add_request([1], GREEDY, request_id="a")
    with pytest.raises(RequestError, match="unique"):
        engine.add_request([2], GREEDY, request_id="a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "meta"}, "cpu and cuda"),
        ({"dtype": "int8"}, "dtype.*int8"),
        (
            {"max_model_len": 100000},
            r"max_model_len=100000 is above the model's max_position_embeddings of 512",
        ),
        ({"block_size": 0}, "block_size.*0"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"blok_size": 4}, "did you mean 'block_size'"),
        ({"dtype": "bfloat16", "attention": "numba"}, "numba.*float32"),
        ({"speculative": {"draft": {"layer": 9}}}, r"draft.layer=9 .* 9 layers; choose 1 to 8"),
        ({"speculative": {"draft": {"layer": 3}, "check": {"layer": 12}}}, r"check.layer=12"),
        (
            {"speculative": {"draft": {"layer": 5}, "check": {"layer": 5}}},
            r"check.layer=5 must lie above draft.layer=5",
        ),
        ({"speculative": {"draft": {"layer": 5}, "num_draft_tokens": 0}}, "num_draft_tokens.*0"),
        ({"speculative": {"draft": {"layer": 5}, "num_checks": 0}}, "num_checks.*0"),
    ],
)
def test_llm_refuses_bad_settings(tiny_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny_path), **{**SMALL, **fields})


def test_missing_model_files_are_named(tiny_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_path, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(str(broken))
    with pytest.raises(CheckpointError, match=r"no-such-model"):
        LLM("./no-such-model")


def test_stop_strings_need_a_tokenizer_and_chat_a_template(tiny_path: Path) -> None:
    bare = LLM(str(tiny_path), skip_tokenizer_init=True, **SMALL)
    for output in bare.generate(["text"], use_tqdm=False):
        assert output.error is not None and "prompt_token_ids" in output.error
    assert (
        bare.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)[0]
        .outputs[0]
        .text
        == ""
    )


def test_speculation_cannot_change_under_live_requests(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), **SMALL)
    llm.add("abc", SamplingParams(max_tokens=5), "a")
    with pytest.raises(ConfigError, match="1 requests are unfinished"):
        llm.set_speculative({"draft": {"layer": 2}})
    with pytest.raises(RequestError, match="unfinished"):
        llm.generate("x")
    llm.abort(["a", "a", "b"])
    llm.set_speculative({"draft": {"layer": 2}})
    assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None
