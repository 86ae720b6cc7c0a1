"""Aging: bounds how long any policy can delay a request."""

from __future__ import annotations

from .policy import Job, Key, Policy, Service
from .progress import Progress

_WINDOW = 16  # half-life, in rounds, of a request's own tokens per pass
_DECAY = 0.999  # per service, of the averages over all requests: about the last thousand count


class _Age(Progress):
    """Progress of a request, and whether it is urgent."""

    __slots__ = ("is_urgent",)

    def __init__(self, job: Job) -> None:
        super().__init__(job, _WINDOW)
        self.is_urgent = False


class Aging:
    """Wraps a policy: a request that has been here more than max_slowdown times as long as it would take
    alone becomes *urgent*, until it ends. Urgent requests go before all others, the oldest first, and if the
    policy preempts they displace requests that they go before.

    The estimated time alone is
        (attained passes + (predicted length - generated) / tokens per pass) * seconds per pass,
    with the request's own recent tokens per pass (before its first round, that of all requests) and seconds
    per pass of all recent service, at its batch sizes. A prediction never exceeds max_tokens, so a waiting
    request is urgent at the latest when it has been here for
        max_slowdown * (attained + (max_tokens - generated) / tokens per pass) * seconds per pass.
    From then on it waits only for urgent requests that arrived before it: while it waits, each review leaves
    only those in rows, and new arrivals never delay it. That is at most review_rounds rounds, plus the rounds
    that older requests still need divided by the number of rows. If the policy does not preempt, it also
    waits for requests that were running then, whose rounds count like those of older requests. And it waits
    for KV blocks until the requests that it displaces, or all other waiting ones, have lost theirs.

    Among more than a few hundred waiting requests the scheduler may notice urgency some steps late (see
    WaitingOrder). Before the first service seconds per pass are unknown and no request is urgent. The prefill
    of an unserved request is not part of its time alone, so long prompts become urgent somewhat early. Under
    overload most requests become urgent, and the order tends to that of arrival.
    """

    def __init__(self, policy: Policy, max_slowdown: float) -> None:
        self.preempts, self.review_rounds = policy.preempts, policy.review_rounds
        self.num_urgent = 0  # requests that became urgent so far
        self._policy, self._max_slowdown = policy, max_slowdown
        self._ages: dict[int, _Age] = {}
        self._tokens = self._round_passes = 0.0  # decayed sums over rounds
        self._passes = self._seconds = 0.0  # decayed sums over all service

    def add(self, job: Job) -> None:
        self._policy.add(job)
        self._ages[job.number] = _Age(job)

    def served(self, number: int, service: Service) -> None:
        self._policy.served(number, service)
        self._ages[number].served(service)
        if service.rounds:
            self._tokens = _DECAY * self._tokens + service.tokens
            self._round_passes = _DECAY * self._round_passes + service.passes
        if service.seconds >= 0.0:  # nan: not timed
            self._passes = _DECAY * self._passes + service.passes
            self._seconds = _DECAY * self._seconds + service.seconds

    def remove(self, number: int) -> None:
        self._policy.remove(number)
        self._ages.pop(number, None)

    def key(self, number: int, now_s: float) -> Key:
        age = self._ages[number]
        if not age.is_urgent:
            if now_s - age.arrival_s <= self._max_slowdown * self._alone_s(age):
                return (1.0, *self._policy.key(number, now_s))
            age.is_urgent = True
            self.num_urgent += 1
        return (0.0, number)

    def displaces(self, waiting: Key, running: Key) -> bool:
        if waiting[0] != running[0]:
            return waiting[0] < running[0]
        return waiting < running if waiting[0] == 0.0 else self._policy.displaces(waiting[1:], running[1:])

    def _alone_s(self, age: _Age) -> float:
        """Estimated seconds that a request would take alone; inf while seconds per pass are unknown."""
        if self._passes <= 0.0 or self._seconds <= 0.0:
            return float("inf")
        tokens_per_pass = (
            self._tokens / self._round_passes if self._tokens > 0.0 and self._round_passes > 0.0 else 1.0
        )
        return (age.attained + age.remaining_passes(tokens_per_pass)) * self._seconds / self._passes
