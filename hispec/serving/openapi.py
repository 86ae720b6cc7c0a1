"""The bodies of requests, in the words of OpenAPI: what `hispec.openai.requests` reads."""

from __future__ import annotations

from typing import Any

from ..openai.requests import CHAT, COMPLETIONS, MOST_PROMPTS
from ..sampling_params import SamplingParams

_SAMPLING = (
    *(
        "temperature",
        "top_p",
        "n",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "max_tokens",
    ),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
)
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS_OR_TOKENS = {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKENS]}}


def _body(required: str, own: dict[str, Any]) -> dict[str, Any]:
    sampling = SamplingParams.model_json_schema()["properties"]
    either = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}
    properties = {
        "model": {"type": "string"},
        **own,
        **{name: sampling[name] for name in _SAMPLING},
        "stop": either,
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
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            str(status): {"description": text, "content": {"application/json": {}}}
            for status, text in (
                (200, "the response, or with stream=true server-sent events of its chunks"),
                (400, "the request can never be served; the message says why"),
                (401, "no valid API key"),
                (404, "another model"),
                (408, "it took longer than the server allows"),
                (413, "the body is too large"),
                (429, "as many requests are unfinished as there may be; Retry-After says when to try again"),
                (503, "the server is ending, or its engine has failed"),
            )
        },
    }


_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "user", "assistant", "tool"]},
        "content": {"type": "string"},
    },
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
    ),
    COMPLETIONS: _body(
        "prompt",
        {
            "prompt": {
                "anyOf": [{"type": "string"}, _TOKENS, {**_TEXTS_OR_TOKENS, "maxItems": MOST_PROMPTS}]
            },
            "logprobs": {"type": "integer", "minimum": 0, "maximum": 64},
        },
    ),
}
