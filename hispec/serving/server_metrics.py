"""What Prometheus reads of a server: its requests, and the engine's counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..metrics.prometheus import collector


class ServerMetrics:
    """Counts of a server, each by itself: nothing is registered globally."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "hispec_http_requests", "responses", ("path", "status"), registry=self._registry
        )
        self._stats: Mapping[str, Any] = {}
        self._registry.register(collector(lambda: self._stats))

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """`app`, its responses counted."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            has_begun = False

            def count(status: int) -> None:
                self._requests.labels(getattr(scope.get("route"), "path", "other"), str(status)).inc()

            async def note(message: Message) -> None:
                nonlocal has_begun
                if message["type"] == "http.response.start":
                    has_begun = True
                    count(message["status"])
                await send(message)

            try:
                await app(scope, receive, note)
            except Exception:  # it was not foreseen: starlette answers outside of all middleware
                if not has_begun:
                    count(500)
                raise

        return call

    def render(self, stats: Mapping[str, Any]) -> bytes:
        """All of it, with the engine's `stats`."""
        self._stats = stats
        return generate_latest(self._registry)
