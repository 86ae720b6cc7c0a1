"""Outputs to bodies of OpenAI's responses."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    choice = _chat_choice if is_chat else _completion_choice
    num_new = sum(len(one.token_ids) for one in output.outputs)
    num_prompt = len(output.prompt_token_ids)
    return {
        "id": response_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice(one, token_text) for one in output.outputs],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
    }


def _chat_choice(output: CompletionOutput, token_text: Callable[[int], str]) -> dict[str, Any]:
    logprobs = None
    if output.logprobs is not None:
        logprobs = {"content": [_chat_logprob(one, token_text) for one in output.logprobs], "refusal": None}
    message = {"role": "assistant", "content": output.text, "refusal": None}
    return {
        "index": output.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
    }


def _chat_logprob(entry: TokenLogprobs, token_text: Callable[[int], str]) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    top = [one(token, logprob) for token, logprob in entry.top.items()]
    return {**one(entry.token_id, entry.logprob), "top_logprobs": top}


def _completion_choice(output: CompletionOutput, token_text: Callable[[int], str]) -> dict[str, Any]:
    logprobs = None
    if output.logprobs is not None:
        tokens = [token_text(entry.token_id) for entry in output.logprobs]
        starts = [0]
        for text in tokens[:-1]:
            starts.append(starts[-1] + len(text))
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in output.logprobs],
            "top_logprobs": [
                {token_text(token): _finite(logprob) for token, logprob in entry.top.items()}
                for entry in output.logprobs
            ],
            "text_offset": starts if tokens else [],
        }
    return {
        "index": output.index,
        "text": output.text,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
    }


def _finite(logprob: float) -> float:
    """OpenAI writes -9999 for what has no probability."""
    return logprob if math.isfinite(logprob) else -9999.0


def error_body(message: str, is_refused: bool) -> dict[str, Any]:
    """The body of a response with an error: of the request, or of the server."""
    kind = "invalid_request_error" if is_refused else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
