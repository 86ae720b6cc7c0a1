"""Deltas to chunks of OpenAI's streams."""

from __future__ import annotations

from typing import Any

from ..detokenizer import TokenBytes, TokenPieces
from ..outputs import Delta
from .responses import Offsets, chat_logprobs, completion_logprobs, usage


class Chunks:
    """The chunks of one response, as JSON values."""

    def __init__(
        self,
        is_chat: bool,
        model: str,
        created: int,
        response_id: str,
        token_bytes: TokenBytes,
        wants_usage: bool = False,
        tokenizer: Any = None,
    ) -> None:
        """created: seconds since 1970; wants_usage: a last chunk has the numbers of tokens; tokenizer: to cut
        the text of Deltas that have tiers."""
        self._is_chat, self._wants_usage, self._token_bytes = is_chat, wants_usage, token_bytes
        self._head = {
            "id": response_id,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._num_prompt: dict[int, int] = {}  # by prompt
        self._num_new = 0
        self._tokenizer = tokenizer
        self._pieces: dict[int, TokenPieces] = {}  # by output
        self._offsets: dict[int, Offsets] = {}  # by output

    def first(self, index: int) -> list[dict[str, Any]]:
        """Before the first text of output `index`."""
        role = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(index, {"delta": role}, None, None)] if self._is_chat else []

    def of_delta(self, index: int, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        """What a Delta adds to output `index`; prompt: which of the request's it answers."""
        self._num_new += len(delta.token_ids)
        if delta.metrics is not None:
            self._num_prompt[prompt] = delta.metrics.num_prompt_tokens
        logprobs = None
        if delta.logprobs and self._is_chat:
            logprobs = chat_logprobs(delta.logprobs, self._token_bytes)
        elif delta.logprobs:
            offsets = self._offsets.setdefault(index, Offsets())
            logprobs = completion_logprobs(delta.logprobs, self._token_bytes, offsets)
        if not (delta.text or logprobs or delta.tiers or delta.finish_reason):
            return []
        content: dict[str, Any] = {"text": delta.text}
        if self._is_chat:
            content = {"delta": {"content": delta.text} if delta.text or not delta.finish_reason else {}}
        chunk = self._chunk(index, content, logprobs, delta.finish_reason)
        if delta.tiers is not None and self._tokenizer is not None:
            pieces = self._pieces.setdefault(index, TokenPieces(self._tokenizer, not self._is_chat))
            cut = pieces.cut(delta.token_ids, delta.tiers, delta.text, delta.finish_reason is not None)
            chunk["choices"][0]["tiers"] = [{"text": text, "tier": tier} for text, tier in cut]
        return [chunk]

    def last(self) -> list[dict[str, Any]]:
        """After the last Delta."""
        if not self._wants_usage:
            return []
        numbers = usage(sum(self._num_prompt.values()), self._num_new)
        return [{**self._head, "choices": [], "usage": numbers}]

    def _chunk(
        self, index: int, content: dict[str, Any], logprobs: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice], **({"usage": None} if self._wants_usage else {})}
