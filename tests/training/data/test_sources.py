"""Rows with responses and texts that are learnt as they stand; several sources together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from hispec import ConfigError
from tests.helpers.tiny import EOS_ID
from tests.helpers.training_data import (
    GOOD,
    MAX_LENGTH,
    OPENINGS,
    USER,
    answered,
    examples_of,
    make_config,
    texts,
    write,
)


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


@pytest.mark.usefixtures("no_model")
def test_a_limit_counts_rows_and_no_blank_lines(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    lines = [line for number in range(10) for line in (b"", answered(number))]
    source = {"path": str(write(tmp_path / "one.jsonl", lines)), "limit": 6}
    assert len(examples_of(make_config(model, tmp_path, [source]), tmp_path, tokenizer)) == 6


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
