"""Rows that cannot be used: named by file and line, left out or the end of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from hispec import ConfigError
from tests.helpers.training_data import (
    GOOD,
    MAX_LENGTH,
    USER,
    chat,
    examples_of,
    make_config,
    texts,
)

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
    "a call of a tool": (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, USER]},
        "messages: messages.content: must be text; calls of tools alone",
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
