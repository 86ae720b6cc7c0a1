"""A request's attained service, and a prediction of its remaining service."""

from __future__ import annotations

from .policy import Job, Service


class Progress:
    """Generated tokens, attained passes and recent tokens per pass of one request.

    window   half-life, in rounds, of the averages behind tokens per pass
    """

    __slots__ = ("_decay", "_job", "_passes", "_remaining", "_tokens", "arrival_s", "attained", "generated")

    def __init__(self, job: Job, window: int) -> None:
        self.arrival_s = job.arrival_s
        self.attained = 0.0
        self.generated = 0
        self._job = job
        self._decay = 0.5 ** (1.0 / window)
        self._tokens = self._passes = 0.0
        self._remaining: float | None = None  # None = out of date

    def served(self, service: Service) -> None:
        self.attained += service.passes
        if service.rounds:
            keep = self._decay if service.rounds == 1 else self._decay**service.rounds
            self._tokens = keep * self._tokens + service.tokens
            self._passes = keep * self._passes + service.passes
            self.generated += service.tokens
            self._remaining = None

    def remaining_tokens(self) -> float:
        """Predicted tokens still to be generated; 0 once the request has all that it may output."""
        if self._remaining is None:
            self._remaining = max(0.0, self._job.predict(self.generated) - self.generated)
        return self._remaining

    def remaining_passes(self, tokens_per_pass: float) -> float:
        """Predicted passes still needed, by the request's own recent tokens per pass; by `tokens_per_pass`
        before its first round."""
        if self._tokens > 0.0 and self._passes > 0.0:
            return self.remaining_tokens() * self._passes / self._tokens
        return self.remaining_tokens() / tokens_per_pass
