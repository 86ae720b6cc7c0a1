"""Outputs to bodies of OpenAI's responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..outputs import CompletionOutput, RequestOutput, TokenLogprobs


def response_body(
    output: RequestOutput,
    is_chat: bool,
    model: str,
    created: int,
    response_id: str,
    token_text: Callable[[int], str] = str,
) -> dict[str, Any]:
    """The body of a response: a chat.completion or a text_completion. created: seconds since 1970.
    token_text: the text of a token, for logprobs."""
    return {
        "id": response_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices(output.outputs, is_chat, token_text),
        "usage": usage(len(output.prompt_token_ids), num_new_tokens(output)),
    }


def choices(
    outputs: Sequence[CompletionOutput], is_chat: bool, token_text: Callable[[int], str], first: int = 0
) -> list[dict[str, Any]]:
    """The choices of a body, numbered from `first`."""
    choice = _chat_choice if is_chat else _completion_choice
    return [choice(one, token_text) | {"index": first + one.index} for one in outputs]


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def num_new_tokens(output: RequestOutput) -> int:
    return sum(len(one.token_ids) for one in output.outputs)


def chat_logprobs(entries: Sequence[TokenLogprobs], token_text: Callable[[int], str]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    return {"content": [_chat_logprob(one, token_text) for one in entries], "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprobs], token_text: Callable[[int], str], begin: int = 0
) -> dict[str, Any]:
    """`logprobs` of a completion's choice; begin: characters of its tokens before."""
    tokens = [token_text(entry.token_id) for entry in entries]
    starts = [begin]
    for text in tokens[:-1]:
        starts.append(starts[-1] + len(text))
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {token_text(token): _finite(logprob) for token, logprob in entry.top.items()} for entry in entries
        ],
        "text_offset": starts if tokens else [],
    }


def _chat_choice(output: CompletionOutput, token_text: Callable[[int], str]) -> dict[str, Any]:
    message = {"role": "assistant", "content": output.text, "refusal": None}
    return {
        "index": output.index,
        "message": message,
        "logprobs": None if output.logprobs is None else chat_logprobs(output.logprobs, token_text),
        "finish_reason": output.finish_reason,
    }


def _chat_logprob(entry: TokenLogprobs, token_text: Callable[[int], str]) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    top = [one(token, logprob) for token, logprob in entry.top.items()]
    return {**one(entry.token_id, entry.logprob), "top_logprobs": top}


def _completion_choice(output: CompletionOutput, token_text: Callable[[int], str]) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": output.text,
        "logprobs": None if output.logprobs is None else completion_logprobs(output.logprobs, token_text),
        "finish_reason": output.finish_reason,
    }


def _finite(logprob: float) -> float:
    """OpenAI writes -9999 for what has no probability."""
    return logprob if math.isfinite(logprob) else -9999.0


def error_body(message: str, is_refused: bool, code: str | None = None) -> dict[str, Any]:
    """The body of a response with an error: of the request, or of the server."""
    kind = "invalid_request_error" if is_refused else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
