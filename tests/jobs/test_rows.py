"""Input and output rows, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hispec.errors import build
from hispec.jobs.inputs import Record
from hispec.jobs.output import RowError, output_row
from hispec.jobs.rows import BadRow, Row, parse_row, read_rows
from hispec.jobs.schema import InputConfig, OutputConfig, RunConfig
from tests.helpers.job_support import make_job, parse


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b'{"prompt": "a"', "not valid JSON"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8 (byte 15 of the line)"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "sampling": {"temperature": NaN}}', "NaN is no JSON number"),
        (b'{"prompt": "a", "sampling": {"temperature": 1e999}}', "1e999 is too large a number"),
        (b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", "not valid JSON: an integer of 5000 digits"),
        (b"[" * 100_000, "not valid JSON: nested too deeply"),
        (b'{"prompt": "a", "id": 1, "prompt": "b"}', "not valid JSON: key 'prompt' is given twice"),
        (b'{"prompt": "a", "sampling": {"n": 1, "n": 2}}', "key 'n' is given twice"),
        (b'"hello"', "expected a JSON object"),
        (b"{}", "exactly one of prompt, prompt_token_ids and messages, got none"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "got prompt and messages"),
        (b'{"promt": "a"}', "did you mean 'prompt'?"),
        (b'{"question": "a"}', "input.columns, such as {prompt: question}, says where a row's fields are"),
        (
            b'{"kind": 1, "messages": [{"role": "user", "content": "a"}]}',
            "such as {messages: messages}, says",
        ),
        (b'{"prompt": 3}', "prompt: must be a string, got 3"),
        (b'{"prompt_token_ids": [1, "2"]}', "prompt_token_ids.1: must be an integer"),
        (b'{"messages": []}', "messages: "),
        (b'{"messages": [{"role": "user"}]}', "messages.0.content: required"),
        (
            b'{"prompt": "a", "sampling": {"temprature": 1}}',
            "sampling.temprature: unknown setting (did you mean 'temperature'?)",
        ),
        (
            b'{"prompt": "a", "sampling": {"max_tokens": -1}}',
            "sampling.max_tokens: must be at least 1, got -1",
        ),
        (
            b'{"prompt": "a", "sampling": {"stop": 5}}',
            "sampling.stop: must be a string or a list of strings, got 5",
        ),
        (b'{"prompt": "a", "sampling": {"min_tokens": 99}}', "min_tokens=99 is above max_tokens=16"),
        (b'{"prompt": "a", "id": 1.5}', "line 7: id: must be a string or an integer, got 1.5"),
        (
            b'{"messages": [{"role": "usr", "content": "a"}]}',
            "messages.0.role: must be 'system', 'user', 'assistant' or 'tool', got 'usr'",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "audio"}]}]}',
            "messages.0.content: part 1 is of type 'audio'; only parts such as",
        ),
        (b'{"messages": [{"role": "user", "content": [3]}]}', "messages.0.content: part 0 is 3; only"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages.0.content: must be a string, got 3"),
    ],
)
def test_a_bad_line_is_named_by_number(raw: bytes, part: str) -> None:
    row = parse(raw)
    assert isinstance(row, BadRow)
    assert row.message.startswith("line 7: ") and part in row.message
    assert len(row.message) <= 1000


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = parse({"messages": [{"role": "user", "content": parts}]})
    assert isinstance(row, Row) and row.prompt == [{"role": "user", "content": "a\nb"}]


def test_a_message_has_what_its_template_reads_and_null_is_as_if_it_were_not_given() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    row = parse(
        {
            "id": None,
            "prompt": None,
            "messages": [
                {"role": "user", "content": "hi", "name": "bob"},
                {"role": "assistant", "content": "yo", "refusal": None, "tool_calls": []},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "noon", "tool_call_id": "1"},
            ],
            "sampling": {"stop": None, "top_k": None, "max_tokens": None},
        }
    )
    assert isinstance(row, Row) and row.sampling.max_tokens is None and row.sampling.stop == []
    assert row.prompt == [
        {"role": "user", "content": "hi", "name": "bob"},
        {"role": "assistant", "content": "yo"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    own = parse({"prompt": "a", "sampling": {"seed": None, "logprobs": None}}, seed=5, logprobs=3)
    assert isinstance(own, Row) and (own.sampling.seed, own.sampling.logprobs) == (5, 3)
    assert isinstance(parse({"prompt": "a", "sampling": None}), Row)


def test_a_row_puts_its_sampling_over_the_jobs() -> None:
    row = parse({"prompt": "a", "sampling": {"top_k": 5}}, temperature=0.5, seed=9)
    assert isinstance(row, Row)
    assert (row.sampling.top_k, row.sampling.temperature, row.sampling.seed) == (5, 0.5, 9)
    fewer = parse({"prompt": "a", "sampling": {"max_tokens": 5}}, min_tokens=9, max_tokens=20)
    assert isinstance(fewer, Row) and (fewer.sampling.min_tokens, fewer.sampling.max_tokens) == (5, 5)


def test_a_row_without_a_seed_gets_one_that_depends_on_its_place_alone() -> None:
    first, again = parse({"prompt": "a"}), parse({"prompt": "b"})
    assert isinstance(first, Row) and isinstance(again, Row)
    assert first.sampling.seed == again.sampling.seed is not None
    config = InputConfig(path=Path("in.jsonl"))
    elsewhere = parse_row(build(RunConfig, {"model": "fake"}), config, 4, Record(None, 7, b'{"prompt": "a"}'))
    assert isinstance(elsewhere, Row) and elsewhere.sampling.seed != first.sampling.seed


def test_the_content_hash_tells_prompts_and_own_sampling_apart() -> None:
    base = parse({"prompt": "a"}).content_hash
    same: list[dict[str, Any]] = [{"id": 5, "prompt": "a", "metadata": 1}]
    assert {parse(line).content_hash for line in same} == {base}
    assert parse(b'{ "prompt" :"\\u0061"}').content_hash == base
    others = [{"prompt": "b"}, {"prompt": "a", "sampling": {"top_k": 3}}, {"prompt_token_ids": [97]}]
    hashes = {parse(line).content_hash for line in others}
    assert base not in hashes and len(hashes) == 3


def test_blank_lines_count_as_lines_but_are_no_rows(tmp_path: Path) -> None:
    job = make_job(tmp_path, [b"\xef\xbb\xbf", {"prompt": "a"}, b"\n", b"  \r\n", {"prompt": "b"}, b"\n"])
    assert [(row.index, row.line) for row in read_rows(job, job.input)] == [(0, 1), (1, 4)]
    limited = InputConfig(path=job.input.path, limit=1)
    assert len(list(read_rows(job, limited))) == 1


def test_row_errors_carry_their_type() -> None:
    values = output_row(
        parse(b"broken"), RowError("invalid_line", "line 7: broken"), OutputConfig(path=Path("o"))
    )
    assert values["error"] == {"type": "invalid_line", "message": "line 7: broken", "line": 7}
