"""Starting all workers of an LLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import WorkerError
from ..trace.merge import trace_of_worker
from .launch import Launcher, Process
from .messages import Alive, Hello, Setup, Start
from .shares import Share

_log = logging.getLogger(__name__)
_NOTICE_S = 30.0  # between two words on a worker that is not ready


def start_all(
    launcher: Launcher, setup: Setup, shares: Sequence[Share], waits: bool
) -> tuple[list[Process], int, Hello]:
    """All workers, how many of them are ready, and what the first one says of itself.

    It starts alone: it chooses how many KV blocks each has, and keeps what it measures for the others. Of
    several GPUs each has as many as it has room for, and requests are for the one that has the fewest. waits:
    for all. Raises WorkerError, or what a worker says that it cannot start of.
    """
    first = launcher.start(start_of(setup, shares, None, 0))
    hello = _await_hello(launcher, first)
    num_blocks = None if waits and shares[0].device != "cpu" else hello.admission.num_blocks
    others = [launcher.start(start_of(setup, shares, num_blocks, place)) for place in range(1, len(shares))]
    if waits:
        counts = [_await_hello(launcher, process).admission.num_blocks for process in others]
        fewest = min([hello.admission.num_blocks, *counts])
        hello = replace(hello, admission=replace(hello.admission, num_blocks=fewest))
    return [first, *others], 1 + len(others) * waits, hello


def _await_hello(launcher: Launcher, process: Process) -> Hello:
    answer: Hello | Exception | None = None
    last_words, waited_until = "", time.monotonic() + _NOTICE_S
    try:
        while answer is None:
            if process.connection.poll(max(0.0, waited_until - time.monotonic())):
                message = process.connection.recv()
                if isinstance(message, str):
                    last_words = message
                elif not isinstance(message, Alive):
                    answer = message
            if answer is None and time.monotonic() >= waited_until:
                _log.warning("still waiting for a worker: %s", launcher.waits_for)
                waited_until += _NOTICE_S
    except (OSError, EOFError):
        ending = launcher.bury(process)
        raise WorkerError(f"a worker {last_words or ending} before it was ready") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def start_of(
    setup: Setup, shares: Sequence[Share], num_blocks: int | None, place: int, num_replaced: int = 0
) -> Start:
    """What the worker at a place is started with. One that replaces another has a trace of its own, and takes
    what that one had of the memory: the others hold theirs."""
    share, config = shares[place], setup.config
    changed: dict[str, Any] = {"device": share.device, "num_kv_blocks": num_blocks or config.num_kv_blocks}
    if config.trace is not None:
        number = place if num_replaced == 0 else len(shares) - 1 + num_replaced
        changed["trace"] = str(trace_of_worker(Path(config.trace), number))
    sharers = setup.sharers if num_replaced == 0 else 1
    return Start(share, config.model_copy(update=changed), setup.speculative, sharers)
