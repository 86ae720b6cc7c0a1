"""One request of OpenAI's API, from its body to its response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, RequestError, shown
from ..openai.chunks import Chunks
from ..openai.requests import CHAT, name_of_prompt, read_prompts, read_sampling
from ..openai.responses import choices, num_new_tokens, usage
from ..outputs import Delta, RequestOutput
from ..sampling_params import SamplingParams, put_over
from .async_engine import AsyncEngine
from .server_config import ServerConfig
from .transport import Failure, event, failure_of, final

_OWN = ("stream", "stream_options", "tiers")  # parameters that say how the response comes
MOST_ENTRIES = 1024  # of a body's logit_bias, and of its stop_token_ids: each output holds them all
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class CompletionRequest:
    """What a client asked for. prompts: as the engine takes them."""

    url: str
    prompts: list[Any]
    sampling: SamplingParams
    is_stream: bool
    wants_usage: bool

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT

    @contextmanager
    def naming(self, at: int) -> Iterator[Any]:
        """A prompt; a RequestError says which of several it is of."""
        try:
            yield self.prompts[at]
        except RequestError as error:
            if len(self.prompts) == 1:
                raise
            raise RequestError(f"{name_of_prompt(at, self.prompts)}: {error}") from error

    @classmethod
    def of(cls, url: str, body: Any, config: ServerConfig, defaults: dict[str, Any]) -> CompletionRequest:
        """defaults: fields of SamplingParams that the body goes over. Raises ConfigError for what the body
        has wrong, and Failure for another model."""
        if not isinstance(body, dict):
            raise ConfigError(f"body: expected a JSON object, got {shown(body)}")
        _check_model(body, config.name)
        is_stream, wants_usage = _read_stream(body)
        tiers = body.get("tiers")
        if tiers is not None and not isinstance(tiers, bool):
            raise ConfigError(f"tiers: must be true or false, got {shown(tiers)}")
        body = {name: value for name, value in body.items() if name not in _OWN}
        own = {**read_sampling(url, body), "tiers": bool(tiers)}
        # Where nothing names a number, a chat goes on to its end, a completion as SamplingParams says.
        unlimited = {"max_tokens": None} if url == CHAT else {}
        sampling = _limited({**unlimited, **defaults}, own, config)
        if (own.get("logprobs") or 0) > config.max_logprobs:
            name = "top_logprobs" if url == CHAT else "logprobs"
            raise ConfigError(
                f"{name}: must be at most {config.max_logprobs} on this server, got {own['logprobs']}"
            )
        prompts = [prompt.get("messages", prompt) for prompt in read_prompts(url, body)]
        outputs = len(prompts) * sampling.n
        if outputs > config.max_requests:  # each counts: there would never be room for all
            name = "n" if len(prompts) == 1 else "prompt"
            raise ConfigError(
                f"{name}: at most {config.max_requests} outputs (prompts times n) on this server, got"
                f" {outputs}; send several requests"
            )
        return cls(url, prompts, sampling, is_stream, wants_usage)


class Responder:
    """Makes responses of an engine's outputs."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine, self._model = engine, model
        self._tokenizer, self._token_bytes = engine.llm.tokenizer, engine.llm.token_bytes
        self._split_text = engine.llm.split_text

    async def body(self, request: CompletionRequest) -> dict[str, Any]:
        """The whole response. Raises what the engine raises, and Failure if an output failed."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._generate(request, at)) for at in range(len(request.prompts))]
        # In a thread: of many outputs with logprobs it takes seconds, for which all others would wait.
        return await asyncio.to_thread(self._make_body, request, [task.result() for task in tasks])

    def _make_body(self, request: CompletionRequest, outputs: list[RequestOutput]) -> dict[str, Any]:
        made: list[dict[str, Any]] = []
        for output in outputs:
            own = choices(output.outputs, request.is_chat, self._token_bytes, first=len(made))
            for choice, one in zip(own, output.outputs, strict=True):
                if one.tiers is not None and self._tokenizer is not None:
                    texts = self._split_text(one.token_ids, one.text, request.is_chat) or ()
                    pieces = zip(texts, one.tiers, strict=True)
                    choice["tiers"] = [{"text": text, "tier": tier} for text, tier in pieces]
            made += own
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        return {
            "id": _new_id(request),
            "object": "chat.completion" if request.is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": made,
            "usage": usage(num_prompt, sum(map(num_new_tokens, outputs))),
        }

    async def events(self, request: CompletionRequest) -> AsyncGenerator[str, None]:
        """The response as server-sent events. Raises, before the first of them, what the engine raises; later
        failures are events."""
        chunks = Chunks(
            request.is_chat,
            self._model,
            int(time.time()),
            _new_id(request),
            self._token_bytes,
            request.wants_usage,
            self._tokenizer,
        )
        has_begun = False
        try:
            async with aclosing(self._deltas(request)) as deltas:
                begun = set()
                async for prompt, index, delta in deltas:
                    if delta.error is not None:
                        raise final(500, delta.error)
                    made = [] if index in begun else chunks.first(index)
                    begun.add(index)
                    for chunk in made + chunks.of_delta(index, prompt, delta):
                        has_begun = True
                        yield event(chunk)
        except Exception as error:
            if not has_begun:
                raise
            yield event((error if isinstance(error, Failure) else failure_of(error)).body)
            return
        for chunk in chunks.last():
            yield event(chunk)
        yield DONE

    async def _generate(self, request: CompletionRequest, at: int) -> RequestOutput:
        with request.naming(at) as prompt:
            output = await self._engine.generate(prompt, request.sampling, chat=request.is_chat, wait=False)
        if output.error is not None:
            raise final(500, output.error)
        return output

    async def _deltas(self, request: CompletionRequest) -> AsyncGenerator[tuple[int, int, Delta], None]:
        """(prompt, output of the response, Delta) of all prompts, as they come."""
        arrived: asyncio.Queue[tuple[int, int, Delta] | None] = asyncio.Queue()

        async def read(at: int) -> None:
            first = at * request.sampling.n
            with request.naming(at) as prompt:
                stream = self._engine.stream_each(prompt, request.sampling, chat=request.is_chat, wait=False)
                async with aclosing(stream) as deltas:
                    async for index, delta in deltas:
                        arrived.put_nowait((at, first + index, delta))

        tasks = [asyncio.create_task(read(at)) for at in range(len(request.prompts))]
        whole = asyncio.gather(*tasks)
        whole.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (item := await arrived.get()) is not None:
                yield item
            await whole
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(whole, *tasks, return_exceptions=True)


def _check_model(body: dict[str, Any], name: str) -> None:
    asked = body.get("model")
    if asked is not None and asked != name:
        raise Failure(404, f"model: {shown(asked)} is not served here, only {name!r} is", "model_not_found")


def _read_stream(body: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the response is a stream, and whether it ends with numbers of tokens."""
    is_stream, options = body.get("stream"), body.get("stream_options")
    if is_stream is not None and not isinstance(is_stream, bool):
        raise ConfigError(f"stream: must be true or false, got {shown(is_stream)}")
    if options is None:
        return bool(is_stream), False
    if not is_stream:
        raise ConfigError("stream_options needs stream=true")
    if not isinstance(options, dict):
        raise ConfigError(f"stream_options: expected a JSON object, got {shown(options)}")
    wants_usage = options.get("include_usage")
    if wants_usage is not None and not isinstance(wants_usage, bool):
        raise ConfigError(f"stream_options.include_usage: must be true or false, got {shown(wants_usage)}")
    return True, bool(wants_usage)


