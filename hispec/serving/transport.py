"""What a client sends and gets, below OpenAI's words: bodies within limits, and streams that end when it
leaves."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..errors import BusyError, ClosedError, ConfigError, EngineDeadError, RequestError
from ..openai.responses import error_body
from ..utils.files import parse_json

T = TypeVar("T")
_BODY_S = 30.0  # seconds that a client has to send its body
_LARGE = 1 << 16  # bytes of a body from which it is read beside the loop: all streams would wait meanwhile
_LAST_S = 5.0  # that a client has to take the last event of a stream that is cut off
_RETRY_S = 1  # after which a client may try again
_GONE = 499  # nobody reads it: it is for logs
# JSON may hold these as they are, and clients that read line by line would cut an event there.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"})


class Failure(Exception):
    """A response other than 200."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        # It may repeat what a client sent: JSON can hold halves of characters, which cannot be sent back.
        self.message = message.encode("utf-8", "backslashreplace").decode()
        self.status, self.code = status, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.status < 500, self.code)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def final(status: int, message: str, code: str | None = None) -> Failure:
    """A Failure that the same request would meet again. OpenAI's clients, which try again after a timeout
    or a failure of the server, are told not to."""
    return Failure(status, message, code, x_should_retry="false")


def failure_of(error: Exception) -> Failure:
    """What a client is told of an error of the engine. Other errors are raised again."""
    if isinstance(error, ConfigError | RequestError):
        return Failure(400, str(error))
    if isinstance(error, BusyError):
        return Failure(429, f"{error}; try again later", "busy", Retry_After=str(_RETRY_S))
    if isinstance(error, TimeoutError):
        return final(408, "the request took longer than the server allows", "timeout")
    if isinstance(error, ClosedError | EngineDeadError):
        return Failure(503, "the server is ending, or its engine has failed", "unavailable")
    if isinstance(error, ClientDisconnect):
        return Failure(_GONE, "the client has left")
    raise error


def check_key(request: Request, api_key: str | None) -> None:
    """Raises Failure unless the request has the key as its bearer token."""
    if api_key is None:
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    sent = token.strip(" ").encode("latin-1")  # as which starlette reads bytes, whatever they are
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent, api_key.encode()):
        raise Failure(
            401,
            "no valid API key: send it as `Authorization: Bearer KEY`",
            "invalid_api_key",
            WWW_Authenticate="Bearer",
        )


async def read_json(request: Request, max_bytes: int) -> Any:
    """The body. Raises Failure."""
    too_large = Failure(413, f"the body has more than {max_bytes} bytes, the most that this server takes")
    with suppress(ValueError):
        if int(request.headers.get("content-length", "0")) > max_bytes:
            raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                content += piece
                if len(content) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise Failure(408, f"the body did not come within {_BODY_S:.0f} seconds", "timeout") from None
    try:
        return _parse(content) if len(content) < _LARGE else await asyncio.to_thread(_parse, content)
    except ValueError as error:
        raise Failure(400, f"the body is not valid JSON: {error}") from None


def _parse(content: bytearray) -> Any:
    """The JSON of a body. Raises ValueError."""
    value = parse_json(text := content.decode("utf-8-sig"))
    if "\\ud" in text.lower():  # half a surrogate pair is no text: neither prompt nor message may have it
        json.dumps(value, ensure_ascii=False).encode()
    return value


async def unless_gone(request: Request, work: Coroutine[Any, Any, T], until: float) -> T:
    """What `work` returns; it is cancelled when the client leaves (ClientDisconnect), or at `until`, seconds
    of the event loop (TimeoutError)."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_await_end(request.receive))
    try:
        await asyncio.wait((task, watch), timeout=_left(until), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect if watch.done() else TimeoutError
    finally:
        await _cancel(task, watch)


class EventStream(Response):
    """Server-sent events, as they come from a generator, which is closed when the client leaves, or at
    `until`, seconds of the event loop: also for a client that reads nothing."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], until: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._until = events, until

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.ensure_future(_await_end(receive))
        sending = asyncio.ensure_future(self._send_all(send))
        with suppress(OSError):  # it left while something was sent
            try:
                await asyncio.wait(
                    (watch, sending), timeout=_left(self._until), return_when=asyncio.FIRST_COMPLETED
                )
                if sending.done():
                    sending.result()
                elif not watch.done():
                    await _cancel(sending)
                    with suppress(TimeoutError):  # it reads nothing: the connection is closed without it
                        async with asyncio.timeout(_LAST_S):
                            await _send_piece(send, event(failure_of(TimeoutError()).body), is_last=True)
            finally:
                await _cancel(watch, sending)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for each in events:
                await _send_piece(send, each)
            await _send_piece(send, "", is_last=True)


async def _send_piece(send: Send, text: str, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})


def event(value: Any) -> str:
    """A server-sent event of JSON."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    return f"data: {text}\n\n"


def _left(until: float) -> float:
    return max(0.0, until - asyncio.get_running_loop().time())


async def _await_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks, and waits until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
