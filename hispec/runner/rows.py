"""The rows of a round, made of requests: of all that have a row, or of those that go on from a round in
flight and those that join them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..control.choice import Choice
from ..decoding.drafter import waits_for_follow
from ..scheduling.request import Request
from .launchers import Flight, Rows
from .round_inputs import Input


def make_rows(
    running: Sequence[Request], choice: Choice, limits: Mapping[int, int], num_rounds: int = 0
) -> Rows:
    """Of the requests `running`, by row. limits: by row, the places that may be processed for those that take
    part, in all rounds together; num_rounds: as Rows."""
    inputs, context_len, ends = [], 0, []
    for row, request in enumerate(running):
        inputs.append(_inputs_of(request, choice, limits.get(row, 0)))
        _, start, cap, room, _, _ = inputs[-1]
        ends.append(start + (limits.get(row, 0) if num_rounds > 1 else min(cap, room)))
        context_len = max(context_len, ends[-1])
    requests = tuple((row, running[row]) for row in sorted(limits))
    keeps_logits = any(request.params.logprobs is not None for _, request in requests)
    of_inputs = np.array(inputs, np.int64).T
    return Rows(of_inputs, requests, context_len, keeps_logits, choice.watches, num_rounds, ends)


def empty_rows(num_rows: int, context_len: int) -> Rows:
    """Without any request."""
    return Rows(np.zeros((len(Input), num_rows), np.int64), (), context_len, keeps_logits=False)


def ends_after(flight: Flight, left: Iterable[tuple[int, Request]]) -> list[int]:
    """Of `left`, what is left of the requests of `flight`: the positions that each can reach in it and in the
    round after it together."""
    caps = flight.rows.inputs[Input.CAP].tolist()
    return [
        len(request.token_ids) - 1 + min(2 * caps[row], request.max_tokens - request.num_output)
        for row, request in left
    ]


def make_rows_after(
    flight: Flight,
    left: Sequence[tuple[int, Request]],
    context_len: int,
    joining: Sequence[Request],
    choice: Choice,
) -> tuple[Rows, dict[int, Request], list[int]]:
    """The rows of the round after `flight`, of whose requests these are left; by row the requests that join
    in it; and the rows whose inputs are not those that `flight` leaves on the device. context_len: positions
    that those left may reach."""
    before = flight.rows
    if not joining and len(left) == len(before.requests):  # nearly always
        return Rows(before.inputs, before.requests, context_len, keeps_logits=False), {}, []
    going_on = dict(left)
    joined = dict(zip(_free_rows(going_on), joining, strict=False))
    num_rows = max(before.inputs.shape[1], *(row + 1 for row in joined), 0)
    inputs = np.zeros((len(Input), num_rows), np.int64)
    inputs[:, : before.inputs.shape[1]] = before.inputs
    changed = {row for row, _ in before.requests if row not in going_on}
    inputs[:, sorted(changed)] = 0  # a dead row has room for nothing
    for row, request in joined.items():
        inputs[:, row] = _inputs_of(request, choice, request.round_limit(choice.plan.window))
        context_len = max(context_len, request.round_end(choice.plan.window))
    requests = tuple(sorted({**going_on, **joined}.items()))
    return Rows(inputs, requests, context_len, keeps_logits=False), joined, sorted(changed | joined.keys())


def can_join(
    flight: Flight, left: Iterable[tuple[int, Request]], joining: Iterable[Request], choice: Choice
) -> bool:
    """Whether those `joining` may take rows beside `left`, what is left of the requests of `flight`, before
    the host has read it: not if they need another kind of round, or KV that they lack, or if a row has
    penalties, which count tokens that the host does not know of yet."""
    extra_kv, drafter = flight.runtime.extra_kv, flight.drafter
    if flight.plan != choice.plan or (drafter is not None and waits_for_follow(drafter)):
        return False
    if any(request.params.has_penalties for _, request in left):
        return False
    return not any(
        request.params.has_penalties
        or request.params.logprobs is not None
        or any(source in extra_kv for source in request.gaps)
        for request in joining
    )


def _free_rows(taken: Mapping[int, Request]) -> Iterable[int]:
    row = 0
    while True:
        if row not in taken:
            yield row
        row += 1


def _inputs_of(request: Request, choice: Choice, limit: int) -> tuple[int, ...]:
    """In the order of Input; limit: places that there are blocks for."""
    start, room = len(request.token_ids) - 1, request.max_tokens - request.num_output
    cap = min(limit, request.cap(choice.window(request.number)))
    number = request.number
    return request.token_ids[-1], start, cap, room, choice.num_drafts(number), choice.num_checks(number)