def _limited(defaults: dict[str, Any], own: dict[str, Any], config: ServerConfig) -> SamplingParams:
    """Sampling within the server's limits; own: what the body says, which goes over the defaults. Raises
    ConfigError for what is beyond them and the body's own."""
    for name in ("logit_bias", "stop_token_ids"):
        entries = own.get(name)
        if isinstance(entries, dict | list) and len(entries) > MOST_ENTRIES:
            raise ConfigError(
                f"{name}: {len(entries)} entries in a request, at most {MOST_ENTRIES}; leave some out"
            )
    sampling = SamplingParams.of(put_over(defaults, own), "body").model_copy()
    most = config.max_tokens
    if most is None:
        return sampling
    if own.get("max_tokens") is not None and own["max_tokens"] > most:
        raise ConfigError(f"max_tokens: must be at most {most} on this server, got {sampling.max_tokens}")
    if (own.get("min_tokens") or 0) > most:
        raise ConfigError(f"min_tokens: must be at most {most} on this server, got {own['min_tokens']}")
    limits = {
        "max_tokens": min(sampling.max_tokens or most, most),
        "min_tokens": min(sampling.min_tokens, most),
    }
    return sampling.model_copy(update=limits)


def _new_id(request: CompletionRequest) -> str:
    return f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}"


def first_error(error: BaseExceptionGroup[Any]) -> Exception:
    """What made a group of tasks fail: they are cancelled with the first."""
    found = error.exceptions[0]
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, Exception) else RequestError(str(found))
