"""The data of training: prompts read or written by the model, its own answers, and rows that cannot be
used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import hispec.llm
import hispec.training.data as data_module
from ee_models.checkpoint.loader import load_tokenizer, open_checkpoint
from ee_models.training.examples import Example
from hispec import LLM, ConfigError, SamplingParams
from hispec.errors import build
from hispec.training.data import make_examples
from hispec.training.schema import TrainConfig
from tests.helpers.tiny import EOS_ID, tiny_checkpoint

MAX_LENGTH = 120
USER = {"role": "user", "content": "What?"}


def answered(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    }


GOOD = [answered(1), answered(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("data") / "model", num_layers=3, tokenizer=True)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(open_checkpoint(model))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded, although there is nothing for it to write")

    monkeypatch.setattr(hispec.llm.LLM, "__init__", load)


def write(path: Path, lines: list[Any]) -> Path:
    """Objects as JSON, bytes as they are."""
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def make_config(model: Path, folder: Path, prompts: Any, **data: Any) -> TrainConfig:
    """`prompts`: lines of a file, or sources."""
    if not (isinstance(prompts[0], dict) and {"path", "opening"} & prompts[0].keys()):
        prompts = [{"path": str(write(folder / "in.jsonl", prompts))}]
    values = {"prompts": prompts, "max_tokens": 12, "max_length": MAX_LENGTH, "held_out": 1} | data
    return build(
        TrainConfig,
        {
            "model": str(model),
            "engine": {"max_num_seqs": 4, "max_run_ms": 0.0},
            "data": values,
            "adapters": {"exits": [{"layer": 1}]},
            "loop": {"num_steps": 1},
        }
        | {"output": {"path": str(folder / "out")}},
    )


def examples_of(config: TrainConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    (folder / "work").mkdir(exist_ok=True)
    return make_examples(config, folder / "work", tokenizer, progress=False)


def texts(examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """(prompt, response) of each."""
    return [
        (tokenizer.decode(e.token_ids[: e.prompt_len]), tokenizer.decode(e.token_ids[e.prompt_len :]))
        for e in examples
    ]


def chat(content: str) -> str:
    return f"<|role|>user\n{content}</s><|role|>assistant\n"


# ---- rows that cannot be used ----

BAD: dict[str, tuple[Any, str]] = {
    "not JSON": (b'{"prompt": "x"', "not valid JSON: "),
    "not UTF-8": (b'{"prompt": "\xff"}', "not valid JSON: "),
    "no object": ([1, 2], "needs a non-empty string in field 'prompt' (or `messages`); it has: list"),
    "no such field": (
        {"promt": "x", "id": 3},
        "needs a non-empty string in field 'prompt' (or `messages`); it has: promt, id",
    ),
    "no string": ({"prompt": 5}, "field 'prompt' must be a non-empty string, got 5"),
    "empty": ({"prompt": ""}, "field 'prompt' must be a non-empty string, got ''"),
    "blank": ({"prompt": " \n"}, "field 'prompt' must be a non-empty string, got ' \\n'"),
    "messages are text": ({"messages": "hello"}, "messages: "),
    "messages are nothing": ({"messages": None}, "messages: "),
    "no messages": ({"messages": []}, "messages: there is none"),
    "a message without content": (
        {"messages": [{"role": "user"}]},
        "messages: messages.content: required, but not given",
    ),
    "a message with more": (
        {"messages": [{**USER, "name": "x"}]},
        "messages: messages.name: unknown setting",
    ),
    "a message that is text": ({"messages": ["hello"]}, "messages: messages: expected a mapping"),
    "an empty question": ({"messages": [{"role": "user", "content": " "}]}, "the last message is empty"),
    "an empty response": (
        {"messages": [USER, {"role": "assistant", "content": " "}]},
        "the response is empty",
    ),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_by_file_and_line_and_left_out_or_ends_the_run(
    tmp_path: Path,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    row, words = BAD[what]
    lines = [GOOD[0], b"", row, GOOD[1]]
    examples = examples_of(make_config(model, tmp_path, lines), tmp_path, tokenizer)
    assert sorted(texts(examples, tokenizer)) == [(chat(f"question {n}"), f"answer {n}</s>") for n in (1, 2)]
    error = capsys.readouterr().err
    assert error.startswith("1 rows left out:\n") and f"{tmp_path / 'in.jsonl'}, line 3: {words}" in error
    with pytest.raises(ConfigError) as caught:
        examples_of(make_config(model, tmp_path, lines, on_bad_row="stop"), tmp_path, tokenizer)
    assert str(caught.value).startswith(f"{tmp_path / 'in.jsonl'}, line 3: {words}")
    assert str(caught.value).endswith("; mend the row, or set data.on_bad_row=skip")


LONG = {"messages": [USER, {"role": "assistant", "content": "x" * MAX_LENGTH}]}


@pytest.mark.usefixtures("no_model")
def test_a_row_that_is_too_long_is_left_out_with_its_length(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt_len = len(tokenizer.encode(chat("What?"), add_special_tokens=False))
    fits = {"messages": [USER, {"role": "assistant", "content": "x" * (MAX_LENGTH - prompt_len - 1)}]}
    examples = examples_of(make_config(model, tmp_path, [*GOOD, LONG, fits]), tmp_path, tokenizer)
    assert len(examples) == 3 and max(len(example.token_ids) for example in examples) == MAX_LENGTH
    words = (
        f"{prompt_len} tokens of prompt and {MAX_LENGTH + 1} of response are over"
        f" data.max_length={MAX_LENGTH}"
    )
    assert words in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"{words}; mend the row, or set data.on_bad_row=skip"):
        examples_of(make_config(model, tmp_path, [*GOOD, LONG], on_bad_row="stop"), tmp_path, tokenizer)


@pytest.mark.usefixtures("no_model")
def test_a_row_that_is_too_long_is_named_by_file_and_line(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    examples_of(make_config(model, tmp_path, [*GOOD, LONG]), tmp_path, tokenizer)
    assert "in.jsonl, line 3" in capsys.readouterr().err


def test_a_prompt_that_leaves_no_room_for_an_answer_is_left_out(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = examples_of(
        make_config(model, tmp_path, [*GOOD, {"prompt": "y" * MAX_LENGTH}, {"prompt": "short"}]),
        tmp_path,
        tokenizer,
    )
    assert len(examples) == 3
    assert f"max_model_len={MAX_LENGTH} must hold it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row", [{"prompt": "\ud800"}, b"[" * 100_000], ids=["half a surrogate pair", "nested without end"]
)
def test_a_row_that_python_chokes_on_is_a_bad_row(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, row: Any
) -> None:
    assert len(examples_of(make_config(model, tmp_path, [*GOOD, row]), tmp_path, tokenizer)) == 2


def test_a_conversation_that_the_template_refuses_is_a_bad_row(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    refused = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "yes"},
        ]
    }
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
            + str(template)
        )
        assert len(examples_of(make_config(model, tmp_path, [*GOOD, refused]), tmp_path, tokenizer)) == 2
    finally:
        tokenizer.chat_template = template


@pytest.mark.usefixtures("no_model")
def test_too_few_usable_rows_are_an_error(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"data: 2 usable examples, of which data.held_out=2 are held out; give more prompts",
    ):
        examples_of(make_config(model, tmp_path, [*GOOD, b"{"], held_out=2), tmp_path, tokenizer)
    empty = make_config(model, tmp_path, [b"", b"  "])
    with pytest.raises(
        ConfigError, match=r'has no rows; it needs one JSON object per line, such as {"prompt"'
    ):
        examples_of(empty, tmp_path, tokenizer)
    with pytest.raises(
        ConfigError,
        match=(
            r"data.prompts: cannot read .*nowhere.jsonl: No such file or directory; mend the path, or leave"
            r" this source out"
        ),
    ):
        examples_of(
            make_config(model, tmp_path, [{"path": str(tmp_path / "nowhere.jsonl")}]), tmp_path, tokenizer
        )


# ---- rows that can ----


@pytest.mark.usefixtures("no_model")
def test_given_responses_are_used_as_they_are(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    conversation = [
        USER,
        {"role": "assistant", "content": "This."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": " That.\n"},
    ]
    examples = examples_of(
        make_config(model, tmp_path, [{"messages": conversation}, GOOD[0]]), tmp_path, tokenizer
    )
    whole = "<|role|>user\nWhat?</s><|role|>assistant\nThis.</s><|role|>user\nAnd?</s><|role|>assistant\n"
    assert (whole, " That.\n</s>") in texts(examples, tokenizer)
    assert all(example.token_ids[-1] == EOS_ID for example in examples)


@pytest.mark.usefixtures("no_model")
def test_sources_are_taken_together_up_to_their_limits_and_shuffled_by_the_seed(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    one = write(tmp_path / "one.jsonl", [answered(number) for number in range(10)])
    two = write(tmp_path / "two.jsonl", [b"\xef\xbb\xbf" + json.dumps(answered(10)).encode(), answered(11)])
    sources = [{"path": str(one), "limit": 6}, {"path": str(two)}]

    def questions(seed: int) -> list[int]:
        config = make_config(model, tmp_path, sources).model_copy(update={"seed": seed})
        return [
            int(prompt.removeprefix("<|role|>user\nquestion ").split("<")[0])
            for prompt, _ in texts(examples_of(config, tmp_path, tokenizer), tokenizer)
        ]

    assert sorted(questions(0)) == [*range(6), 10, 11] != questions(0)
    assert questions(0) == questions(0) != questions(1)


def test_what_each_source_gave_is_said(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mix: sources differ in what cannot be used, and a text may be several examples."""
    one = write(tmp_path / "one.jsonl", [{"prompt": "hello"}, b"{", answered(1)])
    two = write(tmp_path / "two.jsonl", [{"text": "x" * (MAX_LENGTH + 20)}])
    sources = [{"path": str(one)}, {"path": str(two), "text": "text"}, OPENINGS[0]]
    examples = examples_of(make_config(model, tmp_path, sources), tmp_path, tokenizer)
    of_two = [example for example in examples if example.prompt_len == 1]
    learnt = sum(len(example.token_ids) - 1 for example in of_two)
    err = capsys.readouterr().err
    assert f"{one}: 2 examples, " in err and f"{two}: 2 examples, {learnt} tokens to learn\n" in err
    assert f"opening 'Tell me ': {len(examples) - 4} examples, " in err


