"""Runs the HTTP server until it is told to end."""

from __future__ import annotations

import asyncio
import errno
import math
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..errors import ConfigError
from ..llm import LLM
from ..sampling_params import SamplingParams
from .app import make_app
from .async_engine import AsyncEngine
from .server_config import ServerConfig

_KEEP_ALIVE_S = 30  # that an idle connection is kept
_TELL_S = 5  # after the end of its requests, that the server has to tell clients


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens where `config` says. Raises ConfigError: before a model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(
            socket, "TCP_USER_TIMEOUT"
        ):  # connections inherit it: or one that never reads stays for ever
            milliseconds = min(round(1000 * config.timeout_s), 2**31 - 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind((config.host, config.port))
        listener.listen(1024)
    except (OSError, UnicodeError) as error:
        listener.close()
        in_use = "; choose another --port" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen at {config.host}:{config.port}: {reason}{in_use}") from None
    return listener


class Server(uvicorn.Server):
    """Serves an application until it is told to end. Then its requests have `drain_s` seconds, or until
    Ctrl-C a second time, after which the engine ends those that are left, so that their clients are told;
    whoever does not listen is cut off _TELL_S seconds later, or with a third. uvicorn alone would cut all off
    at once, and raise each signal again in the end: the second of two ends the event loop at any place."""

    def __init__(self, app: FastAPI, engine: AsyncEngine, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=math.ceil(config.drain_s) + _TELL_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
                server_header=False,
            )
        )
        self._engine, self._drain_s = engine, config.drain_s
        self._told_again = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop  # before it there is nothing that takes signals

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif sig == signal.SIGINT:  # SIGTERM may come twice where nobody is in a hurry
            again = self._cut_off if self._told_again.is_set() else self._told_again.set
            self._loop.call_soon_threadsafe(again)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._told_again.wait(), self._drain_s)
        await self._engine.aclose()
        await asyncio.sleep(_TELL_S)
        self._cut_off()

    def _cut_off(self) -> None:
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def serve(
    make_llm: Callable[[], LLM],
    config: ServerConfig,
    sampling: dict[str, Any] | None,
    listener: socket.socket,
) -> None:
    """Serves an LLM until SIGINT or SIGTERM, as Server says. Raises what making
    the LLM raises, and ConfigError for wrong defaults of sampling: of the model's
    own, others in a preset go before.

    sampling   of all requests, which may override single fields; None = the model's own defaults
    listener   as `listen` makes it
    """
    engine = AsyncEngine(make_llm, max_requests=config.max_requests)
    try:
        defaults = engine.llm.generation_defaults if sampling is None else sampling
        where = "the model's generation_config.json" if sampling is None else "sampling"
        SamplingParams.of({"max_tokens": None} | defaults, where)
        app = make_app(engine, config, defaults)
        host, port = listener.getsockname()[:2]
        place = f"[{host}]" if ":" in host else host
        print(f"{config.name} at http://{place}:{port}/v1 (Ctrl-C ends it)", file=sys.stderr, flush=True)
        Server(app, engine, config).run(sockets=[listener])
    finally:
        engine.close()
