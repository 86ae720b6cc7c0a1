"""Outputs to bodies of OpenAI's responses."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..detokenizer import TokenBytes
from ..outputs import CompletionOutput, RequestOutput, TokenLogprobs


def response_body(
    output: RequestOutput,
    is_chat: bool,
    model: str,
    created: int,
    response_id: str,
    token_bytes: TokenBytes,
) -> dict[str, Any]:
    """The body of a response: a chat.completion or a text_completion. created: seconds since 1970.
    token_bytes: of a token, for logprobs."""
    return {
        "id": response_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices(output.outputs, is_chat, token_bytes),
        "usage": usage(len(output.prompt_token_ids), num_new_tokens(output)),
    }


def choices(
    outputs: Sequence[CompletionOutput], is_chat: bool, token_bytes: TokenBytes, first: int = 0
) -> list[dict[str, Any]]:
    """The choices of a body, numbered from `first`."""
    choice = _chat_choice if is_chat else _completion_choice
    return [choice(one, token_bytes) | {"index": first + one.index} for one in outputs]


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def num_new_tokens(output: RequestOutput) -> int:
    return sum(len(one.token_ids) for one in output.outputs)


def chat_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    return {"content": [_chat_logprob(one, token_bytes) for one in entries], "refusal": None}


class Offsets:
    """Where tokens begin in the text of an output that is read token by token."""

    def __init__(self) -> None:
        self._read, self._num = codecs.getincrementaldecoder("utf-8")("replace"), 0

    def next(self, content: bytes) -> int:
        """Characters before the next token, which adds these bytes to the text."""
        begin = self._num
        self._num += len(self._read.decode(content))
        return begin


def completion_logprobs(
    entries: Sequence[TokenLogprobs], token_bytes: TokenBytes, offsets: Offsets
) -> dict[str, Any]:
    """`logprobs` of a completion's choice; offsets: of its output, which were told of the tokens before."""
    of_tokens = [token_bytes(entry.token_id) for entry in entries]
    return {
        "tokens": [_text(content) for content in of_tokens],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            _by_text(entry.top | {entry.token_id: entry.logprob}, token_bytes) for entry in entries
        ],
        "text_offset": [
            offsets.next(b"" if entry.token_id in token_bytes.special else content)
            for entry, content in zip(entries, of_tokens, strict=True)
        ],
    }


def _by_text(top: Mapping[int, float], token_bytes: TokenBytes) -> dict[str, float]:
    """{text: logprob}, of the likeliest tokens, best first, and then of the chosen one; of tokens of one text
    the first."""
    found: dict[str, float] = {}
    for token, logprob in top.items():
        found.setdefault(_text(token_bytes(token)), _finite(logprob))
    return found


def _text(content: bytes) -> str:
    """The text of a token; of a part of a character its bytes, as OpenAI writes them."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _chat_choice(output: CompletionOutput, token_bytes: TokenBytes) -> dict[str, Any]:
    message = {"role": "assistant", "content": output.text, "refusal": None}
    return {
        "index": output.index,
        "message": message,
        "logprobs": None if output.logprobs is None else chat_logprobs(output.logprobs, token_bytes),
        "finish_reason": output.finish_reason,
    }


def _chat_logprob(entry: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        content = token_bytes(token)
        return {"token": _text(content), "logprob": _finite(logprob), "bytes": list(content)}

    top = [one(token, logprob) for token, logprob in entry.top.items()]
    return {**one(entry.token_id, entry.logprob), "top_logprobs": top}


def _completion_choice(output: CompletionOutput, token_bytes: TokenBytes) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": output.text,
        "logprobs": None
        if output.logprobs is None
        else completion_logprobs(output.logprobs, token_bytes, Offsets()),
        "finish_reason": output.finish_reason,
    }


def _finite(logprob: float) -> float:
    """OpenAI writes -9999 for what has no probability."""
    return logprob if math.isfinite(logprob) else -9999.0


def error_body(message: str, is_refused: bool, code: str | None = None) -> dict[str, Any]:
    """The body of a response with an error: of the request, or of the server."""
    kind = "invalid_request_error" if is_refused else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
