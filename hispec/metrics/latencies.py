"""When requests got their tokens, as histograms."""

from __future__ import annotations

from typing import Any

from .histogram import Histogram

NAMES = ("queue_time_s", "prefill_time_s", "ttft_s", "tpot_s", "e2e_s", "inter_token_s", "token_gap_s")


class Latencies:
    """A few additions for each row of a round, however many tokens it committed; docs/metrics.md says what
    the histograms mean."""

    def __init__(self) -> None:
        self._of = {name: Histogram(name) for name in NAMES}
        self._gap, self._times = (0, 0.0), 0  # the last of later_tokens, and how often it came in a row

    def first_tokens(self, num_tokens: int, arrival_s: float, admitted_s: float, now_s: float) -> None:
        """A request's first tokens, which came at once: to the others it did not wait."""
        self._of["queue_time_s"].observe(admitted_s - arrival_s)
        self._of["prefill_time_s"].observe(now_s - admitted_s)
        self._of["ttft_s"].observe(now_s - arrival_s)
        if num_tokens > 1:
            self._of["inter_token_s"].observe(0.0, num_tokens - 1)

    def later_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Tokens that came at once, gap_s after those before them."""
        gap = num_tokens, gap_s
        if gap == self._gap:  # as often in a round, whose rows have all their tokens at the same time
            self._times += 1
            return
        self._observe_gaps()
        self._gap, self._times = gap, 1

    def _observe_gaps(self) -> None:
        times, self._times = self._times, 0
        if times:
            num_tokens, gap_s = self._gap
            self._of["token_gap_s"].observe(gap_s, times)
            self._of["inter_token_s"].observe(gap_s / num_tokens, num_tokens * times)

    def finished(self, e2e_s: float, tpot_s: float | None) -> None:
        """A request that ended by stop or length."""
        self._of["e2e_s"].observe(e2e_s)
        if tpot_s is not None:
            self._of["tpot_s"].observe(tpot_s)

    def as_dict(self) -> dict[str, Any]:
        self._observe_gaps()
        return {name: histogram.as_dict() for name, histogram in self._of.items()}
