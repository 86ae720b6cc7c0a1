"""How an HTTP server ends, and what its clients are told: when it is asked to, once or again, and when its
engine fails."""

from __future__ import annotations

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hispec.serving import run
from tests.serving.support import LONG, events, post, serving, wait_until


def test_a_dead_engine_is_said_and_nobody_waits(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny_path) as dying:

        def broken() -> Any:
            raise OSError("the device is gone")

        monkeypatch.setattr(dying.llm, "step", broken)
        answer = post(dying, **LONG)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
        assert dying.http.get("/health").status_code == 503
        assert post(dying, **LONG).status_code == 503


def test_requests_may_end_when_the_server_is_told_to(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_path, engine={"max_run_ms": 0.0}) as ending, ThreadPoolExecutor(2) as clients:
        step, is_held, goes_on = ending.llm.step, threading.Event(), threading.Event()

        def held() -> Any:
            if is_held.is_set():
                assert goes_on.wait(30)
            return step()

        monkeypatch.setattr(ending.llm, "step", held)
        asked = [clients.submit(post, ending, **LONG) for _ in range(2)]
        wait_until(lambda: ending.engine.num_unfinished == 2)
        is_held.set()
        for _ in range(3):  # as those that forward signals may
            ending.server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.5)  # for the server to end them, which it must not
        goes_on.set()
        assert [each.result().status_code for each in asked] == [200, 200]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("drain_s", [0.2, 300.0])
def test_requests_that_do_not_end_in_time_are_told_that_the_server_ends(
    tiny_path: Path, drain_s: float, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or before, if it is told to end a second time."""
    with serving(tiny_path, drain_s=drain_s, engine={"max_run_ms": 0.0}) as ending:
        step, is_held = ending.llm.step, threading.Event()
        num_steps = 0

        def endless() -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps <= 3:
                return step()
            is_held.set()
            time.sleep(0.005)
            return []

        monkeypatch.setattr(ending.llm, "step", endless)
        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(post, ending, stream=is_stream, **LONG)
            assert is_held.wait(30)
            for _ in range(1 if drain_s < 1.0 else 2):
                ending.server.handle_exit(signal.SIGINT, None)
            answer = asked.result(60)
            assert not ending.server.force_exit
        if is_stream:
            error = events(answer.text)[-1]["error"]
            assert answer.status_code == 200 and events(answer.text)[0]["choices"]
        else:
            error = answer.json()["error"]
            assert answer.status_code == 503
        assert error["code"] == "unavailable" and error["type"] == "server_error"


@pytest.mark.parametrize("num_told", [2, 3])
def test_who_does_not_listen_is_cut_off(
    tiny_path: Path, num_told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A while after all requests have ended, or at once when the server is told a third time."""
    monkeypatch.setattr(run, "_TELL_S", 0.2 if num_told == 2 else 300)
    with serving(tiny_path, drain_s=300.0, timeout_s=300.0) as ending:
        host, port = ending.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            wait_until(lambda: len(ending.server.server_state.tasks) == 1)
            for _ in range(2):
                ending.server.handle_exit(signal.SIGINT, None)
            wait_until(ending.server._told_again.is_set)
            if num_told == 3:
                assert ending.server.server_state.connections
                ending.server.handle_exit(signal.SIGINT, None)
            wait_until(lambda: not ending.server.server_state.connections)
