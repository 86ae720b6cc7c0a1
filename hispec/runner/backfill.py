"""Backfill of missing KV: an exit or a draft model that was not in use lacks KV of the positions that rounds
processed meanwhile; it is computed in one pass before a round uses the exit or the model again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..scheduling.request import ExtraKV, Request
from ..scheduling.scheduler import Chunk
from .plan_runtime import PlanRuntime
from .prefill import make_pass, parts_of


def backfill(
    runtime: PlanRuntime, requests: Sequence[Request], block_tables: Tensor, block_size: int, most_tokens: int
) -> int:
    """Computes the KV that the exits and the draft model of `runtime` lack of these requests -> number of
    positions computed, at most `most_tokens` per pass. block_tables [rows, max_blocks] of all rows."""
    lacking = {request: sources for request in requests if (sources := _lacking(runtime, request))}
    chunks = [
        Chunk(request, min(request.gaps[source] for source in sources), request.num_computed)
        for request, sources in lacking.items()
    ]
    all_sources = {source for sources in lacking.values() for source in sources}
    layers = [source for source in all_sources if isinstance(source, int)]
    num_tokens = 0
    for piece in _split(chunks, most_tokens):
        token_ids, view = make_pass(parts_of(piece), block_tables, block_size, runtime.kv.data.device)
        if layers:
            runtime.stages.backfill(token_ids, view, layers)
        if "model" in all_sources:
            assert runtime.drafter is not None
            runtime.drafter.prefill(token_ids, view)
        num_tokens += token_ids.shape[0]
    for request, sources in lacking.items():
        for source in sources:
            del request.gaps[source]
    return num_tokens


def record_gaps(request: Request, sources: frozenset[ExtraKV]) -> None:
    """Notes that a round from request.num_computed on does not write this KV of the request."""
    for source in sources:
        request.gaps.setdefault(source, request.num_computed)


def _lacking(runtime: PlanRuntime, request: Request) -> list[ExtraKV]:
    return [source for source in request.gaps if source in runtime.extra_kv]


def _split(chunks: Sequence[Chunk], most_tokens: int) -> Iterator[list[Chunk]]:
    """Passes of at most so many tokens; a longer chunk goes on in the next pass."""
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
