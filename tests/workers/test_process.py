"""What the process that holds the model, and a worker, do where the system or the engine fails."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from hispec.config import EngineConfig
from hispec.errors import WorkerError
from hispec.workers import launch, process
from hispec.workers.launch import LocalLauncher
from hispec.workers.messages import Start
from hispec.workers.shares import Share
from tests.workers.support import linux

START = Start(Share(None, 1, "cpu"), EngineConfig(), None, 1)
pytestmark = linux


def test_a_fork_that_fails_is_told_and_the_nursery_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = iter([START] * 2), list[str]()

    def receive() -> Start:
        if (found := next(asked, None)) is None:
            raise EOFError  # the LLM's process has ended
        return found

    def fail() -> int:
        raise OSError(errno.EAGAIN, "too many processes")

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(process, "recv_handle", lambda _: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(process.os, "fork", fail)
    monkeypatch.setattr(process.os, "_exit", end)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SystemExit):
        process._nurse(cast(Any, SimpleNamespace(recv=receive, send=told.append)), *cast(Any, (None, None)))
    assert told == ["no process could be forked: too many processes"] * 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_that_could_not_be_forked_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = LocalLauncher.__new__(LocalLauncher)
    nursery: Any = SimpleNamespace(connection=SimpleNamespace(send=lambda _: None), pid=os.getpid())
    launcher._setup, launcher._nursery = cast(Any, SimpleNamespace(forks=True)), nursery
    monkeypatch.setattr(launch, "send_handle", lambda *_: None)
    monkeypatch.setattr(launcher, "_answer_of_nursery", lambda: "no process could be forked: no memory")
    with pytest.raises(WorkerError, match="no process could be forked: no memory"):
        launcher.start(START)
    assert launcher._nursery is nursery


def test_a_worker_that_fails_closes_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what it traced is written."""
    told: list[Any] = []
    engine = MagicMock()
    monkeypatch.setattr(
        process, "WorkerEnd", lambda _: nullcontext(SimpleNamespace(send=told.append, give_signs=id))
    )
    monkeypatch.setattr(process, "Engine", SimpleNamespace(of_pretrained=lambda *_, **__: engine))
    monkeypatch.setattr(process, "Hello", lambda *_: "ready")
    monkeypatch.setattr(
        process, "Server", MagicMock(**{"return_value.run.side_effect": RuntimeError("the GPU is gone")})
    )
    start: Any = MagicMock()
    assert process.work(cast(Any, None), MagicMock(), MagicMock(), start) == 1
    assert told == ["ready", "failed with RuntimeError: the GPU is gone"]
    engine.close.assert_called_once()
