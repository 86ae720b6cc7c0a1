"""Bad input gets an error that names the value, the limit and the way out, and leaves the engine working."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ee_models.decoder import Decoder
from ee_models.errors import CheckpointError
from hispec import LLM, ConfigError, RequestError, SamplingParams
from hispec.config import Plan
from hispec.runner import plan_cache
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
        ([1, 2], {"stop": ["x"]}, r"stop=\['x'\]: .*pass text=IncrementalText\(tokenizer, stop\) to Engine"),
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


ARRAY = np.array([1, 2])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_token_ids": ARRAY}, r"prompt_token_ids must be a list .* ndarray array\(.*\.tolist\(\)"),
        ({"prompt_token_ids": torch.tensor([1])}, r"prompt_token_ids must be .* Tensor .*\.tolist\(\)"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a list of token ids, not str 'ab'"),
        ({"prompt_token_ids": b"ab"}, "prompt_token_ids must be a list .* bytes"),
        ({"prompt_token_ids": None}, "prompt_token_ids must be a list .* None"),
        ({"prompt_token_ids": 5}, "prompt_token_ids must be a list .* int 5"),
        ({"prompt_token_ids": {1, 2}}, "prompt_token_ids must be a list .* set"),
        ({"prompt_token_ids": list(ARRAY)}, "prompt_token_ids must be integers from 0 to 259; 2 .* int64"),
        ({"prompt_token_ids": [1, 2.0]}, "prompt_token_ids must be integers .* 1 .* float 2.0"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids must be integers .* bool True"),
        ({"prompt_token_ids": [[1, 2]]}, r"prompt_token_ids must be integers .* list \[1, 2\]"),
        (
            {"params": {"temperatur": 1}},
            r"params must be SamplingParams, not dict .*SamplingParams.of\(",
        ),
        ({"params": None}, "params must be SamplingParams, not NoneType None"),
        ({"request_id": 7}, "request_id must be a string, not int 7"),
        ({"request_id": ["a"]}, "request_id must be a string, not list"),
        ({"request_id": "live"}, "live: a request of this id is unfinished"),
        ({"text": "a"}, "text must have the methods append and release of TextStream; str 'a' has not"),
        ({"prompt_token_ids": None, "params": None}, "prompt_token_ids .*; params must be"),
    ],
)
def test_arguments_of_wrong_types_are_named_and_change_nothing(
    tiny_decoder: Decoder, changes: dict[str, Any], words: str
) -> None:
    """The others' tokens included, whose seeds come from the order of the requests that were taken."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    outputs = []
    for is_disturbed in (False, True):
        engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2), **SMALL)
        engine.add_request([1, 2], params, "live")
        engine.step()
        if is_disturbed:
            arguments: dict[str, Any] = {"prompt_token_ids": [1], "params": params, **changes}
            with pytest.raises(RequestError, match=words):
                engine.add_request(**arguments)
            with pytest.raises(TypeError, match="max_tokens"):
                engine.add_request([1], params, max_tokens=3)  # type: ignore[call-arg]
        engine.check()
        engine.add_request([3], params)
        outputs.append([delta.token_ids for delta in engine.drain()])
    assert outputs[0] == outputs[1] and sum(map(len, outputs[0])) > 6


@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: range(tokens[0], tokens[-1] + 1)])
def test_any_sequence_of_token_ids_is_a_prompt(tiny_decoder: Decoder, kind: Any) -> None:
    engine = make_engine(tiny_decoder)
    engine.add_request(kind([1, 2, 3]), GREEDY)
    got = [token for delta in engine.drain() for token in delta.token_ids]
    assert [got] == list(run(make_engine(tiny_decoder), [[1, 2, 3]], GREEDY))


def test_a_name_that_a_user_has_taken_is_passed_over(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder)
    engine.add_request([1], GREEDY, "request-0")
    assert [engine.add_request([1], GREEDY) for _ in range(2)] == ["request-1", "request-2"]


