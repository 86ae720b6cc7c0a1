"""What comes out: one Delta per request and step, one RequestOutput per prompt."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output position: the chosen token's, and the most likely ones', best first."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds on the monotonic clock of the engine; counts are of this request alone."""

    arrival_s: float
    first_token_s: float | None
    finished_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    rounds: int
    drafted: int
    tentative: int
    accepted: int
    preemptions: int


@dataclass(frozen=True)
class Delta:
    """What one step added to one request. `finish_reason` is set on the last one."""

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics | None = None
    error: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One of a request's `n` outputs. `text` is empty if the model has no tokenizer."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its outputs. `error` says why a request was refused; it then has no outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    error: str | None = None

    @property
    def metrics(self) -> RequestMetrics | None:
        """Of the first output."""
        return self.outputs[0].metrics if self.outputs else None
