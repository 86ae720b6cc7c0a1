"""The order of service, as a small interface; first come, first served is the one policy so far."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..request import Request


class Policy(Protocol):
    """Pure choices over requests; the scheduler moves them and their blocks."""

    def next(self, waiting: Sequence[Request]) -> int:
        """Index of the waiting request to admit next; `waiting` is not empty."""

    def victim(self, running: Sequence[Request]) -> int:
        """Index of the running request to preempt when blocks run out; `running` is not empty."""


class FirstComeFirstServed:
    """Admits in order of arrival, preempts the latest to arrive: so the oldest always gets through."""

    def next(self, waiting: Sequence[Request]) -> int:
        return min(range(len(waiting)), key=lambda i: waiting[i].number)

    def victim(self, running: Sequence[Request]) -> int:
        return max(range(len(running)), key=lambda i: running[i].number)