def test_a_request_that_never_fits_is_refused_with_the_numbers(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, num_kv_blocks=4, block_size=8)
    with pytest.raises(
        RequestError, match=r"42 tokens = 6 KV blocks of 8, but there are 4; lower max_tokens to 13"
    ):
        engine.add_request([1] * 20, SamplingParams(max_tokens=22))
    with pytest.raises(RequestError, match=r"40 tokens take 5 KV blocks of 8.*raise num_kv_blocks"):
        engine.add_request([1] * 40, SamplingParams(max_tokens=1))
    assert len(run(engine, [[1] * 20], SamplingParams(temperature=0.0, max_tokens=13))[0]) == 13


def test_an_end_that_the_vocabulary_does_not_have_ends_nothing(tiny_decoder: Decoder) -> None:
    """Models have one in their config; to forbid it, for min_tokens, would take all others down."""
    engine = make_engine(tiny_decoder, eos=(1 << 20, -1, 3))
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=2)
    assert engine.admission.eos_token_ids == {3}
    assert len(run(engine, [[1, 2], [5]], params)[0]) >= 2


def test_without_max_tokens_an_output_takes_the_kv_blocks_that_there_are(tiny_decoder: Decoder) -> None:
    """A model's context may be longer than all KV; only a prompt that fills it is refused."""
    engine = make_engine(tiny_decoder, Plan(3, 6, 2, 2), num_kv_blocks=4, block_size=8)
    unlimited = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    prompts = [[1] * length for length in (20, 32, 5)]
    found = {engine.add_request(prompt, unlimited): len(prompt) for prompt in prompts}
    ends = {delta.request_id: delta.stop_reason for delta in engine.drain() if delta.finish_reason}
    assert ends == dict.fromkeys(found, "max_model_len")
    assert [len(tokens) for tokens in run(engine, prompts, unlimited)] == [13, 1, 28]
    with pytest.raises(RequestError, match=r"33 tokens take 5 KV blocks of 8.*raise num_kv_blocks"):
        engine.add_request([1] * 33, unlimited)
    plain = make_engine(tiny_decoder, num_kv_blocks=4, block_size=8)
    assert run(engine, prompts, unlimited) == run(plain, prompts, unlimited)


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
    for words in ("prompt_token_ids", "stop strings", "logit_bias"):
        assert words in str(caught.value)


def test_one_bad_prompt_does_not_take_the_others_down(llm: LLM) -> None:
    outputs = llm.generate(
        ["ab", "", [5, 6], [999], {"prompt_token_ids": [7]}, {"prompt": ""}],
        SamplingParams(temperature=0.0, max_tokens=4),
        use_tqdm=False,
    )
    assert [output.error is None for output in outputs] == [True, False, True, False, True, False]
    assert all(len(output.outputs[0].token_ids) == 4 for output in outputs if output.error is None)
    assert not llm.has_unfinished() and llm.stats()["kv_blocks_used"] == 0


TURN = {"role": "user", "content": "hi"}


def test_an_error_names_the_prompts_place_in_the_call_or_the_users_id(llm: LLM) -> None:
    for n in (1, 2):
        one = SamplingParams(max_tokens=2, n=n)
        outputs = llm.generate(["ab", "cd", [999]], one, use_tqdm=False)
        assert outputs[2].error is not None
        assert outputs[2].error.startswith("prompts[2]: prompt_token_ids must be integers from 0 to 259; ")
        assert [output.request_id for output in outputs] == ["prompts[0]", "prompts[1]", "prompts[2]"]
    assert str(llm.generate("", use_tqdm=False)[0].error).startswith("prompts: the prompt is empty")
    with pytest.raises(RequestError, match=r"^mine: the prompt is empty"):
        llm.add("", None, "mine")
    with pytest.raises(RequestError, match=r"^mine: a prompt is a string, .* got int 5;"):
        llm.add(5, None, "mine")
    with pytest.raises(RequestError, match=r"^the prompt is empty"):
        next(llm.stream(""))
    with pytest.raises(RequestError, match=r"^token ids are .* LLM.stream with chat=True"):
        next(llm.stream([TURN]))


