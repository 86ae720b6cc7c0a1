"""Gathers the engine's Deltas into what a user gets: one output per sequence, one RequestOutput per prompt."""
from __future__ import annotations

from dataclasses import dataclass, field

from .outputs import CompletionOutput, Delta, RequestOutput, TokenLogprobs


@dataclass
class GrowingOutput:
    """One of a request's outputs while it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.last = delta

    def output(self, index: int, wants_logprobs: bool) -> CompletionOutput:
        last = self.last
        assert last is not None
        logprobs = self.logprobs if wants_logprobs else None
        return CompletionOutput(index, "".join(self.text), self.token_ids, logprobs, last.finish_reason, last.stop_reason, last.metrics)


@dataclass
class PendingRequest:
    """A request with its `n` outputs; `sequences` maps the engine's request ids to them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    wants_logprobs: bool
    sequences: dict[str, GrowingOutput] = field(default_factory=dict)

    def output(self) -> RequestOutput:
        errors = [growing.last.error for growing in self.sequences.values() if growing.last and growing.last.error]
        outputs = [growing.output(index, self.wants_logprobs) for index, growing in enumerate(self.sequences.values())]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, errors[0] if errors else None)
