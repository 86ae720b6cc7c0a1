"""OpenAI's Batch API: its lines become its responses, and what is no request says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hispec.errors import ConfigError
from hispec.jobs.rows import Row, read_rows
from hispec.openai.requests import read_body
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import install_fake_llm, make_job, rows_of, run


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)


def request(custom_id: Any, body: Any, url: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | fields


CHAT = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hé"}]}


def openai_rows(folder: Path, lines: list[Any], **fields: Any) -> list[dict[str, Any]]:
    job = make_job(folder, lines, **fields)
    run(job)
    return rows_of(job)


def test_openai_requests_become_openai_responses(tmp_path: Path) -> None:
    lines = [
        request("1", CHAT | {"max_completion_tokens": 6, "n": 2, "user": "me"}),
        request("2", {"prompt": "hello", "max_tokens": 4}, "/v1/completions"),
        request("3", {"prompt": [104, 105], "stop": "z"}, "/v1/completions"),
        request("4", CHAT | {"stream": True}),
        request("5", CHAT | {"tools": [{"type": "function"}]}),
        request("6", {"prompt": ""}, "/v1/completions"),
    ]
    chat, text, ids, *bad = openai_rows(tmp_path, lines)
    assert [row["custom_id"] for row in (chat, text, ids, *bad)] == [str(at) for at in range(1, 7)]
    assert set(chat) == {"id", "custom_id", "response", "error"} and chat["error"] is None
    assert chat["response"]["status_code"] == 200 and chat["response"]["request_id"]
    body = chat["response"]["body"]
    assert (body["object"], body["model"], len(body["choices"])) == ("chat.completion", "fake", 2)
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 6
    assert choice["finish_reason"] == "length" and choice["index"] == 0 and choice["logprobs"] is None
    prompt = len("<user>hé")
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}
    body = text["response"]["body"]
    assert body["object"] == "text_completion" and len(body["choices"][0]["text"]) == 4
    assert ids["response"]["body"]["usage"]["prompt_tokens"] == 2
    assert [row["response"]["status_code"] for row in bad] == [400] * 3
    errors = [row["response"]["body"]["error"] for row in bad]
    assert {error["type"] for error in errors} == {"invalid_request_error"}
    assert "stream=true" in errors[0]["message"] and "body.tools=" in errors[1]["message"]
    assert "the prompt is empty" in errors[2]["message"]


def test_equal_requests_have_ids_of_their_own_and_a_job_goes_on_from_either_form(tmp_path: Path) -> None:
    job = make_job(tmp_path, [request(name, CHAT) for name in "abc"])
    run(job)
    found = rows_of(job)
    of_rows = [(row["id"], row["response"]["request_id"], row["response"]["body"]["id"]) for row in found]
    assert all(len(set(ids)) == 3 for ids in zip(*of_rows, strict=True))
    first = job.output.path.read_bytes().splitlines(keepends=True)[0]
    name = found[0]["id"].encode()
    for written in (first, first.replace(name, name[: name.rindex(b"-")])):  # as earlier versions wrote it
        job.output.path.write_bytes(written)
        assert run(job).resumed == 1
    lines = [request("\ud800", CHAT), request("b", CHAT)]
    half = openai_rows(tmp_path, lines, output={"path": str(tmp_path / "half.jsonl")})
    assert [row["response"]["status_code"] for row in half] == [400, 200]


def test_what_openai_allows_is_taken(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "yo", "refusal": None, "name": "me"}
    chat = {"messages": [*CHAT["messages"], said], "seed": -1, "top_p": 0, "temperature": 1.0}
    lines = [request("a", chat), request("b", {"prompt": [[104, 105]], "max_tokens": 2}, "/v1/completions")]
    rows = openai_rows(tmp_path, lines)
    assert [row["response"]["status_code"] for row in rows] == [200, 200]
    read = read_body("/v1/chat/completions", chat)["sampling"]
    assert read == {"seed": 2**63 - 1, "top_p": 1.0, "top_k": 1, "temperature": 1.0}


def test_openai_requests_that_fail_while_they_are_served_have_500_and_are_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = FakeLLM._result
    lines = [request(str(at), CHAT) for at in range(3)]

    def failing(asked: list[Any]) -> Any:
        made = result(asked)
        return replace(made, outputs=[], error="gave up") if asked[0] == "row-1" else made

    with monkeypatch.context() as patch:
        patch.setattr(FakeLLM, "_result", staticmethod(failing))
        rows = openai_rows(tmp_path, lines)
    assert [row["response"]["status_code"] for row in rows] == [200, 500, 200]
    error = rows[1]["response"]["body"]["error"]
    assert (error["type"], error["message"]) == ("server_error", "gave up")
    job = make_job(tmp_path, lines, output={"retry_failed": True})
    assert run(job).resumed == 2
    assert [row["response"]["status_code"] for row in rows_of(job)] == [200] * 3


def test_openai_chats_end_by_themselves_unless_the_job_or_the_body_says_otherwise(tmp_path: Path) -> None:
    for sampling, body, wanted in (
        ({}, {}, None),
        ({}, {"max_tokens": 3}, 3),
        ({"max_tokens": 7}, {}, 7),
        ({"max_tokens": 7}, {"max_completion_tokens": 3}, 3),
    ):
        job = make_job(tmp_path, [request("a", CHAT | body)], sampling=sampling)
        (row,) = read_rows(job, job.input)
        assert isinstance(row, Row) and row.sampling.max_tokens == wanted
    text = make_job(tmp_path, [request("a", {"prompt": "x"}, "/v1/completions")], sampling={})
    (row,) = read_rows(text, text.input)
    assert isinstance(row, Row) and row.sampling.max_tokens == 16  # OpenAI's too


def test_openai_jobs_go_on_and_do_failed_rows_again(tmp_path: Path) -> None:
    lines = [request(str(at), CHAT) for at in range(5)] + [request("bad", {"prompt": ""}, "/v1/completions")]
    job = make_job(tmp_path, lines)
    run(job)
    whole = job.output.path.read_bytes().splitlines(keepends=True)
    for torn in (whole[3][:50], whole[3][:-1], whole[3][:-9]):
        job.output.path.write_bytes(b"".join(whole[:3]) + torn)
        assert run(job).resumed == 3 and len(rows_of(job)) == 6
    half = b"".join(whole[:3]) + whole[3][:-9] + b"\n"
    job.output.path.write_bytes(half)
    with pytest.raises(ConfigError, match=r"line 4 of .* is no row of an output"):
        run(job)
    job.output.path.write_bytes(b"".join(whole))
    job = make_job(tmp_path, lines, output={"retry_failed": True})
    report = run(job)
    assert report.resumed == 5 and report.timed.num_errors == 1 and len(rows_of(job)) == 6


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (request(7, CHAT), "custom_id: must be a text, got 7"),
        (request("", CHAT), "custom_id: must be a text"),
        (request("a", CHAT, method="GET"), "method: must be POST, got 'GET'"),
        (request("a", CHAT, "/v1/embeddings"), "url: must be /v1/chat/completions or"),
        (request("a", 3), "body: expected a JSON object, got 3"),
        (request("a", {"model": "m"}), "body.messages: required"),
        (
            request("a", CHAT | {"temprature": 1}),
            "body.temprature: unknown parameter (did you mean",
        ),
        (request("a", CHAT | {"max_tokens": 3, "max_completion_tokens": 4}), "contradict each other"),
        (request("a", CHAT | {"top_logprobs": 3}), "top_logprobs needs logprobs=true"),
        (request("a", CHAT | {"logprobs": 3}), "logprobs: must be true or false"),
        (request("a", CHAT | {"response_format": {"type": "json_object"}}), "response_format="),
        (request("a", CHAT | {"temperature": -1}), "temperature: must be at least 0"),
        (
            request("a", {"prompt": ["a", "b"]}, "/v1/completions"),
            "must be one string or one list of token ids",
        ),
        (request("a", CHAT, extra=1), "extra: unknown key"),
    ],
)
def test_openai_requests_that_cannot_be_served_say_why(
    tmp_path: Path, line: dict[str, Any], words: str
) -> None:
    good, bad = openai_rows(tmp_path, [request("good", CHAT), line])
    assert good["response"]["status_code"] == 200 and bad["response"]["status_code"] == 400
    assert words in bad["response"]["body"]["error"]["message"]


def test_the_first_line_that_is_an_object_decides_for_all(tmp_path: Path) -> None:
    whole, bare = request("a", CHAT), request("b", CHAT)
    del bare["body"]
    for lines in ([b"{broken\n", whole, bare, {"id": "c", "prompt": "x"}], [bare, whole]):
        rows = openai_rows(tmp_path, lines, output={"overwrite": True})
        ids = {"a": 200, "b": 400}
        assert all(set(row) == {"id", "custom_id", "response", "error"} for row in rows)
        assert {row["custom_id"]: row["response"]["status_code"] for row in rows if row["custom_id"]} == ids
    job = make_job(tmp_path, [{"id": "c", "prompt": "x"}, whole], output={"overwrite": True})
    run(job)
    good, bad = rows_of(job)
    assert good["error"] is None and "custom_id: unknown setting" in bad["error"]["message"]


def test_a_row_with_a_prompt_of_its_own_is_no_request(tmp_path: Path) -> None:
    job = make_job(tmp_path, [{"custom_id": "a", "url": "https://example.org", "prompt": "x"}])
    run(job)
    (row,) = rows_of(job)
    assert "id" in row and "custom_id: unknown setting" in row["error"]["message"]


def test_columns_make_rows_of_what_would_be_requests(tmp_path: Path) -> None:
    line = {"custom_id": "a", "body": "hello"}
    job = make_job(tmp_path, [line], input={"columns": {"id": "custom_id", "prompt": "body"}})
    run(job)
    (row,) = rows_of(job)
    assert (row["id"], row["prompt"], row["error"]) == ("a", "hello", None)


def test_an_output_of_rows_is_not_gone_on_with_by_requests(tmp_path: Path) -> None:
    run(make_job(tmp_path, [{"id": "a", "prompt": "x"}]))
    with pytest.raises(ConfigError, match=r"input\.format was not set and is 'openai'"):
        run(make_job(tmp_path, [request("b", CHAT), {"id": "a", "prompt": "x"}]))


def test_what_asks_for_nothing_is_let_pass(tmp_path: Path) -> None:
    nothing = {
        "stream": False,
        "tools": [],
        "response_format": {"type": "text"},
        "stop": None,
        "suffix": None,
    }
    (row,) = openai_rows(tmp_path, [request("a", CHAT | nothing)])
    assert row["response"]["status_code"] == 200
