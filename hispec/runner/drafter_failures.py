"""What becomes of requests whose drafter has failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..decoding.drafter import Drafter, DrafterError, guarded
from ..scheduling.request import Request
from ..stats import EngineStats

_log = logging.getLogger(__name__)


def give_up_drafting(requests: Sequence[Request], error: DrafterError, stats: EngineStats) -> None:
    """These requests go on with plain decoding. Those that opted out are marked too, as a draft model's KV of
    theirs has a hole."""
    named = [
        request.request_id
        for request in requests
        if request.params.speculative and not request.drafter_failed
    ]
    for request in requests:
        request.drafter_failed = True
    stats.drafter_failures += 1
    if named:
        _log.warning("the drafter failed (%s); go on with plain decoding: %s", error, ", ".join(named))


def tell_of_end(drafters: Sequence[Drafter], request: Request, stats: EngineStats) -> None:
    """A request has ended by itself. It is done, and lacks nothing if one of them fails."""
    for drafter in drafters:
        try:
            with guarded(drafter):
                drafter.finish(request.number, request.output_token_ids)
        except DrafterError as problem:
            stats.drafter_failures += 1
            _log.warning("the drafter failed at the end of %s (%s)", request.request_id, problem)
