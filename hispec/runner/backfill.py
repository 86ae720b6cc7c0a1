"""What exits and draft models lack of requests whose rounds they sat out is made up for before the next round
that they take part in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..scheduling.request import Owner, Request
from ..scheduling.scheduler import Chunk
from .plan_runtime import PlanRuntime
from .prefill import prefill_pass


def catch_up(
    runtime: PlanRuntime, requests: Sequence[Request], block_tables: Tensor, block_size: int, most_tokens: int
) -> int:
    """Computes the KV that the exits and the draft model of `runtime` lack of these requests -> positions
    computed, at most `most_tokens` per pass. block_tables [rows, max_blocks] of all rows."""
    starts = {
        request: min(request.gaps[owner] for owner in owners)
        for request in requests
        if (owners := _lacking(runtime, request))
    }
    if not starts:
        return 0
    lacking = {owner for request in starts for owner in _lacking(runtime, request)}
    layers = [owner for owner in lacking if isinstance(owner, int)]
    num_tokens = 0
    for chunks in _pieces(
        [Chunk(request, start, request.num_computed) for request, start in starts.items()], most_tokens
    ):
        token_ids, view = prefill_pass(chunks, block_tables, block_size, runtime.kv.data.device)
        if layers:
            runtime.stages.backfill(token_ids, view, layers)
        if "model" in lacking:
            assert runtime.drafter is not None
            runtime.drafter.prefill(token_ids, view)
        num_tokens += token_ids.shape[0]
    for request in starts:
        for owner in _lacking(runtime, request):
            del request.gaps[owner]
    return num_tokens


def fall_behind(request: Request, owners: frozenset[Owner]) -> None:
    """A round begins for the request that writes no KV of these owners."""
    for owner in owners:
        request.gaps.setdefault(owner, request.num_computed)


def _lacking(runtime: PlanRuntime, request: Request) -> list[Owner]:
    return [owner for owner in request.gaps if owner in runtime.owners]


def _pieces(chunks: Sequence[Chunk], most_tokens: int) -> Iterator[list[Chunk]]:
    """Passes of at most so many tokens; a longer chunk goes on in the next."""
    piece: list[Chunk] = []
    left = most_tokens
    for chunk in chunks:
        start = chunk.start
        while start < chunk.end:
            end = min(chunk.end, start + left)
            piece.append(Chunk(chunk.request, start, end))
            left -= end - start
            start = end
            if not left:
                yield piece
                piece, left = [], most_tokens
    if piece:
        yield piece
