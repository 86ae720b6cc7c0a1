"""The batch API: order, text, streaming, n, chat, and the public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hispec
from hispec import LLM, SamplingParams, SpeculativeConfig
from hispec.errors import RequestError
from hispec.jobs.rates import Rates
from tests.helpers.interrupts import Interrupts

SPECULATIVE = {
    "draft": {"kind": "exit", "layer": 3},
    "check": {"layer": 8},
    "num_draft_tokens": 2,
    "num_checks": 2,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> LLM:
    return LLM(str(tiny_path), speculative=SPECULATIVE, max_model_len=256, num_kv_blocks=64, max_num_seqs=3)


def test_outputs_come_in_input_order_with_prompts_and_metrics(llm: LLM) -> None:
    prompts = [
        "a long prompt that takes several chunks of prefill",
        "b",
        "hello there",
        "é ü 漢字",
        "x" * 100,
    ]
    outputs = llm.generate(
        prompts, [GREEDY.model_copy(update={"max_tokens": 3 + i}) for i in range(5)], use_tqdm=False
    )
    assert [output.prompt for output in outputs] == prompts
    for i, output in enumerate(outputs):
        one = output.outputs[0]
        assert len(one.token_ids) <= 3 + i and one.metrics is not None and output.metrics is one.metrics
        assert one.metrics.num_output_tokens == len(one.token_ids) and one.metrics.num_prompt_tokens == len(
            output.prompt_token_ids
        )
        assert llm.tokenizer is not None
        assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
        assert one.metrics.arrival_s <= one.metrics.first_token_s <= one.metrics.finished_s


def test_one_prompt_of_each_kind_is_taken(llm: LLM) -> None:
    token_ids = llm.encode("hello")
    for prompt in ("hello", token_ids, {"prompt": "hello"}, {"prompt_token_ids": token_ids}):
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].prompt_token_ids == token_ids


def test_a_prompt_that_is_too_long_for_a_stream_is_one_message_without_an_internal_id(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    assert llm.tokenizer is not None
    llm.tokenizer.model_max_length, before = 50, llm.tokenizer.model_max_length
    llm.tokenizer.deprecation_warnings.clear()  # transformers warns once
    try:
        with pytest.raises(RequestError, match=r"^the prompt has 300 tokens"):
            next(llm.stream("x" * 300, GREEDY))
    finally:
        llm.tokenizer.model_max_length = before
    assert not caplog.records


def test_chat_takes_parts_of_text_and_known_roles(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    token_ids = llm.encode([{"role": "user", "content": parts}], chat=True)
    assert token_ids == llm.encode([{"role": "user", "content": "hi\nyou"}], chat=True)
    for message, words in (
        ({"role": "usr", "content": "hi"}, r"messages\.0\.role must be one of system, .*got 'usr'"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            r"messages\.0\.content: part 0 .* 'image_url'",
        ),
        ({"role": "user", "content": None}, r"messages\.0\.content: must be text, .*got NoneType None"),
        ({"role": "user", "content": 5}, r"messages\.0\.content: must be text, .*got int 5"),
        ({"role": "user"}, "message 0 has no 'content'"),
    ):
        with pytest.raises(hispec.RequestError, match=words):
            llm.encode([message], chat=True)


@pytest.mark.parametrize(
    "unused", [{"tool_calls": None}, {"tool_calls": []}, {"refusal": None, "audio": None}]
)
def test_what_a_client_writes_of_fields_that_it_does_not_use_is_nothing(
    llm: LLM, unused: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As answers come back in a conversation; a template may ask whether a message has them."""
    asks = "{% for message in messages %}{% for name in message %}{{ name }} {% endfor %}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", asks)
    turn = {"role": "assistant", "content": "hi"}
    assert llm.encode([turn | unused], chat=True) == llm.encode([turn], chat=True)
    nothing = {"role": "assistant", "content": None, **unused}
    with pytest.raises(RequestError, match=r"messages\.0\.content: must be text"):
        llm.encode([nothing], chat=True)
    called = turn | {"content": None, "tool_calls": [{"id": "a"}]}
    assert llm.tokenizer is not None and "tool_calls" in llm.tokenizer.decode(llm.encode([called], chat=True))


@pytest.mark.parametrize("text", ["a\ud800", "caf\udce9"])
def test_half_of_a_surrogate_pair_is_named(llm: LLM, text: str) -> None:
    """The second is what Python makes of bytes of standard input that are not UTF-8."""
    with pytest.raises(hispec.RequestError, match=r"the prompt is no text: '.*' is half of a surrogate pair"):
        llm.encode(text)
    with pytest.raises(hispec.RequestError, match="the prompt is no text"):
        llm.encode([{"role": "user", "content": text}], chat=True)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    one, two = llm.chat(
        [messages, [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}]],
        GREEDY,
        use_tqdm=False,
    )
    assert one.prompt == "<|role|>user\nhi</s><|role|>assistant\n" and one.prompt_token_ids == llm.encode(
        messages, chat=True
    )
    assert two.prompt is not None and "yes</s>" in two.prompt
    assert (
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        == one.outputs[0].token_ids
    )


