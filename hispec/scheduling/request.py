"""A request: its tokens, how many of them are computed, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cache.blocks import BlockTable

from ..outputs import FULL, Delta, FinishReason, RequestMetrics, TokenLogprobs
from ..sampling_params import SamplingParams
from ..stats import RoundCounts


class TextStream(Protocol):
    """Turns output tokens into text as they come, and looks for stop strings in it."""

    def append(self, token_id: int, may_stop: bool) -> str | None:
        """Takes one token -> the stop string that it completed, if any. Unless `may_stop`, stop strings are
        plain text."""

    def release(self, final: bool) -> str:
        """Returns text that is certain and was not returned before; with `final`, all text up to a stop
        string."""


ExtraKV = int | str  # of KV besides the model's own: the exit at a layer, or "model" for a draft model


@dataclass(eq=False)
class Request:
    """One sequence that the engine generates.

    number         order of arrival
    token_ids      prompt and committed output
    num_computed   positions whose KV is valid at every layer while the request has blocks;
                   len(token_ids) - 1 when it is ready for a round
    stop_ids       tokens that end it; params.ignore_eos has been applied
    num_cached     prompt positions found in the prefix cache at its last admission
    row            its row of the batch; None while it waits
    drafter_failed whether it continues with plain decoding because the drafter failed
    gaps           by ExtraKV, the first position without KV of an exit or a draft model, because the request
                   was in no round of it since; backfilled before the next one
    """

    request_id: str
    number: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    text: TextStream | None
    arrival_s: float
    token_ids: list[int] = field(init=False)
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    row: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_token_s: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    counts: RoundCounts = field(default_factory=RoundCounts)
    num_preemptions: int = 0
    num_cached: int = 0
    drafter_failed: bool = False
    gaps: dict[ExtraKV, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_ready(self) -> bool:
        """Whether the round's entry invariant holds: all but the last token computed."""
        return self.num_computed == len(self.token_ids) - 1

    @property
    def has_ended(self) -> bool:
        """Whether it needs no more rounds; sets the finish reason if an interrupt came before that."""
        if self.finish_reason is None and self.num_output >= self.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def round_limit(self, window: int) -> int:
        """Positions that a round may process for this request: never more than it may still output."""
        return min(self.cap(window), self.max_tokens - self.num_output)

    def round_end(self, window: int) -> int:
        """Positions from the first that the request may need KV blocks for in a round."""
        return len(self.token_ids) - 1 + self.round_limit(window)

    def cap(self, window: int) -> int:
        """As `round_limit`, however much it may still output."""
        return window if self.params.speculative and not self.drafter_failed else 1

    def append(self, token_ids: Sequence[int]) -> int:
        """Appends committed tokens in order up to the one that ends the request -> how many were appended.

        Stop tokens and stop strings are checked before max_tokens: a token that is both ends it as a stop.
        """
        for taken, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            may_stop = self.num_output >= self.params.min_tokens
            stop_string = self.text.append(token, may_stop) if self.text is not None else None
            if may_stop:
                if token in self.stop_ids:
                    self.finish_reason, self.stop_reason = "stop", token
                elif stop_string is not None:
                    self.finish_reason, self.stop_reason = "stop", stop_string
            if self.finish_reason is None and self.num_output >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return taken
        return len(token_ids)

    def release_text(self) -> str:
        """Returns text that became certain since the last call; all of it once the request is finished."""
        return self.text.release(final=self.finish_reason is not None) if self.text is not None else ""

    def release_text_or_nothing(self) -> str:
        """As `release_text`, for an aborted request: nothing if its text hook fails, since it ends in any
        case."""
        try:
            return self.release_text()
        except Exception:  # a text hook is the caller's code
            return ""

    def delta(self, token_ids: list[int], text: str, now_s: float, error: str | None = None) -> Delta:
        """Makes the engine's report of this step's `token_ids` and `text`."""
        finished = self.finish_reason is not None
        if token_ids and self.first_token_s is None:
            self.first_token_s = now_s
        logprobs = None
        if self.params.logprobs is not None:
            logprobs, self.logprobs = self.logprobs, []
        return Delta(
            request_id=self.request_id,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=FULL if self._is_full else self.stop_reason,
            metrics=self._metrics(now_s) if finished else None,
            error=error,
        )

    @property
    def _is_full(self) -> bool:
        """Whether it ended where max_model_len is reached, with fewer tokens than were asked for."""
        return self.finish_reason == "length" and self.max_tokens != self.params.max_tokens

    def _metrics(self, now_s: float) -> RequestMetrics:
        counts = self.counts
        return RequestMetrics(
            arrival_s=self.arrival_s,
            first_token_s=self.first_token_s,
            finished_s=now_s,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self.num_cached,
            num_output_tokens=self.num_output,
            rounds=counts.rounds,
            drafted=counts.drafted,
            tentative=counts.tentative,
            accepted=counts.accepted,
            preemptions=self.num_preemptions,
        )
