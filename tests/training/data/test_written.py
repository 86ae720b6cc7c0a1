"""Prompts and answers that the model itself writes, and a run that goes on where it was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import hispec.training.data as data_module
from ee_models.checkpoint.loader import load_tokenizer, open_checkpoint
from hispec import LLM, ConfigError, SamplingParams
from hispec.training.data import BadRows
from tests.helpers.training_data import (
    GOOD,
    MAX_LENGTH,
    OPENINGS,
    chat,
    examples_of,
    make_config,
    texts,
    write,
)


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
    assert [
        written.messages
        for written in data_module._written(config, tmp_path, tokenizer, BadRows(stop=False), False)
    ] == [[{"role": "user", "content": prompt}]]


def test_what_is_short_or_repeated_is_no_prompt(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_as([" about the sea", " about the sea", " it", " about the sky"], monkeypatch)
    config = make_config(model, tmp_path, [{"opening": "Tell me ", "count": 4}])
    found = [
        written.messages[0]["content"]
        for written in data_module._written(config, tmp_path, tokenizer, BadRows(stop=False), False)
    ]
    assert found == ["Tell me about the sea", "Tell me about the sky"]


def test_a_prompt_that_could_not_be_written_is_named(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its opening is longer than the model may read."""
    sources = [{"opening": MAX_LENGTH * "a", "count": 2}, *OPENINGS]
    assert examples_of(make_config(model, tmp_path, sources), tmp_path, tokenizer)
    err = capsys.readouterr().err
    assert "2 rows left out:" in err and "written prompt 1 (opening 'aaa" in err and "written prompt 2" in err
    with pytest.raises(ConfigError, match=r"written prompt 1 .*set data.on_bad_row=skip"):
        examples_of(make_config(model, tmp_path, sources, on_bad_row="stop"), tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('begin with the system') }}", "refuses a conversation .*begin with the system"),
        ("{{ messages[0]['content'] | length }}", "does not repeat the user's text as it is"),
    ],
)
def test_templates_that_do_not_show_where_the_user_begins_are_refused_for_openings(
    tmp_path: Path, model: Path, template: str, why: str
) -> None:
    tokenizer = load_tokenizer(open_checkpoint(model))
    assert tokenizer is not None
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=f"its chat template {why}.*give files of prompts"):
        examples_of(make_config(model, tmp_path, OPENINGS), tmp_path, tokenizer)


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