def test_stream_yields_the_same_as_generate_and_can_be_left(llm: LLM) -> None:
    whole = llm.generate("stream me", GREEDY, use_tqdm=False)[0].outputs[0]
    deltas = list(llm.stream("stream me", GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert (
        "".join(delta.text for delta in deltas) == whole.text
        and deltas[-1].finish_reason == whole.finish_reason
    )
    for _ in llm.stream("stream me", GREEDY):
        break
    assert not llm.has_unfinished() and not llm.step() and llm.stats()["kv_blocks_used"] == 0


def test_n_outputs_differ_by_seed_and_are_reproducible(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=10)
    first, again = (llm.generate("abc", params, use_tqdm=False)[0] for _ in range(2))
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert [output.token_ids for output in first.outputs] == [output.token_ids for output in again.outputs]
    assert len({tuple(output.token_ids) for output in first.outputs}) == 3
    second = llm.generate("abc", SamplingParams(temperature=1.0, seed=8, max_tokens=10), use_tqdm=False)[0]
    assert second.outputs[0].token_ids == first.outputs[1].token_ids


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them(tiny_path: Path) -> None:
    def sample() -> list[list[int]]:
        llm = LLM(str(tiny_path), max_model_len=64, num_kv_blocks=16, seed=3)
        return [
            output.outputs[0].token_ids
            for output in llm.generate(
                ["abc", "abc"], SamplingParams(temperature=1.0, max_tokens=10), use_tqdm=False
            )
        ]

    first, again = sample(), sample()
    assert first == again and first[0] != first[1]


def test_stop_strings_cut_text_where_they_begin(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    whole = llm.generate("tell me", params, use_tqdm=False)[0].outputs[0].text
    stop = whole[5:8]
    cut = llm.generate("tell me", params.model_copy(update={"stop": [stop]}), use_tqdm=False)[0].outputs[0]
    assert cut.text == whole[: whole.index(stop)] and (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_plans_switch_on_one_set_of_weights_and_agree(llm: LLM) -> None:
    wanted = llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    for plan in (None, {"draft": {"layer": 2}}, SpeculativeConfig.model_validate(SPECULATIVE)):
        llm.set_speculative(plan)
        got = llm.generate(["one", "two"], GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in wanted]


def test_a_folder_may_be_a_path_and_is_traced_by_name(tiny_path: Path, tmp_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, num_kv_blocks=16, trace=str(tmp_path / "trace.jsonl")) as llm:
        assert llm.generate("ab", {"max_tokens": 1}, use_tqdm=False)[0].error is None
    assert str(tiny_path) in (tmp_path / "trace.jsonl").read_text()


def test_stats_and_memory_are_counts(llm: LLM) -> None:
    llm.reset_stats()
    outputs = llm.generate(["one", "two", "three"], GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert stats["tokens"] == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert (
        stats["committed"]
        == sum(i * n for i, n in enumerate(stats["accept_length_histogram"]))
        >= stats["tokens"]
    )
    assert stats["rounds"] == sum(stats["accept_length_histogram"]) and stats["finished"] == 3
    assert set(llm.memory()) >= {"weights_bytes", "kv_bytes", "hidden_bytes"}
    llm.reset_stats()
    assert llm.stats()["tokens"] == llm.stats()["layer_passes"] == 0


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_plain_decoding_takes_one_pass_per_token_of_a_row_whatever_the_batch(
    llm: LLM, num_prompts: int
) -> None:
    llm.set_speculative(None)
    llm.reset_stats()
    lengths = [SamplingParams(temperature=0.0, max_tokens=4 + 3 * row) for row in range(num_prompts)]
    llm.generate(["one", "two", "three"][:num_prompts], lengths, use_tqdm=False)
    rates = Rates.of(llm.stats(), None)
    assert (rates.full_passes_per_token, rates.layer_passes_per_token) == (1.0, llm.stats()["num_layers"])


def test_public_names_are_importable_from_the_top() -> None:
    for name in hispec.__all__:
        assert getattr(hispec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LLLM'"):
        hispec.LLLM  # noqa: B018
    everything: dict[str, object] = {}
    exec("from hispec import *", everything)
    assert {name: everything[name] for name in hispec.__all__} == {
        name: getattr(hispec, name) for name in hispec.__all__
    }


def test_public_names_are_listed_before_their_first_use() -> None:
    code = "import hispec; assert sorted(hispec.__all__) == dir(hispec); assert 'LLM' not in vars(hispec)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(hispec.__file__).parents[1], check=True)


def test_type_checkers_see_every_public_name() -> None:
    """What is imported under TYPE_CHECKING is what is exported."""
    tree = ast.parse(Path(hispec.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert ast.unparse(block.test) == "TYPE_CHECKING" and names == {*hispec.__all__} - {"__version__"}


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_generate_leaves_nothing(llm: LLM, at: int) -> None:
    """Nor an output that was made in the step which was interrupted."""
    prompts = [[5, 6, 7], [8, 9], [10]]  # of which several end in one step
    wanted = [output.outputs for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    interrupts, count = Interrupts("hispec/llm.py", "hispec/outputs.py", at=at), -1
    while count < len(interrupts.lines):
        count = len(interrupts.lines)
        with suppress(KeyboardInterrupt), interrupts.armed():
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert not llm.has_unfinished() and not llm._finished
    assert count > 30
    again = [output.outputs for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert [one[0].token_ids for one in again] == [one[0].token_ids for one in wanted]


def test_a_stream_takes_no_name_that_a_request_has(llm: LLM) -> None:
    prompt, params = [5, 6, 7], GREEDY
    (wanted,) = llm.generate([prompt], params, use_tqdm=False)
    last = next(llm._numbers)
    taken = [f"stream-{last + number}" for number in (1, 2, 3)]
    for name in taken:
        llm.add(prompt, params, name)
    assert [token for delta in llm.stream(prompt, params) for token in delta.token_ids] == (
        wanted.outputs[0].token_ids
    )
    with pytest.raises(
        RequestError, match=r"^0 requests are unfinished, and step\(\) has not returned 3 that"
    ):
        llm.generate([prompt], params, use_tqdm=False)
    assert sorted(output.request_id for output in llm.step()) == sorted(taken)
    llm.generate([prompt], params, use_tqdm=False)
