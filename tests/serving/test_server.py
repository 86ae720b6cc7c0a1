"""The HTTP server: OpenAI's own client against it, its limits, and clients that leave or send nonsense."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from starlette.requests import Request

from hispec import LLM, SamplingParams
from hispec.outputs import RequestOutput
from hispec.serving import app, completions, transport
from hispec.serving.transport import Failure, check_key, event
from tests.serving.support import LONG, SMALL, Running, events, post, serving, wait_until

GREEDY = {"temperature": 0.0, "max_tokens": 12}
CHAT = [{"role": "user", "content": "one two three"}]
PLAN = {"draft": {"layer": 3}, "check": {"layer": 6}, "num_draft_tokens": 2}


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Running]:
    with serving(tiny_path, engine={"speculative": PLAN}) as running:
        yield running


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), **SMALL) as plain:
        yield plain


@pytest.fixture(autouse=True)
def nothing_is_left(server: Running) -> Iterator[None]:
    yield
    server.settle()


def test_completions_are_those_of_generate(server: Running, llm: LLM) -> None:
    params = {"temperature": 0.8, "max_tokens": 12, "n": 2, "seed": 5, "top_p": 0.9}
    made = server.client.completions.create(model="tiny", prompt="one two", logprobs=2, **params)
    (wanted,) = llm.generate("one two", SamplingParams(logprobs=2, **params), use_tqdm=False)
    assert [choice.text for choice in made.choices] == [one.text for one in wanted.outputs]
    assert [choice.index for choice in made.choices] == [0, 1]
    assert [choice.finish_reason for choice in made.choices] == [one.finish_reason for one in wanted.outputs]
    for choice, one in zip(made.choices, wanted.outputs, strict=True):
        assert choice.logprobs is not None and one.logprobs is not None
        assert choice.logprobs.token_logprobs == [entry.logprob for entry in one.logprobs]
    assert made.usage is not None
    assert made.usage.completion_tokens == sum(len(one.token_ids) for one in wanted.outputs)
    assert made.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert made.model == "tiny" and made.id.startswith("cmpl-")


def test_chats_are_those_of_chat(server: Running, llm: LLM) -> None:
    made = server.client.chat.completions.create(
        model="tiny", messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY
    )
    (wanted,) = llm.chat(CHAT, SamplingParams(logprobs=3, **GREEDY), use_tqdm=False)
    (choice,) = made.choices
    assert choice.message.role == "assistant" and choice.message.content == wanted.outputs[0].text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) >= 3
    assert made.id.startswith("chatcmpl-") and made.object == "chat.completion"


@pytest.mark.parametrize("is_chat", [False, True])
def test_streams_are_the_whole_in_pieces(server: Running, is_chat: bool) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "max_tokens": 12, "n": 2, "seed": 5}
    texts, reasons = ["", ""], [None, None]
    if is_chat:
        whole = server.client.chat.completions.create(model="tiny", messages=CHAT, **params)
        wanted: list[Any] = [choice.message.content for choice in whole.choices]
        chunks: Any = server.client.chat.completions.create(
            model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}, **params
        )
    else:
        whole = server.client.completions.create(model="tiny", prompt="one", **params)  # type: ignore[assignment]
        wanted = [choice.text for choice in whole.choices]  # type: ignore[attr-defined]
        chunks = server.client.completions.create(
            model="tiny", prompt="one", stream=True, stream_options={"include_usage": True}, **params
        )
    usage, num_chunks = None, 0
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            num_chunks += 1
            texts[choice.index] += (choice.delta.content or "") if is_chat else choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == wanted and reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage and num_chunks > 4


def test_logprobs_of_a_stream_are_those_of_the_whole(server: Running) -> None:
    body: dict[str, Any] = {"prompt": "one two", "logprobs": 1, **GREEDY}
    whole = post(server, **body).json()["choices"][0]["logprobs"]
    chunks = events(post(server, stream=True, **body).text)
    assert chunks[-1] == "[DONE]"
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    for name in whole:
        assert [value for piece in pieces if piece for value in piece[name]] == whole[name]


@pytest.mark.parametrize("is_chat", [False, True])
def test_tiers_are_told_piece_by_piece(server: Running, is_chat: bool) -> None:
    given: dict[str, Any] = {"messages": CHAT} if is_chat else {"prompt": "one two three one two three"}
    path, body = "chat/completions" if is_chat else "completions", {**given, "max_tokens": 40, "tiers": True}
    (choice,) = post(server, path, **body).json()["choices"]
    text = choice["message"]["content"] if is_chat else choice["text"]
    assert "".join(piece["text"] for piece in choice["tiers"]) == text
    assert {piece["tier"] for piece in choice["tiers"]} == {"draft", "check", "verify"}
    chunks = [chunk for chunk in events(post(server, path, stream=True, **body).text) if chunk != "[DONE]"]
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0].get("tiers", [])]
    assert "".join(piece["text"] for piece in pieces) == text
    assert {piece["tier"] for piece in pieces} == {"draft", "check", "verify"}
    assert "tiers" not in post(server, path, **given, **GREEDY).json()["choices"][0]
    assert post(server, path, **given, tiers="yes").status_code == 400


def test_several_prompts_in_one_request(server: Running, llm: LLM) -> None:
    prompts: list[Any] = ["one", "two two", "three"]
    made = server.client.completions.create(model="tiny", prompt=prompts, n=2, seed=3, **GREEDY)
    outputs = llm.generate(prompts, SamplingParams(n=2, seed=3, **GREEDY), use_tqdm=False)
    wanted = [one.text for output in outputs for one in output.outputs]
    assert [choice.text for choice in made.choices] == wanted
    assert [choice.index for choice in made.choices] == list(range(6))
    texts = [""] * 6
    params: dict[str, Any] = {"prompt": prompts, "n": 2, "seed": 3, **GREEDY}
    for chunk in server.client.completions.create(model="tiny", stream=True, **params):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted
    tokens = server.client.completions.create(model="tiny", prompt=[[4, 5], [6]], **GREEDY)
    assert len(tokens.choices) == 2
    for stream, (wrong, words) in itertools.product(
        (False, True), ((["x", ""], "the prompt is empty"), (["x", [[1]]], "must be a string or a list of"))
    ):
        answer = post(server, prompt=wrong, stream=stream)
        told = answer.json()["error"]["message"]
        assert answer.status_code == 400 and told.startswith(f"prompt[1]: {words}")


def test_stop_strings_penalties_and_biases_reach_the_engine(server: Running) -> None:
    free = post(server, prompt="one two", **GREEDY).json()["choices"][0]["text"]
    stop = free[3:5]
    cut = post(server, prompt="one two", stop=stop, **GREEDY).json()["choices"][0]
    assert cut["text"] == free[: free.index(stop)] and cut["finish_reason"] == "stop"
    biased = post(server, prompt="one two", logit_bias={"9": 100}, logprobs=0, **GREEDY).json()["choices"][0]
    assert biased["logprobs"]["tokens"] == [server.llm.token_bytes(9).decode()] * 12


def test_many_clients_at_once_get_what_each_would_get_alone(server: Running, llm: LLM) -> None:
    prompts = [f"client {number}" for number in range(24)]
    with ThreadPoolExecutor(12) as clients:
        made = list(clients.map(lambda prompt: post(server, prompt=prompt, **GREEDY).json(), prompts))
    outputs = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    assert [one["choices"][0]["text"] for one in made] == [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", {}, 400, "prompt: required"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400, "role"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature: must be at least 0"),
        ("completions", {"prompt": "x", "temprature": 1}, 400, "did you mean 'temperature'"),
        ("completions", {"prompt": [1] * 200}, 400, "200 tokens"),
        ("completions", {"prompt": [99999]}, 400, "99999"),
        ("completions", {"prompt": "x", "stream": "yes"}, 400, "stream: must be true or false"),
        ("completions", {"prompt": "x", "stream_options": {}}, 400, "needs stream=true"),
        ("completions", {"prompt": "x", "model": "gpt"}, 404, "model: 'gpt' is not served here"),
        ("completions", {"prompt": ["x"] * 129}, 400, "at most 128"),
        ("completions", {"prompt": "x", "tiers": 0}, 400, "tiers: must be true or false, got 0"),
        ("completions", {"prompt": "x", "tools": [{}]}, 400, "tools=.* is not supported"),
        (
            "completions",
            {"prompt": "x", "stop": ["a"] * 65},
            400,
            "stop: 65 strings in a request, at most 64",
        ),
        (
            "completions",
            {"prompt": "x", "logit_bias": {str(token): 0 for token in range(1025)}},
            400,
            "logit_bias: 1025 entries in a request, at most 1024; leave some out",
        ),
        (
            "chat/completions",
            {"messages": CHAT, "stop_token_ids": [1] * 1025},
            400,
            "stop_token_ids: 1025 entries in a request, at most 1024; leave some out",
        ),
        ("completions", {"prompt": "x", "top_logprobs": 2}, 400, "top_logprobs=2 is for chats"),
        ("completions", {"prompt": "x", "tool": []}, 400, "tool: unknown parameter; leave it out"),
        ("nothing", {}, 404, "POST /v1/nothing"),
    ],
)
def test_wrong_requests_say_what_is_wrong(
    server: Running, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    for more in ({}, {"stream": True}):
        if path == "nothing" or "stream" in body or "stream_options" in body:
            more = {}
        answer = post(server, path, **body, **more)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert re.search(words, error["message"])


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 5000, b'{"a": 1, "a": 2}']
)
def test_bodies_that_are_no_json_objects_are_refused(server: Running, content: bytes) -> None:
    answer = server.http.post("/v1/completions", content=content)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_names_that_are_no_text_or_long_are_repeated_as_far_as_that_goes(server: Running) -> None:
    for body in ({"\ud800": 1}, {"prompt": "x", "logit_bias": {"\ud800": 1}}, {"x" * 10**5: 1}):
        answer = server.http.post("/v1/completions", content=json.dumps(body))
        assert answer.status_code == 400 and len(answer.text) < 500


def test_what_would_fail_again_is_not_tried_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked = 0

    async def fails(*_: Any, **__: Any) -> RequestOutput:
        nonlocal num_asked
        num_asked += 1
        return RequestOutput("0", None, [1], error="the model's logits are nan")

    monkeypatch.setattr(server.engine, "generate", fails)
    with pytest.raises(openai.InternalServerError, match="logits are nan"):
        server.client.with_options(max_retries=2).completions.create(model="tiny", prompt="x")
    assert num_asked == 1


def test_what_nobody_foresaw_is_counted_and_not_tried_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*_: Any) -> Any:
        raise ZeroDivisionError("nobody foresaw it")

    line = 'hispec_http_requests_total{path="/v1/completions",status="500"} '
    counts = []
    for is_broken in (False, True):
        if is_broken:
            monkeypatch.setattr(app, "read_json", breaks)
            # By a connection of its own, which uvicorn closes after it.
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=60.0)
            assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
            assert answer.json()["error"]["message"] == "ZeroDivisionError: nobody foresaw it"
        found = [each for each in server.http.get("/metrics").text.splitlines() if each.startswith(line)]
        counts.append(sum(float(each.removeprefix(line)) for each in found))
    assert counts[1] == counts[0] + 1


def test_bodies_are_made_outside_of_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would wait for long ones."""
    threads = []

    def noted(make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return make(*arguments, **options)

        return run

    monkeypatch.setattr(completions, "choices", noted(completions.choices))
    monkeypatch.setattr(app, "JSONResponse", noted(app.JSONResponse))
    assert post(server, prompt="x", logprobs=1, **GREEDY).status_code == 200
    assert len(threads) == 2 and all(name.startswith("asyncio_") for name in threads)


def test_large_bodies_are_read_outside_of_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, parse = [], transport.parse_json

    def noted(content: str) -> Any:
        threads.append(threading.current_thread().name)
        return parse(content)

    monkeypatch.setattr(transport, "parse_json", noted)
    for length in (10, 200_000):
        post(server, prompt="x" * length, **GREEDY)
    assert [name.startswith("asyncio_") for name in threads] == [False, True]


def test_an_event_is_one_line_to_whoever_reads_lines() -> None:
    content = {"text": "a\u2028b\u2029c\u0085d\ne\u6f22"}
    text = event(content)
    assert text.endswith("\n\n") and "\u6f22" in text
    first, second = text.splitlines()
    assert json.loads(first.removeprefix("data: ")) == content and not second


def test_the_role_developer_is_that_of_system(server: Running) -> None:
    texts = []
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "be brief"}, *CHAT]
        made = post(server, "chat/completions", messages=messages, **GREEDY).json()
        texts.append(made["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]


def test_the_official_client_raises_its_own_errors(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        server.client.completions.create(model="tiny", prompt="x", max_tokens=0)
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="other", prompt="x")


def test_models_health_metrics_and_the_page(server: Running) -> None:
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").owned_by == "hispec"
    assert server.http.get("/v1/models/other").status_code == 404
    assert server.http.get("/health").json()["status"] == "ok"
    post(server, prompt="x", **GREEDY)
    text = server.http.get("/metrics").text
    assert 'hispec_http_requests_total{path="/v1/completions",status="200"}' in text
    tokens = next(line for line in text.splitlines() if line.startswith("hispec_tokens_total "))
    assert float(tokens.split()[1]) >= 1
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "/v1/chat/completions" in page.text
    assert "http://" not in page.text and "https://" not in page.text, "it loads nothing from elsewhere"
    assert server.http.get("/openapi.json").json()["paths"]["/v1/completions"]["post"]["requestBody"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_disconnects_is_aborted(server: Running, is_stream: bool) -> None:
    body = json.dumps({**LONG, "n": 4, "stream": is_stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    before = server.engine._call(server.llm.stats).result(30)["finished"]
    address = server.url.removeprefix("http://").split(":")
    for _ in range(5):
        with socket.create_connection((address[0], int(address[1]))) as client:
            client.sendall(head + body)
            wait_until(lambda: server.engine.num_unfinished > 0)
            if is_stream:
                assert client.recv(100)
    server.settle()
    assert server.engine._call(server.llm.stats).result(30)["finished"] >= before


def test_a_key_is_asked_for(tiny_path: Path) -> None:
    with serving(tiny_path, api_key="secret") as guarded:
        assert guarded.client.completions.create(model="tiny", prompt="x", **GREEDY).choices
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics")):
                answer = httpx.request(method, guarded.url + path, headers=headers)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{guarded.url}/health").status_code == 200
        guarded.settle()


@pytest.mark.parametrize("key", ["secret", "schlüssel à", "鍵"])
def test_a_key_may_be_of_any_characters(key: str) -> None:
    for sent, is_right in ((key, True), (f" {key} ", True), (key[:-1], False), (f"{key}x", False)):
        headers = [(b"authorization", f"bearer {sent}".encode())]
        request = Request({"type": "http", "headers": headers})
        if is_right:
            check_key(request, key)
        else:
            with pytest.raises(Failure):
                check_key(request, key)


def test_limits(tiny_path: Path) -> None:
    with serving(
        tiny_path, max_requests=2, max_tokens=20, max_logprobs=3, max_body_bytes=2000, timeout_s=30.0
    ) as small:
        answer = post(small, prompt="x", max_tokens=21)
        assert answer.status_code == 400 and "at most 20 on this server" in answer.json()["error"]["message"]
        few = {"prompt": "x", **GREEDY}
        assert post(small, **few, logprobs=3).status_code == 200
        answer = post(small, **few, logprobs=4)
        assert (
            answer.status_code == 400
            and "logprobs: must be at most 3 on" in answer.json()["error"]["message"]
        )
        answer = post(small, "chat/completions", messages=CHAT, logprobs=True, top_logprobs=4)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(
            "top_logprobs: must be"
        )
        chat = post(small, "chat/completions", messages=CHAT, ignore_eos=True).json()
        assert chat["usage"]["completion_tokens"] == 20
        named_none = post(small, prompt="x", ignore_eos=True).json()
        assert named_none["usage"]["completion_tokens"] == 16  # OpenAI's, which this server allows
        assert post(small, prompt="x" * 3000).status_code == 413
        chunked = small.http.post("/v1/completions", content=iter([b"x" * 1500] * 2))
        assert chunked.status_code == 413
        never = post(small, prompt=["a", "b", "c"])  # trying again would not help
        assert never.status_code == 400 and "at most 2 outputs" in never.json()["error"]["message"]
        never = post(small, prompt=["a", "b"], n=2)
        assert never.status_code == 400 and "on this server, got 4" in never.json()["error"]["message"]
        never = post(small, "chat/completions", messages=CHAT, n=3)
        assert never.status_code == 400 and never.json()["error"]["message"].startswith(
            "n: at most 2 outputs"
        )
        small.settle()
        held = threading.Event()
        small.engine._post(lambda: held.wait(30) and None)
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(post, small, prompt="x", max_tokens=20) for _ in range(2)]
            wait_until(lambda: small.engine.num_unfinished == 2)
            full = post(small, prompt="x", max_tokens=20)
            held.set()
            assert full.status_code == 429 and full.headers["retry-after"] == "1"
            assert "2 outputs are unfinished, at most 2 may be" in full.json()["error"]["message"]
            assert [each.result().status_code for each in asked] == [200, 200]
        small.settle()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(tiny_path: Path, is_stream: bool) -> None:
    with serving(tiny_path, timeout_s=0.3) as hasty:
        held = threading.Event()
        step = hasty.llm.step

        def slow() -> Any:
            held.wait(2.0)
            return step()

        if not is_stream:
            hasty.llm.step = slow  # type: ignore[method-assign]
            answer = post(hasty, **LONG)
            assert answer.status_code == 408 and answer.headers["x-should-retry"] == "false"
            held.set()
        else:
            steps = iter(range(10**6))

            def slower() -> Any:
                if next(steps) > 3:
                    held.wait(2.0)
                return step()

            hasty.llm.step = slower  # type: ignore[method-assign]
            last = events(post(hasty, stream=True, **LONG).text)[-1]
            held.set()
            assert last["error"]["code"] == "timeout"
        hasty.settle()


def test_a_stream_ends_when_its_request_is_to(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timeout_s is of all of it, what came before its first event included."""
    seen: list[float] = []

    def note(run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            seen.append(arguments[-1])
            return run(*arguments)

        return noted

    for name in ("unless_gone", "EventStream"):
        monkeypatch.setattr(app, name, note(getattr(app, name)))
    with serving(tiny_path, timeout_s=30.0) as steady:
        assert events(post(steady, stream=True, **LONG).text)[-2]["choices"]
        steady.settle()
    assert len(seen) == 2 and seen[0] == seen[1] != 30.0  # a moment, no number of seconds for each


def test_responses_are_as_the_description_says(server: Running) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    chat = {"messages": CHAT, **GREEDY, "tiers": True}
    asked: list[tuple[str, str, dict[str, Any] | None, int]] = [
        ("/v1/chat/completions", "", {**chat, "logprobs": True, "top_logprobs": 2}, 200),
        ("/v1/chat/completions", "", {"messages": CHAT, **GREEDY}, 200),
        ("/v1/chat/completions", "", {}, 400),
        ("/v1/completions", "", {"prompt": "x", "logprobs": 2, "n": 2, **GREEDY}, 200),
        ("/v1/completions", "", {"prompt": "x", "model": "other"}, 404),
        ("/v1/models", "", None, 200),
        ("/v1/models/{name}", "tiny", None, 200),
        ("/v1/models/{name}", "other", None, 404),
        ("/health", "", None, 200),
    ]
    for path, name, body, status in asked:
        method, url = "get" if body is None else "post", path.replace("{name}", name)
        answer = server.http.request(method, url, json=body)
        assert answer.status_code == status
        kind = answer.headers["content-type"].partition(";")[0]
        content = paths[path][method]["responses"][str(status)]["content"]
        jsonschema.validate(answer.json(), content[kind]["schema"])
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert not any("422" in each["responses"] for ways in paths.values() for each in ways.values())
