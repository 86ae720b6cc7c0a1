"""Outputs: one Delta per stream and step, one RequestOutput per prompt, and the collection of Deltas into
RequestOutputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
# Whose choice an output token is: the drafter's, kept by all tiers above; the check tier's own, kept by
# verify; or the full model's own, as all of plain decoding.
TokenTier = Literal["draft", "check", "verify"]
_MOST_APART = 64  # Deltas of an output that are not joined
FULL = "max_model_len"  # the reason to stop of an output of finish_reason "length" that was to be longer


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output position: the chosen token's, and the most likely ones', best first."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class ContinuationScore:
    """What the full model makes of a given continuation of a prompt.

    logprobs    of each of its tokens after the prompt and those before it, by the model's unprocessed logits
    is_greedy   whether each is the likeliest there, so that greedy decoding writes this continuation
    error       why some of `logprobs` are no finite numbers; None where all are
    """

    logprobs: list[float]
    is_greedy: bool
    error: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Metrics of one request. Times are in seconds on the engine's monotonic clock; docs/metrics.md defines
    what is made of them.

    admitted_s     when it first got a row of the batch
    last_token_s   when its last token came; finished_s is later only if it was aborted or failed
    """

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
    admitted_s: float | None = None
    last_token_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def queue_time_s(self) -> float | None:
        """Arrival to first row; None without one."""
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def prefill_time_s(self) -> float | None:
        """First row to first token; None without one."""
        if self.first_token_s is None or self.admitted_s is None:
            return None
        return self.first_token_s - self.admitted_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (n - 1); None for less than two."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Arrival to end; None before."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)  # not frozen, which would triple the time that making one takes
class Delta:
    """What one step added to one request, or all of one that is no stream; nobody changes one.
    `finish_reason` is set on a request's last Delta."""

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics | None = None
    error: str | None = None
    tiers: list[TokenTier] | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One of a request's `n` outputs. `text` is empty if the model has no tokenizer.

    stop_reason   the stop string or token that ended it; FULL where prompt and output fill max_model_len,
                  or, of an output without a max_tokens, all KV blocks
                  before max_tokens; else None
    tiers         one for each token, if sampling asked for them
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics | None = None
    tiers: list[TokenTier] | None = None

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
    """One of a request's outputs, collected from Deltas. A Delta takes many times the memory of its tokens:
    those before the last become one, some dozens at a time.

    deltas      in order
    keeps_each  they stay as they came, for somebody who takes them one by one
    """

    deltas: list[Delta] = field(default_factory=list)
    keeps_each: bool = False
    num_joined: int = 0  # of `deltas`: those that were several

    def add(self, delta: Delta) -> None:
        """Takes a Delta; once, even if it comes again because an interrupt came in between."""
        if self.deltas and self.deltas[-1] is delta:
            return
        self.deltas.append(delta)
        if not self.keeps_each and len(self.deltas) - self.num_joined > _MOST_APART:
            # An interrupt between these lines has the joined one joined again, no more.
            self.deltas[self.num_joined : -1] = [_join(self.deltas[self.num_joined : -1])]
            self.num_joined += 1

    @property
    def last(self) -> Delta | None:
        return self.deltas[-1] if self.deltas else None

    def make_delta(self) -> Delta:
        """All Deltas as one."""
        return _join(self.deltas)

    def make_output(self, index: int, wants_logprobs: bool, wants_tiers: bool = False) -> CompletionOutput:
        whole = _join(self.deltas)
        return CompletionOutput(
            index,
            whole.text,
            whole.token_ids,
            (whole.logprobs or []) if wants_logprobs else None,
            whole.finish_reason,
            whole.stop_reason,
            whole.metrics,
            (whole.tiers or []) if wants_tiers else None,
        )


def _join(deltas: Sequence[Delta]) -> Delta:
    """Deltas that follow each other as one."""
    logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
    tiers = [tier for delta in deltas for tier in delta.tiers or []]
    return replace(
        deltas[-1],
        token_ids=[token for delta in deltas for token in delta.token_ids],
        text="".join([delta.text for delta in deltas]),
        logprobs=logprobs if any(delta.logprobs is not None for delta in deltas) else None,
        tiers=tiers if any(delta.tiers is not None for delta in deltas) else None,
    )


@dataclass
class PendingRequest:
    """An unfinished request with its `n` outputs; `sequences` maps the engine's request ids to them.
    on_delta: is told of each Delta, and which of the outputs it belongs to."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    wants_logprobs: bool
    wants_tiers: bool
    on_delta: Callable[[int, Delta], None] | None = None
    sequences: dict[str, GrowingOutput] = field(default_factory=dict)

    def make_output(self) -> RequestOutput:
        errors = [
            growing.last.error for growing in self.sequences.values() if growing.last and growing.last.error
        ]
        outputs = [
            growing.make_output(index, self.wants_logprobs, self.wants_tiers)
            for index, growing in enumerate(self.sequences.values())
        ]
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, errors[0] if errors else None
        )