@pytest.mark.parametrize(
    ("chat", "given", "message"),
    [
        (False, None, r"prompts: a prompt is a string, .*, got NoneType None; give one, or a list of them"),
        (False, 5, r"prompts: .* got int 5;"),
        (False, (letter for letter in "ab"), r"prompts: .* got generator "),
        (False, b"text", r"prompts: .* got bytes b'text';"),
        (False, ["a", 5], r"prompts\[1\]: .* got int 5;"),
        (False, ["a", None], r"prompts\[1\]: .* got NoneType None;"),
        (False, [5, "a"], r"prompts: token ids are integers, got str 'a' at position 1"),
        (False, ["a", [5, 1.5]], r"prompts\[1\]: token ids are integers, got float 1.5 at position 1"),
        (False, ["a", {"promt": "b"}], r"prompts\[1\]: .*'prompt' or 'prompt_token_ids', got {'promt': 'b'}"),
        (False, [TURN], r"prompts\[0\]: a dict needs .* a conversation goes to LLM.chat"),
        (False, {"prompt": 5}, r"prompts: .* got int 5;"),
        (True, None, r"messages: a conversation is a list of messages such as {.*}, got NoneType None"),
        (True, "hi", r"messages: .* got str 'hi'"),
        (True, {}, r"messages: .* got dict {}"),
        (True, TURN, r"messages: .* got dict {'role': "),
        (True, [{"rol": "user", "content": "hi"}], r"messages: message 0 has no 'role': {'rol'"),
        (True, [TURN, {"role": "user", "text": "hi"}], r"messages: message 1 has no 'content': {'role'"),
        (True, ["hi"], r"messages\[0\]: .* got str 'hi'"),
        (True, [[TURN], TURN], r"messages\[1\]: .* got dict {'role'"),
        (True, [[TURN], ["hi"]], r"messages\[1\]: .* got str 'hi' at position 0"),
        (True, [[TURN], []], r"messages\[1\]: .* got list \[\]"),
    ],
)
def test_what_is_no_prompt_is_refused_before_anything_runs(
    llm: LLM, chat: bool, given: Any, message: str
) -> None:
    llm.reset_stats()
    with pytest.raises(RequestError, match=f"^{message}"):
        (llm.chat if chat else llm.generate)(given, use_tqdm=False)
    assert not llm.has_unfinished() and llm.stats()["prefill_tokens"] == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([{}, {"top_p": 2}], r"sampling_params\[1\]\.top_p: must be at most 1, got 2"),
        ([{}, 5], r"sampling_params\[1\]: expected a mapping of settings, got int 5"),
        ([{}], r"1 sampling_params for 2 prompts; give one for all, or one each"),
        (5, r"sampling_params: expected a mapping of settings, got int 5"),
        ("hot", r"sampling_params: expected a mapping of settings, got str 'hot'"),
        ({"temprature": 0}, r"sampling_params\.temprature: unknown setting \(did you mean 'temperature'"),
    ],
)
def test_wrong_sampling_params_are_refused_before_anything_runs(llm: LLM, params: Any, message: str) -> None:
    llm.reset_stats()
    with pytest.raises(ConfigError, match=f"^{message}"):
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert not llm.has_unfinished() and llm.stats()["prefill_tokens"] == 0


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == llm.chat([], use_tqdm=False) == []
    assert len(llm.generate(("a", "b"), {"max_tokens": 1}, use_tqdm=False)) == 2


def test_abort_takes_one_id_too(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder)
    for name in ("ab", "a", "c"):
        engine.add_request([1], GREEDY, request_id=name)
    engine.abort("ab", notify=False)
    engine.abort(["c"], notify=False)
    assert {delta.request_id for delta in engine.drain()} == {"a"}


