"""Clients of all kinds at once, as benchmarks/serve_soak.py has them for minutes; and streams that stall."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serve_soak import growth_of, what_is_left
from benchmarks.soak_clients import Client, Tally
from hispec.serving import transport
from tests.serving.support import Running, serving, wait_until

ENGINE = {"max_model_len": 128, "num_kv_blocks": 24, "speculative": {"draft": {"layer": 3}}}
KINDS = (
    *("whole", "stream", "leaves a stream", "leaves before an answer", "no HTTP", "nonsense"),
    *("half a body", "too much"),
)


@pytest.fixture
def server(tiny_path: Path) -> Iterator[Running]:
    with serving(tiny_path, max_requests=16, max_tokens=64, engine=ENGINE) as running:
        yield running


def address_of(server: Running) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


def test_nothing_fails_and_nothing_is_left_of_twenty_clients(server: Running) -> None:
    tally = Tally()

    async def run(seed: int) -> None:
        client = Client(address_of(server), tally, seed)
        for at in range(4):
            await client.request(KINDS[(seed + at) % len(KINDS)])

    async def everybody() -> None:
        await asyncio.gather(*(run(seed) for seed in range(20)))

    asyncio.run(everybody())
    assert not tally.failures
    assert {kind for kind, _ in tally.statuses} == set(KINDS) and tally.statuses.total() == 80
    server.settle()
    wait_until(lambda: not server.server.server_state.connections)
    loop = asyncio.new_event_loop()  # stands for the server's, whose tasks are counted by uvicorn
    wait_until(lambda: not what_is_left(server.engine, server.server, loop, files=10**6))
    loop.close()


def test_a_client_that_reads_nothing_is_left_in_the_end(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream cannot even be told that its time is over."""
    monkeypatch.setattr(transport, "_LAST_S", 0.2)

    async def full(*_: object, **__: object) -> None:
        await asyncio.Event().wait()  # as `send` does for a client whose buffers are full

    with serving(tiny_path, timeout_s=0.5) as server:
        monkeypatch.setattr(transport, "_send_piece", full)
        body = json.dumps({"prompt": "go on", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(address_of(server)) as client:
            client.sendall(head + body)
            wait_until(lambda: bool(server.server.server_state.tasks))
            wait_until(lambda: not server.server.server_state.tasks)  # while the client is still there
        server.settle()


@pytest.mark.parametrize(
    "content",
    [b'{"\\udfff": 1}', b'{"prompt": "\\uD800"}', b'{"prompt": "x", "stop": ["\\ud800"]}', b'"\xed\xa0\x80"'],
)
def test_half_a_surrogate_pair_is_refused(server: Running, content: bytes) -> None:
    answer = server.http.post("/v1/completions", content=content)
    assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]["message"]
    pair = server.http.post("/v1/completions", content=b'{"prompt": "\\ud83d\\ude00", "max_tokens": 2}')
    assert pair.status_code == 200


def test_growth_is_from_the_first_tenth_to_the_last() -> None:
    assert growth_of([100.0] * 10 + [200.0] * 80 + [105.0] * 10) == pytest.approx(0.05)
    assert growth_of([100.0]) == growth_of([]) == 0.0
