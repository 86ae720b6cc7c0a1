"""The bodies of requests and responses, in the words of OpenAPI: what `hispec.openai` reads and writes."""

from __future__ import annotations

from typing import Any

from ..openai.requests import CHAT, COMPLETIONS, IGNORED, MOST_PROMPTS, MOST_STOPS, SAME
from ..sampling_params import SamplingParams
from .completions import MOST_ENTRIES

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS_OR_TOKENS = {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKENS]}}


_REFUSALS = {
    400: "the request can never be served; the message says why",
    401: "no valid API key",
    404: "another model",
    408: "it took longer than the server allows",
    413: "the body is too large",
    429: "with this request more outputs would be unfinished than may be; Retry-After says when to try again",
    500: "the engine gave up on this request alone",
    503: "the server is ending, or its engine has failed",
}


def _object(**properties: Any) -> dict[str, Any]:
    """An object that has all of `properties`, and no other."""
    names = list(properties)
    return {"type": "object", "required": names, "properties": properties, "additionalProperties": False}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusal(status: int) -> dict[str, Any]:
    error = _object(
        message={"type": "string", "minLength": 1},
        type={"enum": ["server_error" if status >= 500 else "invalid_request_error"]},
        param={"type": "null"},
        code={"type": ["string", "null"]},
    )
    return _json(_REFUSALS[status], _object(error=error))


def _refusals(*statuses: int) -> dict[str, Any]:
    return {str(status): _refusal(status) for status in statuses}


def _answer(kind: str, own: dict[str, Any]) -> dict[str, Any]:
    """own: what a choice has besides its index and its end."""
    piece = _object(text={"type": "string"}, tier={"enum": ["draft", "check", "verify"]})
    choice = _object(index=_COUNT, **own, finish_reason={"type": ["string", "null"]})
    choice["properties"]["tiers"] = {"type": "array", "items": piece}  # where they were asked for
    return _object(
        id={"type": "string"},
        object={"const": kind},
        created={"type": "integer"},
        model={"type": "string"},
        choices={"type": "array", "items": choice, "minItems": 1},
        usage=_object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
    )


def _body(required: str, own: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    sampling = SamplingParams.model_json_schema()["properties"]
    texts = {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MOST_STOPS}
    properties = {
        "model": {"type": "string"},
        **own,
        **{name: sampling[name] for name in (*SAME, "max_tokens")},
        **{name: {} for name in IGNORED if name != "model"},
        "seed": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "top_p": {"type": "number", "minimum": 0.0, "maximum": 1.0},
        "logit_bias": sampling["logit_bias"] | {"maxProperties": MOST_ENTRIES},
        "stop_token_ids": sampling["stop_token_ids"] | {"maxItems": MOST_ENTRIES},
        "stop": {"anyOf": [{"type": "string"}, texts]},
        "stream": {"type": "boolean", "default": False},
        "tiers": {"type": "boolean", "default": False},
        "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    }
    schema = {
        "type": "object",
        "required": [required],
        "properties": properties,
        "additionalProperties": False,
    }
    served = _json("the response, or with stream=true server-sent events of its chunks", answer)
    served["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    full = _refusal(429)
    full["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": served,
            **_refusals(400, 401, 404, 408, 413),
            "429": full,
            **_refusals(500, 503),
        },
    }


_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {  # what else it has is the chat template's
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
    },
}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER, _TEXT = {"type": "number"}, {"type": "string"}
_BYTES = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _BYTES}
_SAID = _object(role={"const": "assistant"}, content=_TEXT, refusal={"type": "null"})
_CHAT_LOGPROBS = {
    "anyOf": [
        {"type": "null"},
        _object(
            content={
                "type": "array",
                "items": _object(**_TOKEN, top_logprobs={"type": "array", "items": _object(**_TOKEN)}),
            },
            refusal={"type": "null"},
        ),
    ]
}
_LOGPROBS = {
    "anyOf": [
        {"type": "null"},
        _object(
            tokens={"type": "array", "items": _TEXT},
            token_logprobs={"type": "array", "items": _NUMBER},
            top_logprobs={"type": "array", "items": {"type": "object", "additionalProperties": _NUMBER}},
            text_offset={"type": "array", "items": _COUNT},
        ),
    ]
}
REQUESTS = {
    CHAT: _body(
        "messages",
        {
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "max_completion_tokens": {"type": "integer", "minimum": 1},
            "logprobs": {"type": "boolean"},
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 64},
        },
        _answer("chat.completion", {"message": _SAID, "logprobs": _CHAT_LOGPROBS}),
    ),
    COMPLETIONS: _body(
        "prompt",
        {
            "prompt": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    _TOKENS,
                    {**_TEXTS_OR_TOKENS, "maxItems": MOST_PROMPTS},
                ]
            },
            "logprobs": {"type": "integer", "minimum": 0, "maximum": 64},
        },
        _answer("text_completion", {"text": {"type": "string"}, "logprobs": _LOGPROBS}),
    ),
}
_MODEL = _object(
    id={"type": "string"},
    object={"const": "model"},
    created={"type": "integer"},
    owned_by={"type": "string"},
)
MODELS = {
    "responses": {
        "200": _json("the model", _object(object={"const": "list"}, data={"type": "array", "items": _MODEL})),
        **_refusals(401),
    }
}
ONE_MODEL = {
    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
    "responses": {"200": _json("the model", _MODEL), **_refusals(401, 404)},
}
HEALTH = {
    "responses": {
        "200": _json(
            "the engine serves",
            _object(status={"const": "ok"}, unfinished={"type": "integer", "minimum": 0}),
        ),
        "503": _json("the engine has failed", _object(status={"const": "dead"})),
    }
}
METRICS = {
    "responses": {
        "200": {"description": "counts", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **_refusals(401),
    }
}
