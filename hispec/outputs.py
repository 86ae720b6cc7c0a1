"""Outputs: one Delta per request and step, one RequestOutput per prompt, and the collection of Deltas into
RequestOutputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
FULL = "max_model_len"  # the reason to stop of an output of finish_reason "length" that was to be longer


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output position: the chosen token's, and the most likely ones', best first."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class RequestMetrics:
    """Metrics of one request. Times are in seconds on the engine's monotonic clock."""

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
    """What one step added to one request. `finish_reason` is set on its last Delta."""

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
    """One of a request's `n` outputs. `text` is empty if the model has no tokenizer.

    stop_reason   the stop string or token that ended it; FULL where prompt and output fill max_model_len
                  before max_tokens; else None
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics | None = None

    @property
    def is_full(self) -> bool:
        """Whether it ended because prompt and output fill max_model_len."""
        return self.finish_reason == "length" and self.stop_reason == FULL


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its outputs. `error` says why the request was refused, or why an output failed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    error: str | None = None

    @property
    def metrics(self) -> RequestMetrics | None:
        """Metrics of the first output."""
        return self.outputs[0].metrics if self.outputs else None


@dataclass
class GrowingOutput:
    """One of a request's outputs, collected from Deltas."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.last = delta

    def make_output(self, index: int, wants_logprobs: bool) -> CompletionOutput:
        last = self.last
        assert last is not None
        logprobs = self.logprobs if wants_logprobs else None
        return CompletionOutput(
            index,
            "".join(self.text),
            self.token_ids,
            logprobs,
            last.finish_reason,
            last.stop_reason,
            last.metrics,
        )


@dataclass
class PendingRequest:
    """An unfinished request with its `n` outputs; `sequences` maps the engine's request ids to them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    wants_logprobs: bool
    sequences: dict[str, GrowingOutput] = field(default_factory=dict)

    def make_output(self) -> RequestOutput:
        errors = [
            growing.last.error for growing in self.sequences.values() if growing.last and growing.last.error
        ]
        outputs = [
            growing.make_output(index, self.wants_logprobs)
            for index, growing in enumerate(self.sequences.values())
        ]
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, errors[0] if errors else None
        )
