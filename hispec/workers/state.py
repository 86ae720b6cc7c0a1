"""What the dispatcher knows of requests, calls and workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from ..outputs import Delta
from .launch import Process
from .messages import NewRequest
from .pipes import LlmEnd


@dataclass(eq=False)
class Task:
    """An unfinished request, how many workers died of it, and of a stream what was handed on of it, and how
    much of that another worker has to say again."""

    request: NewRequest
    deaths: int = 0
    given_tokens: list[int] = field(default_factory=list)
    given_text: int = 0
    skip_tokens: int = 0
    skip_text: int = 0

    def goes_on_with(self, delta: Delta) -> bool:
        """Whether what comes is what was handed on already, as far as it was. Random numbers that depend on
        the run (`acceptance: rejection`), learnt n-grams or another CPU may have it otherwise."""
        begin = len(self.given_tokens) - self.skip_tokens
        again = self.given_tokens[begin : begin + len(delta.token_ids)]
        is_short = delta.finish_reason in ("stop", "length") and len(delta.token_ids) < self.skip_tokens
        return delta.token_ids[: len(again)] == again and not is_short


@dataclass(eq=False)
class Call:
    """A method that workers run.

    is_binding   a worker that it fails in ends, since it would do other than the others
    done         gets all replies at once, those of the dead left out
    """

    name: str
    arguments: tuple[Any, ...]
    waits_for: set[Worker] = field(default_factory=set)
    is_binding: bool = False
    replies: list[Any] = field(default_factory=list)
    done: SimpleQueue[list[Any]] = field(default_factory=SimpleQueue)

    def end_for(self, worker: Worker, *reply: Any) -> None:
        self.waits_for.discard(worker)
        self.replies += reply
        if not self.waits_for:
            self.done.put(self.replies)


@dataclass(eq=False)
class Worker:
    """
    place      which of the pool's
    end        of the pipe to it
    silent_s   since its last sign of life; None: it has not given one yet
    is_ready   it takes requests: it has started, and done what it was told meanwhile
    calls      those that it has not replied to, in order
    counted    what it had counted when it last said so
    """

    process: Process
    place: int
    end: LlmEnd = field(init=False)
    silent_s: float | None = None
    has_started: bool = False
    is_ready: bool = False
    is_alone: bool = False  # with a request that may be what others died of
    tasks: dict[int, Task] = field(default_factory=dict)
    calls: deque[Call] = field(default_factory=deque)
    counted: dict[str, Any] | None = None
    last_words: str | None = None
    failure: Exception | None = None  # that it could not start of


@dataclass(frozen=True)
class Vacancy:
    """A place for which no worker could be started. until: on the monotonic clock, then it is tried again;
    wait_s: how long that is after the last try."""

    wait_s: float
    until: float
