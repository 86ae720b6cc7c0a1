"""The HTTP server's routes: OpenAI's completions and chats, models, health, metrics, and a page to try."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from ..openai.requests import CHAT, COMPLETIONS
from ..version import __version__
from .async_engine import AsyncEngine
from .completions import CompletionRequest, Responder, first_error
from .openapi import HEALTH, METRICS, MODELS, ONE_MODEL, REQUESTS
from .server_config import ServerConfig
from .server_metrics import ServerMetrics
from .transport import EventStream, Failure, check_key, failure_of, final, read_json, unless_gone

_log = logging.getLogger(__name__)


def make_app(engine: AsyncEngine, config: ServerConfig, sampling: dict[str, Any]) -> FastAPI:
    """An ASGI application that serves `engine`, and closes it when it ends. sampling: of all requests, which
    may override single fields."""
    responder = Responder(engine, config.name)
    metrics = ServerMetrics()
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.aclose()

    app = FastAPI(title="HiSpec", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    async def respond(request: Request, url: str) -> Response:
        until = asyncio.get_running_loop().time() + config.timeout_s
        try:
            check_key(request, config.api_key)
            body = await read_json(request, config.max_body_bytes)
            asked = CompletionRequest.of(url, body, config, sampling)
            if not asked.is_stream:
                made = await unless_gone(request, responder.body(asked), until)
                return await asyncio.to_thread(JSONResponse, made)  # it takes as long as making it
            events = responder.events(asked)
            first = await unless_gone(request, anext(events), until)
            return EventStream(_again(first, events), until)
        except Failure:
            raise
        except BaseExceptionGroup as group:
            error = first_error(group)
            raise (error if isinstance(error, Failure) else failure_of(error)) from group
        except Exception as error:
            raise failure_of(error) from error

    @app.post(CHAT, openapi_extra=REQUESTS[CHAT])
    async def chat(request: Request) -> Response:
        """A conversation's next message."""
        return await respond(request, CHAT)

    @app.post(COMPLETIONS, openapi_extra=REQUESTS[COMPLETIONS])
    async def completions(request: Request) -> Response:
        """What follows a prompt, or each of several."""
        return await respond(request, COMPLETIONS)

    model = {"id": config.name, "object": "model", "created": started, "owned_by": "hispec"}

    @app.get("/v1/models", openapi_extra=MODELS)
    async def models(request: Request) -> dict[str, Any]:
        check_key(request, config.api_key)
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", openapi_extra=ONE_MODEL)
    async def one_model(request: Request) -> dict[str, Any]:
        check_key(request, config.api_key)
        name = request.path_params["name"]
        if name != config.name:
            raise Failure(404, f"there is no model {name!r} here, only {config.name!r}", "model_not_found")
        return model

    @app.get("/health", openapi_extra=HEALTH)
    async def health() -> Response:
        """200 while the engine serves."""
        if engine.is_dead:
            return JSONResponse({"status": "dead"}, 503)
        return JSONResponse({"status": "ok", "unfinished": engine.num_unfinished})

    @app.get("/metrics", response_class=PlainTextResponse, openapi_extra=METRICS)
    async def prometheus(request: Request) -> Response:
        """Counts, as Prometheus reads them."""
        check_key(request, config.api_key)
        return Response(metrics.render(await engine.stats()), media_type=metrics.content_type)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse((files("hispec.serving") / "page.html").read_text(encoding="utf-8"))

    @app.exception_handler(Failure)
    async def failed(_: Request, failure: Failure) -> Response:
        return failure.response()

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return Failure(error.status_code, text, None, **dict(error.headers or {})).response()

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        _log.error("a request failed", exc_info=error)
        return final(500, f"{type(error).__name__}: {error}").response()

    app.add_middleware(metrics.middleware)
    return app


async def _again(first: str, events: Any) -> Any:
    """The events, the first of which was taken."""
    try:
        yield first
        async for each in events:
            yield each
    finally:
        await events.aclose()