def test_duplicate_ids_are_refused_while_they_live(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder)
    engine.add_request([1], GREEDY, request_id="a")
    with pytest.raises(RequestError, match="unique"):
        engine.add_request([2], GREEDY, request_id="a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "meta"}, "cpu and cuda; choose one of them, or auto"),
        ({"dtype": "int8"}, "dtype.*int8"),
        (
            {"max_model_len": 100000},
            r"max_model_len=100000 is above the model's max_position_embeddings of 512",
        ),
        ({"block_size": 0}, "block_size.*0"),
        ({"num_kv_blocks": 10**12}, r"num_kv_blocks=10{12} take .* of memory are free; choose at most \d+,"),
        ({"length_predictor": 5}, r"length_predictor=5 is no LengthPredictor"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"blok_size": 4}, "did you mean 'block_size'"),
        ({"attention": "triton"}, "triton.*needs a CUDA GPU"),
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


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory.\nmore"),
        RuntimeError("can't allocate memory"),
    ],
    ids=repr,
)
def test_sizes_that_memory_does_not_suffice_for_are_named(
    tiny_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    with LLM(str(tiny_path), **SMALL) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        expected = llm.generate([[1, 2]], greedy, use_tqdm=False)[0].outputs[0].token_ids
        with monkeypatch.context() as patch:
            patch.setattr("hispec.runner.plan_cache.make_plan_runtime", fail)
            words = r"^engine.max_num_seqs=\d+, .*, num_draft_tokens=2, num_checks=1: .*; lower one"
            with pytest.raises(ConfigError, match=words):
                llm.set_speculative({"draft": {"layer": 3}, "num_draft_tokens": 2, "num_checks": 1})
        assert llm.generate([[1, 2]], greedy, use_tqdm=False)[0].outputs[0].token_ids == expected
    monkeypatch.setattr("hispec.runner.plan_cache.make_plan_runtime", fail)
    with pytest.raises(ConfigError, match=r"engine.max_num_seqs=\d+, max_model_len=\d+: there is not enough"):
        LLM(str(tiny_path), **SMALL)


@pytest.mark.parametrize("request_id", [5, ["a"], None, b"a"], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_an_id_that_is_no_string_is_refused(tiny_path: Path, request_id: Any, n: int) -> None:
    with LLM(str(tiny_path), **SMALL) as llm:
        with pytest.raises(RequestError, match="request_id must be a string, not "):
            llm.add([1, 2], SamplingParams(n=n), request_id=request_id)
        assert not llm.has_unfinished()


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


def test_a_plan_whose_kv_finds_no_room_is_refused_and_the_one_before_stays(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny_path), **SMALL)
    plan = {"draft": {"kind": "model", "path": str(tiny_path)}, "num_draft_tokens": 2}
    with monkeypatch.context() as patch:
        patch.setattr(plan_cache, "free_memory_bytes", lambda: 10_000)
        with pytest.raises(ConfigError, match=r"num_kv_blocks=\d+ this plan needs .* MB of KV that"):
            llm.set_speculative(plan)
        assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None
    llm.set_speculative(plan)
    assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None


@pytest.mark.parametrize("arrival_s", [1e12, math.nan, math.inf, "now", True, -(10**400)])
def test_a_request_has_not_come_in_the_future(tiny_decoder: Decoder, arrival_s: Any) -> None:
    engine = make_engine(tiny_decoder)
    with pytest.raises(RequestError, match="must be a time of time"):
        engine.add_request([5, 6], SamplingParams(), arrival_s=arrival_s)
    assert engine.add_request([5, 6], SamplingParams(), arrival_s=0.0)


def test_speculation_cannot_change_under_live_requests(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), **SMALL)
    llm.add("abc", SamplingParams(max_tokens=5), "a")
    with pytest.raises(ConfigError, match="1 requests are unfinished"):
        llm.set_speculative({"draft": {"layer": 2}})
    with pytest.raises(RequestError, match="unfinished"):
        llm.generate("x")
    llm.abort("ab")  # one id, not two
    assert llm.has_unfinished()
    llm.abort("a")
    assert not llm.has_unfinished()
    llm.abort(["a", "a", "b"])
    llm.set_speculative({"draft": {"layer": 2}})
    assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None


def test_what_is_too_long_for_the_model_is_not_told_of_longer_settings(tiny_decoder: Decoder) -> None:
    limit = tiny_decoder.config.max_position_embeddings
    for length, raises in ((limit, False), (limit - 1, True)):
        problem = make_engine(tiny_decoder, max_model_len=length, num_kv_blocks=8).admission.too_long(limit)
        assert problem is not None and ("shorten it or raise max_model_len" in problem) == raises
