"""Runs the HTTP server until it is told to end."""

from __future__ import annotations

import errno
import logging
import socket
from typing import Any

import uvicorn

from ..errors import ConfigError
from ..llm import LLM
from .app import make_app
from .async_engine import AsyncEngine
from .server_config import ServerConfig

_REQUESTS_PER_ROW = 4
_log = logging.getLogger(__name__)


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens where `config` says. Raises ConfigError: before a model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(1024)
    except (OSError, UnicodeError) as error:
        listener.close()
        in_use = "; choose another --port" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen at {config.host}:{config.port}: {reason}{in_use}") from None
    return listener


def serve(
    llm: LLM, config: ServerConfig, sampling: dict[str, Any], num_rows: int, listener: socket.socket
) -> None:
    """Serves `llm`, which it closes, until SIGINT or SIGTERM; then requests have `drain_s` seconds to end.

    listener   as `listen` makes it
    sampling   of all requests, which may override single fields
    num_rows   of the batch, of all workers
    """
    most = config.max_requests or _REQUESTS_PER_ROW * num_rows
    engine = AsyncEngine(llm, max_requests=most)
    app = make_app(engine, config, sampling, llm.token_text)
    host, port = listener.getsockname()[:2]
    _log.info("serving %s at http://%s:%d", config.name, f"[{host}]" if ":" in host else host, port)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
            timeout_keep_alive=30,
            h11_max_incomplete_event_size=64 << 10,
            server_header=False,
        )
    )
    try:
        server.run(sockets=[listener])
    finally:
        engine.close()
