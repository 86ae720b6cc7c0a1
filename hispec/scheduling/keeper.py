"""Where KV goes whose blocks others need, as the scheduler sees it."""
from __future__ import annotations

from typing import Protocol

from .request import Request


class Keeper(Protocol):
    """Keeps the KV of requests that wait without blocks."""

    def save(self, request: Request) -> bool:
        """Copies the KV of the request's computed positions out of its blocks, which go to others next. False, and nothing kept, if there is no room
        or it is cheaper to compute it again."""

    def restore(self, request: Request) -> bool:
        """Copies it into the request's blocks, which cover the same positions again, and keeps it no longer. False: it is lost, compute it again."""

    def drop(self, request: Request) -> None:
        """It is not needed any more. Requests of which nothing is kept are passed over."""
