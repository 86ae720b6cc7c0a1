"""A server of a small model in a thread, and what is known of its engine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from hispec import LLM
from hispec.engine import Engine
from hispec.serving.app import make_app
from hispec.serving.async_engine import AsyncEngine
from hispec.serving.run import Server, listen
from hispec.serving.server_config import ServerConfig

SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}
LONG: dict[str, Any] = {"prompt": "go on", "max_tokens": 100, "temperature": 0.0, "ignore_eos": True}


@dataclass
class Running:
    """A server, its engine and clients for it."""

    url: str
    engine: AsyncEngine
    llm: LLM
    client: OpenAI
    http: httpx.Client
    server: Server

    def settle(self) -> None:
        """Fails unless nothing is left of any request within half a minute."""
        wait_until(lambda: self.engine.num_unfinished == 0)
        if isinstance(self.llm.engine, Engine):
            self.engine._call(self.llm.engine.check).result(30)
            assert not self.llm.has_unfinished()


@contextmanager
def serving(path: Path, *, max_requests: int | None = None, **settings: Any) -> Iterator[Running]:
    """A server on a free port; settings: of ServerConfig, and `engine` of LLM."""
    engine_settings = {**SMALL, **settings.pop("engine", {})}
    limits = {} if max_requests is None else {"max_requests": max_requests}
    config = ServerConfig(name="tiny", port=0, **{"drain_s": 5.0, **limits, **settings})
    engine = AsyncEngine(lambda: LLM(str(path), **engine_settings), max_requests=max_requests)
    llm = engine.llm
    listener = listen(config)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(make_app(engine, config, {"temperature": 0.0}), engine, config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    key = config.api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    client = OpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=60.0)
    with httpx.Client(base_url=url, headers=headers, timeout=60.0) as http:
        try:
            yield Running(url, engine, llm, client, http, server)
        finally:
            server.should_exit = True
            thread.join(30)
            listener.close()
    assert not thread.is_alive() and llm.engine.is_closed


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.005)


def post(server: Running, path: str = "completions", **body: Any) -> httpx.Response:
    return server.http.post(f"/v1/{path}", json=body)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
