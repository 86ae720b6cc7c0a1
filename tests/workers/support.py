"""Small LLMs with workers, and what is known of their processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hispec import LLM
from hispec.workers.pool import WorkerPool

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
SMALL: dict[str, Any] = {
    "max_model_len": 128,
    "num_kv_blocks": 64,
    "max_num_seqs": 2,
    "max_run_ms": 0.0,  # else speed decides how many tokens come at once
}
DEADLY = 7  # a token: who is asked how long the output of a prompt with it becomes is killed


class Deadly:
    """A LengthPredictor that a prompt with DEADLY kills."""

    def predictor(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Callable[[int], float]:
        if DEADLY in prompt_token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda generated: 10.0

    def finished(self, prompt_token_ids: Sequence[int], num_output: int) -> None:
        pass


def pool(llm: LLM) -> WorkerPool:
    assert isinstance(llm.engine, WorkerPool)
    return llm.engine


def worker_pids(llm: LLM) -> list[int]:
    return [pid for name, pid in pool(llm).pids().items() if name != "nursery"]


def all_pids(llm: LLM) -> list[int]:
    """Those of workers, and of the process that forks them."""
    return list(pool(llm).pids().values())


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Fails if it does not hold in time."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


def actors() -> list[int]:
    """Ids of the processes of Ray's workers on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::RayWorker"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
