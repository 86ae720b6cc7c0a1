"""Clients of `hispec serve` as they come: patient ones, and those that leave, stall, or send nonsense."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REFUSALS = {400, 401, 404, 405, 408, 413}  # what docs/serving.md says of requests that are wrong
PROMPTS = [f"prompt {number}: once upon a time there" for number in range(16)]
ANSWER_S = 300.0  # after which an answer is a failure
WRONG_HTTP = (b"\x00\xff\x16\x03\x01", b"GET", b"POST /v1/completions HTTP/9.9\r\n\r\n", b"A: b\r\n\r\n")
NONSENSE: tuple[bytes, ...] = (
    *(
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b"[" * 5000,
        b'{"prompt": 1, "prompt": 2}',
    ),
    *(b'{"prompt": "x", "temprature": 1}', b'{"prompt": "x", "stop": ["\\ud800"]}', b'{"\\udfff": 1}'),
)
TOO_MUCH: tuple[dict[str, Any], ...] = (
    *({"prompt": "x" * 5000}, {"prompt": ["x"] * 129}, {"prompt": "x", "n": 10**6}, {"prompt": [10**9]}),
    *({"prompt": "x", "max_tokens": 10**9}, {"prompt": "x", "logprobs": 10**4}, {"prompt": "x" * 200_000}),
)


@dataclass
class Answer:
    """status: 0 where the connection ended before one came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Tally:
    """What became of the requests: counts by kind of client and status, and what went wrong."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)  # greedy, by prompt: each always has the same
    bytes_read: int = 0

    def expect(self, holds: bool, words: str) -> None:
        if not holds:
            self.failures[words] += 1


class Client:
    """Sends requests of one kind after another to a server on this machine."""

    def __init__(self, address: tuple[str, int], tally: Tally, seed: int) -> None:
        self._address, self._tally = address, tally
        self._random = random.Random(seed)
        kinds: dict[str, tuple[int, Callable[[], Awaitable[int]]]] = {
            "whole": (4, self._whole),
            "stream": (4, self._stream),
            "leaves a stream": (3, self._leave_stream),
            "leaves before an answer": (1, self._leave_early),
            "stalls": (2, self._stall),
            "no HTTP": (1, self._wrong_http),
            "nonsense": (2, self._nonsense),
            "half a body": (1, self._half_body),
            "too much": (2, self._too_much),
        }
        self._kinds = {kind: run for kind, (_, run) in kinds.items()}
        self._weights = [weight for weight, _ in kinds.values()]

    async def request(self, kind: str | None = None) -> None:
        """One request; of a random kind unless one is named."""
        kind = kind or self._random.choices(list(self._kinds), self._weights)[0]
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await self._kinds[kind]()
        except TimeoutError:
            self._tally.failures[f"{kind}: no answer within {ANSWER_S:.0f} seconds"] += 1
            return
        except (OSError, asyncio.IncompleteReadError) as error:
            self._tally.failures[f"{kind}: the connection broke: {type(error).__name__}"] += 1
            return
        self._tally.statuses[kind, status] += 1

    async def _whole(self) -> int:
        body, prompt = self._body(is_stream=False)
        answer = await self._ask(body)
        if self._is_served("whole", answer):
            choice = json.loads(answer.body)["choices"][0]
            self._check_text(prompt, choice["message"]["content"] if "message" in choice else choice["text"])
        return answer.status

    async def _stream(self) -> int:
        body, prompt = self._body(is_stream=True)
        answer = await self._ask(body)
        if self._is_served("stream", answer):
            events = answer.body.decode().removesuffix("\n\n").split("\n\n")
            self._tally.expect(events[-1] == "data: [DONE]", "stream: it does not end with [DONE]")
            texts = []
            for each in events[:-1]:
                chunk = json.loads(each.removeprefix("data: "))
                if "error" in chunk:
                    self._tally.failures[f"stream: an event has the error {chunk['error']['message']!r}"] += 1
                    return answer.status
                choice = chunk["choices"][0]
                texts.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
            self._check_text(prompt, "".join(texts))
        return answer.status

    async def _leave_stream(self) -> int:
        reader, writer = await self._connect()
        writer.write(_post(self._body(is_stream=True)[0]))
        head = await reader.read(self._random.choice((1, 300, 900)))
        writer.transport.abort()
        return int(head[9:12]) if head[9:12].isdigit() else 0

    async def _leave_early(self) -> int:
        _, writer = await self._connect()
        writer.write(_post(self._body(is_stream=False)[0]))
        await asyncio.sleep(self._random.random() * 0.2)
        writer.transport.abort()
        return 0

    async def _stall(self) -> int:
        """Asks for more than the buffers of a connection hold, reads nothing for a while, and then leaves."""
        body = {"prompt": "on", "max_tokens": 64, "n": 4, "logprobs": 64, "stream": True, "ignore_eos": True}
        reader, writer = await self._connect(receive_bytes=4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(_post(body))
        await asyncio.sleep(self._random.choice((0.5, 2.0, 8.0, 65.0)))
        if self._random.random() < 0.5:
            with suppress(RuntimeError):  # it was closed meanwhile
                writer.transport.resume_reading()  # type: ignore[attr-defined]
            with suppress(OSError):  # the server does not wait for ever
                self._tally.bytes_read += len(await reader.read())
        writer.transport.abort()
        return 0

    async def _wrong_http(self) -> int:
        return await self._refused("no HTTP", self._random.choice(WRONG_HTTP), may_close=True)

    async def _nonsense(self) -> int:
        path = self._random.choice((CHAT, COMPLETIONS, "/v1/nothing", "/v1/models/\u00e4%ff"))
        return await self._refused("nonsense", _post(self._random.choice(NONSENSE), path))

    async def _too_much(self) -> int:
        if self._random.random() < 0.2:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n"
            return await self._refused("too much", head.encode() + b"[" * 1000)
        return await self._refused("too much", _post(self._random.choice(TOO_MUCH)))

    async def _half_body(self) -> int:
        whole = _post(self._body(is_stream=False)[0])
        _, writer = await self._connect()
        writer.write(whole[: self._random.randrange(1, len(whole))])
        await asyncio.sleep(self._random.random())
        writer.transport.abort()
        return 0

    def _body(self, is_stream: bool) -> tuple[dict[str, Any], str]:
        """A request that can be served, and the name of its text."""
        prompt = self._random.choice(PROMPTS)
        is_chat = self._random.random() < 0.5
        given: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {}
        given = given or {"prompt": prompt}
        more = {"tiers": True} if self._random.random() < 0.3 else {}
        body = {**given, "temperature": 0.0, "max_tokens": 24, "stream": is_stream, **more}
        return body, f"{'chat' if is_chat else 'completion'} of {prompt!r}"

    def _is_served(self, kind: str, answer: Answer) -> bool:
        """Statuses other than 200 and 429 are failures."""
        self._check_wait(kind, answer)
        if answer.status != 429:
            self._tally.expect(answer.status == 200, f"{kind}: status {answer.status}")
        return answer.status == 200

    def _check_wait(self, kind: str, answer: Answer) -> None:
        has_wait = answer.headers.get("retry-after", "").isdigit()
        self._tally.expect(has_wait or answer.status != 429, f"{kind}: 429 without Retry-After")

    def _check_text(self, name: str, text: str) -> None:
        first = self._tally.texts.setdefault(name, text)
        self._tally.expect(first == text, f"the {name} was not always the same text")

    async def _refused(self, kind: str, content: bytes, may_close: bool = False) -> int:
        answer = await self._send(content, is_end=may_close)
        wanted = REFUSALS | ({0} if may_close else set())
        if answer.status != 429:  # a full server may say so before it looks at the rest
            self._tally.expect(
                answer.status in wanted, f"{kind}: status {answer.status} for {content[:99]!r}"
            )
        self._check_wait(kind, answer)
        return answer.status

    async def _ask(self, body: dict[str, Any]) -> Answer:
        answer = await self._send(_post(body))
        if answer.status == 429:
            await asyncio.sleep(self._random.random() * 2)
        return answer

    async def _send(self, content: bytes, is_end: bool = False) -> Answer:
        reader, writer = await self._connect()
        try:
            writer.write(content)
            if is_end:
                writer.write_eof()
            answer = await _read(reader)
            self._tally.bytes_read += len(answer.body)
            return answer
        finally:
            writer.transport.abort()

    async def _connect(self, receive_bytes: int | None = None) -> tuple[Any, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setblocking(False)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(connection, self._address)
        return await asyncio.open_connection(sock=connection, limit=1 << 20)


def _post(body: dict[str, Any] | bytes, path: str | None = None) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = path or (CHAT if isinstance(body, dict) and "messages" in body else COMPLETIONS)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def _read(reader: asyncio.StreamReader) -> Answer:
    head = await reader.read(1)
    if not head:
        return Answer()
    head += await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first.split()[1])
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
    if headers.get("transfer-encoding") != "chunked":
        return Answer(status, headers, await reader.read())
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return Answer(status, headers, body)
