"""A request: its tokens, how many of them are computed, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from cache.blocks import BlockTable

from ..outputs import FULL, Delta, FinishReason, RequestMetrics, TokenLogprobs, TokenTier
from ..sampling_params import SamplingParams
from ..stats import RoundCounts, RoundTally


class TextStream(Protocol):
    """Turns output tokens into text as they come, and looks for stop strings in it.

    One that has `at_end` = True and a method `whole(token_ids)` is asked for nothing but the text of all
    tokens of an output that has ended, perhaps again: that is quicker, where nobody reads text before. A
    request that has one and stop strings is refused.
    """

    def append(self, token_id: int, may_stop: bool) -> str | None:
        """Takes one token -> the stop string that it completed, if any. Unless `may_stop`, stop strings are
        plain text."""

    def release(self, final: bool) -> str:
        """Returns text that is certain and was not returned before; with `final`, all text up to a stop
        string."""


def is_asked_at_end(text: TextStream | None) -> bool:
    """Whether `text` is asked for nothing before the output has ended, and so finds no stop strings."""
    return getattr(text, "at_end", False) is True and hasattr(text, "whole")


ExtraKV = int | str  # of KV besides the model's own: the exit at a layer, or "model" for a draft model


@dataclass(eq=False)
class Request:
    """One sequence that the engine generates.

    number         order of arrival
    token_ids      prompt and committed output
    num_computed   positions whose KV is valid at every layer while the request has blocks;
                   len(token_ids) - 1 when it is ready for a round
    most_computed  the most that it ever was: what is computed again is no service
    stop_ids       tokens that end it; params.ignore_eos has been applied
    num_read       output tokens that `text` has taken
    stop_string    completed by the last of them
    num_cached     prompt positions found in the prefix cache at its first admission, or before they would
                   have been computed
    row            its row of the batch; None while it waits
    num_timed      output tokens whose time was noted
    drafter_failed whether it continues with plain decoding because the drafter failed
    is_suspect     whether its logits were no numbers: it started over, plainly and out of the prefix cache
    is_stream      whether what it gains is wanted as it comes; else when it has ended
    rounds         its rounds so far
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
    num_read: int = 0
    stop_string: str | None = None
    num_timed: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    rounds: RoundTally = field(default_factory=RoundTally)
    num_preemptions: int = 0
    num_cached: int = 0
    most_computed: int = 0
    drafter_failed: bool = False
    is_suspect: bool = False
    is_stream: bool = True
    gaps: dict[ExtraKV, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self._whole: Callable[[list[int]], str] | None = (
            getattr(self.text, "whole", None) if is_asked_at_end(self.text) else None
        )
        self.reads_each = self.text is not None and self._whole is None

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

    def round_limit(self, window: int) -> int:
        """Positions that a round may process for this request: never more than it may still output."""
        return min(self.cap(window), self.max_tokens - self.num_output)

    def round_end(self, window: int) -> int:
        """Positions from the first that the request may need KV blocks for in a round."""
        return len(self.token_ids) - 1 + self.round_limit(window)

    def cap(self, window: int) -> int:
        """As `round_limit`, however much it may still output."""
        is_plain = not self.params.speculative or self.drafter_failed or self.is_suspect
        return 1 if is_plain else window

    def append(self, token_ids: Sequence[int]) -> int:
        """Appends committed tokens in order up to the one that ends the request -> how many were appended.

        Stop tokens and stop strings are checked before max_tokens: a token that is both ends it as a stop.
        """
        num = len(token_ids)
        if (
            not self.reads_each
            and self.finish_reason is None
            and len(self.token_ids) + num < len(self.prompt_token_ids) + self.max_tokens
            and self.stop_ids.isdisjoint(token_ids)
        ):  # nearly always, where no text is looked at: none of them can end it
            self.token_ids += token_ids
            return num
        for taken, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            if self.has_ended():
                return taken
        return num

    def has_ended(self) -> bool:
        """Gives `text` the last token, unless it has it, and sets the finish reason if that token ends the
        request. So it does what is left to do after an interrupt within `append`."""
        num_output, token = self.num_output, self.token_ids[-1]
        may_stop = num_output >= self.params.min_tokens
        if self.reads_each and self.text is not None and self.num_read < num_output:
            # In one statement: an interrupt between two would have `text` take the token twice, or never.
            self.num_read, self.stop_string = num_output, self.text.append(token, may_stop)
        if self.finish_reason is None and num_output:
            if may_stop:
                if token in self.stop_ids:
                    self.stop_reason, self.finish_reason = token, "stop"
                elif self.stop_string is not None:
                    self.stop_reason, self.finish_reason = self.stop_string, "stop"
            if self.finish_reason is None and num_output >= self.max_tokens:
                self.finish_reason = "length"
        return self.finish_reason is not None

    def release_text(self) -> str:
        """Returns text that became certain since the last call; all of it once the request is finished."""
        return self.text.release(final=self.finish_reason is not None) if self.text is not None else ""

    def whole_text(self) -> str:
        """The text of what it has put out, of a request whose text is not read token by token."""
        return "" if self._whole is None else self._whole(self.output_token_ids)

    def note_admission(self, now_s: float) -> None:
        """Notes when it first got a row."""
        if self.admitted_s is None:
            self.admitted_s = max(now_s, self.arrival_s)

    def note_times(self, now_s: float) -> int:
        """Notes when it had its first and its last token, and when it ended: never before what came before
        it, even if the clock goes back -> how many tokens had no time yet."""
        before_s = self.last_token_s or self.admitted_s or self.arrival_s  # never before it arrived
        if now_s < before_s:
            now_s = before_s
        num_output = self.num_output
        num_new = num_output - self.num_timed
        if num_new > 0:
            self.num_timed, self.last_token_s = num_output, now_s
            if self.first_token_s is None:
                self.first_token_s = now_s
        if self.finished_s is None and self.finish_reason is not None:
            self.finished_s = now_s
        return num_new

    @property
    def is_full(self) -> bool:
        """Whether it ended where max_model_len or the last KV block is reached, with fewer tokens than were
        asked for."""
        return self.finish_reason == "length" and self.max_tokens != self.params.max_tokens

    def metrics(self) -> RequestMetrics:
        counts = self.rounds.add_to(RoundCounts())
        return RequestMetrics(
            arrival_s=self.arrival_s,
            first_token_s=self.first_token_s,
            finished_s=self.finished_s,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self.num_cached,
            num_output_tokens=self.num_output,
            rounds=counts.rounds,
            drafted=counts.drafted,
            tentative=counts.tentative,
            accepted=counts.accepted,
            preemptions=self.num_preemptions,
            admitted_s=self.admitted_s,
            last_token_s=self.last_token_s,
        )


@dataclass(eq=False, slots=True)
class Gain:
    """What a request has gained since its last Delta: whatever its tokens say, so that a step which is
    interrupted after a commit has lost nothing.

    start      output tokens that earlier Deltas had
    logprobs, tiers   of the tokens from there on, and perhaps of more; None = nobody asks for them. Empty
                      lists for every row and round would have Python look for garbage
    """

    request: Request
    start: int
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    tiers: list[TokenTier] | None = None
    error: str | None = None

    @property
    def is_held(self) -> bool:
        """Whether nobody wants it yet."""
        return not self.request.is_stream and self.request.finish_reason is None

    def make_delta(self) -> Delta:
        """Changes nothing."""
        request = self.request
        token_ids = request.token_ids[len(request.prompt_token_ids) + self.start :]
        has_ended = request.finish_reason is not None
        return Delta(
            request_id=request.request_id,
            token_ids=token_ids,
            text=self.text,
            logprobs=_first(self.logprobs, token_ids) if request.params.logprobs is not None else None,
            finish_reason=request.finish_reason,
            stop_reason=FULL if has_ended and request.is_full else request.stop_reason,
            metrics=request.metrics() if has_ended else None,
            error=self.error,
            tiers=_first(self.tiers, token_ids) if request.params.tiers else None,
        )


_T = TypeVar("_T")


def _first(each: list[_T] | None, token_ids: Sequence[int]) -> list[_T]:
    """Those of these tokens."""
    return [] if each is None else each[: len(token_ids)]
