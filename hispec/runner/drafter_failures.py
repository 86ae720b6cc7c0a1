"""What the engine does when a drafter fails: the requests concerned go on with plain decoding."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..decoding.drafter import Drafter, DrafterError, guarded
from ..scheduling.request import Request
from ..stats import EngineStats

_log = logging.getLogger(__name__)


def fall_back_to_plain(requests: Sequence[Request], error: DrafterError, stats: EngineStats) -> None:
    """Marks these requests for plain decoding, but for those that opted out of speculation anyway."""
    drafting = [each for each in requests if each.params.speculative and not each.drafter_failed]
    for request in drafting:
        request.drafter_failed = True
    stats.drafter_failures += 1
    if drafting:
        names = ", ".join(request.request_id for request in drafting)
        _log.warning("the drafter failed (%s); go on with plain decoding: %s", error, names)


def finish_drafting(drafters: Sequence[Drafter], request: Request, stats: EngineStats) -> None:
    """Tells the drafters of a request that has ended. If one fails, the request's output is complete all the
    same."""
    for drafter in drafters:
        try:
            with guarded(drafter):
                drafter.finish(request.number, request.output_token_ids)
        except DrafterError as problem:
            stats.drafter_failures += 1
            _log.warning("the drafter failed at the end of %s (%s)", request.request_id, problem)
