"""Responses that are the output of a job."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import hispec.llm
from hispec import ConfigError
from tests.helpers.training_data import (
    GOOD,
    chat,
    examples_of,
    make_config,
    write,
)


def output(index: int, *token_ids: Any) -> dict[str, Any]:
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
    marked = tmp_path / "marked.jsonl"  # as some editors save it, which is no part of its first row
    marked.write_bytes(codecs.BOM_UTF8 + (work / "prompts.jsonl").read_bytes())
    source = {"path": str(marked), "outputs": str(work / "answers.jsonl")}
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
        ([output(0, 5, "6")], "line 1, has '6' among its token_ids, which must be whole numbers from 0 on"),
        ([output(0, 5, True)], "line 1, has True among its token_ids"),
        ([output(0, -5, 6)], "line 1, has -5 among its token_ids"),
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


def test_outputs_that_are_too_deep_are_none(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    sources = given(tmp_path, [{"messages": GOOD[0]["messages"][:1]}], [])
    Path(sources[0]["outputs"]).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="line 1, is no output"):
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