def test_answers_are_the_models_own_by_turns_of_temperature(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    lines = [{"question": f"tell {number}", "prompt": "no"} for number in range(5)] + [
        {**GOOD[0], "question": "no"}
    ]
    source = write(tmp_path / "questions.jsonl", lines)
    config = make_config(
        model, tmp_path, [{"path": str(source), "field": "question"}], temperatures=[0.0, 0.9]
    )
    examples = examples_of(config, tmp_path, tokenizer)
    llm = LLM(str(model), max_model_len=MAX_LENGTH)
    num_greedy = num_sampled = 0
    for example, (prompt, response) in zip(examples, texts(examples, tokenizer), strict=True):
        if prompt == chat("question 1"):
            assert response == "answer 1</s>"
            continue
        assert prompt.startswith("<|role|>user\ntell ")
        greedy = llm.generate(
            {"prompt_token_ids": example.token_ids[: example.prompt_len]},
            SamplingParams(temperature=0.0, max_tokens=12),
            use_tqdm=False,
        )
        if greedy[0].outputs[0].token_ids == example.token_ids[example.prompt_len :]:
            num_greedy += 1
        else:
            num_sampled += 1
    assert (num_greedy, num_sampled) == (3, 2)


OPENINGS = [
    {"opening": "Tell me ", "count": 3, "max_tokens": 20},
    {"opening": "", "count": 4, "max_tokens": 20},
]


def test_prompts_are_written_by_the_model_and_begin_as_asked(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    examples = examples_of(make_config(model, tmp_path, OPENINGS), tmp_path, tokenizer)
    prompts = [prompt for prompt, _ in texts(examples, tokenizer)]
    assert all(
        prompt.startswith("<|role|>user\n") and prompt.endswith("</s><|role|>assistant\n")
        for prompt in prompts
    )
    assert (
        len(set(prompts)) == len(prompts)
        and 2 <= sum(prompt.startswith("<|role|>user\nTell me ") for prompt in prompts) <= 3
    )
    written = [json.loads(line) for line in (tmp_path / "work" / "written.jsonl").read_text().splitlines()]
    assert len(written) == 7 and len({row["outputs"][0]["text"] for row in written}) == 7
    asked = [
        json.loads(line)["prompt_token_ids"]
        for line in (tmp_path / "work" / "written.in.jsonl").read_text().splitlines()
    ]
    assert [tokenizer.decode(ids) for ids in asked] == ["<|role|>user\nTell me"] * 3 + ["<|role|>user\n"] * 4


def written_as(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model writes these, and is never asked for an answer."""

    def generate(
        config: Any, source: Any, target: Any, rows: list[dict[str, Any]], *_: Any
    ) -> Iterator[dict[str, Any]]:
        for row, text in zip(rows, texts, strict=True):
            yield {**row, "error": None, "outputs": [{"text": text, "token_ids": [1, 2, 3]}]}

    monkeypatch.setattr(data_module, "_generate", generate)


@pytest.mark.parametrize(
    ("opening", "text", "prompt"),
    [
        ("Tell me ", " about the sea", "Tell me about the sea"),
        ("", " Why is the sky blue? ", "Why is the sky blue?"),
        ("Text:\n\n", "Once upon a time", "Text:\n\nOnce upon a time"),
        ("Tell me", " about the sea", "Tell me about the sea"),
        ("Who ", "ever is there?", "Who ever is there?"),
    ],
)
def test_an_opening_stands_as_given_and_what_follows_is_joined_by_one_space(
    tmp_path: Path,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    opening: str,
    text: str,
    prompt: str,
) -> None:
    written_as([text], monkeypatch)
    config = make_config(model, tmp_path, [{"opening": opening, "count": 1}])
    assert [written.messages for written in data_module._written(config, tmp_path, tokenizer, False)] == [
        [{"role": "user", "content": prompt}]
    ]


def test_what_is_short_or_repeated_is_no_prompt(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_as([" about the sea", " about the sea", " it", " about the sky"], monkeypatch)
    config = make_config(model, tmp_path, [{"opening": "Tell me ", "count": 4}])
    found = [
        written.messages[0]["content"] for written in data_module._written(config, tmp_path, tokenizer, False)
    ]
    assert found == ["Tell me about the sea", "Tell me about the sky"]


# ---- again ----


def test_a_second_run_generates_nothing_again(
    tmp_path: Path,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    sources = [*OPENINGS, {"path": str(write(tmp_path / "in.jsonl", [*GOOD, {"prompt": "hello"}]))}]
    first = examples_of(make_config(model, tmp_path, sources), tmp_path, tokenizer)
    before = {path.name: path.read_bytes() for path in (tmp_path / "work").iterdir()}
    request.getfixturevalue("no_model")
    assert examples_of(make_config(model, tmp_path, sources), tmp_path, tokenizer) == first
    assert {path.name: path.read_bytes() for path in (tmp_path / "work").iterdir()} == before
    assert sorted(before) == [
        *("answers.jsonl", "answers.jsonl.manifest.json", "prompts.jsonl"),
        *("written.in.jsonl", "written.jsonl", "written.jsonl.manifest.json"),
    ]


@pytest.mark.parametrize("killed_at", [3, 30, 60])
def test_a_killed_run_goes_on_row_by_row_and_ends_the_same(
    tmp_path: Path,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: int,
) -> None:
    class Killed(BaseException):
        pass

    sources = [
        *OPENINGS,
        {"path": str(write(tmp_path / "in.jsonl", [{"prompt": f"hello {number}"} for number in range(6)]))},
    ]
    config = make_config(model, tmp_path, sources)
    step, count = LLM.step, [0]

    def counted(self: LLM) -> Any:
        count[0] += 1
        if count[0] == killed_at:
            raise Killed
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "step", counted)
        with pytest.raises(Killed):
            examples_of(config, tmp_path, tokenizer)
    done = {path: path.read_bytes() for path in (tmp_path / "work").glob("*.jsonl")}
    resumed = examples_of(config, tmp_path, tokenizer)
    assert all(path.read_bytes().startswith(content) for path, content in done.items()), (
        "rows that were done were not kept"
    )
    assert any(
        path.name in ("written.jsonl", "answers.jsonl") and content for path, content in done.items()
    ) == (killed_at > 3)
    (tmp_path / "whole").mkdir()
    assert resumed == examples_of(config, tmp_path / "whole", tokenizer)


def test_answers_of_other_prompts_are_refused(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    examples_of(
        make_config(model, tmp_path, [{"prompt": f"hello {number}"} for number in range(3)]),
        tmp_path,
        tokenizer,
    )
    with pytest.raises(ConfigError, match=r"answers.jsonl holds what other prompts or settings gave"):
        examples_of(
            make_config(model, tmp_path, [{"prompt": f"goodbye {number}"} for number in range(3)]),
            tmp_path,
            tokenizer,
        )


# ---- outputs of a job ----


def output(index: int, *token_ids: int) -> dict[str, Any]:
    return {"index": index, "error": None, "outputs": [{"text": "", "token_ids": list(token_ids)}]}


def given(folder: Path, rows: list[Any], outputs: list[Any]) -> list[dict[str, str]]:
    files = write(folder / "rows.jsonl", rows), write(folder / "outputs.jsonl", outputs)
    return [{"path": str(files[0]), "outputs": str(files[1])}]


def test_what_another_run_has_answered_is_learnt_token_for_token(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    prompts = [{"prompt": f"hello {number}"} for number in range(4)]
    first = examples_of(make_config(model, tmp_path / "first", prompts), tmp_path / "first", tokenizer)
    work = tmp_path / "first" / "work"
    source = {"path": str(work / "prompts.jsonl"), "outputs": str(work / "answers.jsonl")}
    monkeypatch.setattr(hispec.llm.LLM, "__init__", None)  # there is nothing for it to write
    again = examples_of(make_config(model, tmp_path, [source]), tmp_path, tokenizer)
    assert sorted(each.token_ids for each in again) == sorted(each.token_ids for each in first)
    assert sorted(each.prompt_len for each in again) == sorted(each.prompt_len for each in first)


@pytest.mark.usefixtures("no_model")
def test_outputs_belong_to_the_rows_of_their_index(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blank lines have none, outputs are in any order; rows without one, of an error or without `messages`
    are left out."""
    asked = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(4)]
    failed = {"index": 3, "error": {"message": "it was too long"}, "outputs": []}
    rows = [asked[0], b"", asked[1], {"prompt": "x"}, asked[2], asked[3]]
    outputs = [output(4, 7, 8), failed, b"", output(0, 5, 6), output(2, 9, 9)]
    config = make_config(model, tmp_path, given(tmp_path, rows, outputs))
    found = {
        tokenizer.decode(each.token_ids[: each.prompt_len]): each.token_ids[each.prompt_len :]
        for each in examples_of(config, tmp_path, tokenizer)
    }
    assert found == {chat("question 0"): [5, 6], chat("question 3"): [7, 8]}
    err = capsys.readouterr().err
    assert "rows.jsonl, line 3: " in err and "outputs.jsonl has no output of it" in err
    assert "rows.jsonl, line 4: responses of `outputs` are to `messages`" in err
    assert "rows.jsonl, line 5: it was too long" in err


def test_outputs_of_other_rows_end_the_run(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Told by the hash that a job writes of each row."""
    (tmp_path / "first").mkdir()
    prompts = [{"prompt": f"hello {number}"} for number in range(3)]
    examples_of(make_config(model, tmp_path / "first", prompts), tmp_path / "first", tokenizer)
    work = tmp_path / "first" / "work"
    rows = (work / "prompts.jsonl").read_bytes().splitlines()
    path = write(tmp_path / "rows.jsonl", [rows[0], rows[2], rows[1]])
    source = {"path": str(path), "outputs": str(work / "answers.jsonl")}
    with pytest.raises(ConfigError, match=r"row 1 of outputs .* answers another row than .*line 2"):
        examples_of(make_config(model, tmp_path, [source]), tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([output(0, 5, 6), b"{"], "outputs .*outputs.jsonl, line 2, is no output of `hispec run`"),
        ([GOOD[0]], "line 1, is no output"),
        ([[1]], "line 1, is no output"),
        ([{"index": 0, "error": None, "outputs": []}], "line 1, is no output"),
        ([{"index": 0, "error": "x", "outputs": []}], "go on with the job if it was interrupted"),
        ([{"index": 0, "error": None, "outputs": [{"token_ids": None}]}], "line 1, has no token_ids"),
        ([{"index": 0, "error": None, "outputs": [{"text": "x"}]}], "line 1, has no token_ids; run the job"),
        (None, "data.prompts: cannot read .*nowhere.jsonl: No such file.*; mend the path"),
    ],
)
def test_what_is_no_output_of_a_job_ends_the_run(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, outputs: list[Any] | None, message: str
) -> None:
    sources = given(tmp_path, [{"messages": GOOD[0]["messages"][:1]}], outputs or [])
    if outputs is None:
        sources[0]["outputs"] = str(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match=message):
        examples_of(make_config(model, tmp_path, sources), tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"path": "a.jsonl", "answer": "reply", "outputs": "b.jsonl"},
            "responses are either a field of the file",
        ),
        ({"opening": "", "count": 1, "outputs": "b.jsonl"}, "`outputs` belongs to a file"),
    ],
)
def test_outputs_are_the_only_responses(
    tmp_path: Path, model: Path, source: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(model, tmp_path, [source])


# ---- texts ----


@pytest.mark.usefixtures("no_model")
def test_a_text_is_learnt_as_it_stands_in_pieces(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token but the first; `messages` of such a row mean nothing."""
    long = "".join(chr(97 + n % 26) for n in range(2 * MAX_LENGTH + 20))
    rows = [{"body": long, "messages": []}, {"body": "too short"}, {"body": ""}, {"text": "x"}]
    path = str(write(tmp_path / "texts.jsonl", rows))
    config = make_config(model, tmp_path, [{"path": path, "text": "body"}])
    examples = examples_of(config, tmp_path, tokenizer)
    assert sorted(len(example.token_ids) for example in examples) == [20, MAX_LENGTH, MAX_LENGTH]
    assert {example.prompt_len for example in examples} == {1}
    assert "".join(tokenizer.decode(example.token_ids) for example in examples) == long
    err = capsys.readouterr().err
    assert "line 2: the text has 9 tokens; 16 are the least to learn from" in err
    assert "line 3: field 'body' must be a non-empty string, got ''" in err
    assert "line 4: needs a non-empty string in field 'body'; it has: text" in err


@pytest.mark.parametrize("other", [{"field": "prompt"}, {"answer": "reply"}, {"outputs": "out.jsonl"}])
def test_a_text_has_neither_prompt_nor_answer(tmp_path: Path, model: Path, other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="`text` is learnt as it stands; leave out `field`, `answer` and"):
        make_config(model, tmp_path, [{"path": "x.jsonl", "text": "body", **other}])
