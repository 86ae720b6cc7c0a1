"""Prefill: chunks of several prompts as one pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from cache.view import BatchView, packed_slots_of

from ..decoding.drafter import DrafterError, guarded
from ..scheduling.scheduler import Chunk
from ..stats import EngineStats
from ..utils.uploads import upload
from .drafter_failures import fall_back_to_plain
from .plan_runtime import PlanRuntime

_log = logging.getLogger(__name__)


def prefill(
    runtime: PlanRuntime, chunks: Sequence[Chunk], block_tables: Tensor, block_size: int, stats: EngineStats
) -> None:
    """Computes the KV of prompt positions at every layer, of all exits and of the draft model; several
    requests' chunks in one pass. block_tables [rows, max_blocks] of all rows. If the draft model fails, its
    requests go on with plain decoding; if there are other drafters too, its KV is backfilled when it is used
    again. Raises DrafterError if it lacks memory and fewer rows might do."""
    token_ids, view = make_prefill_pass(chunks, block_tables, block_size, runtime.kv.data.device)
    runtime.stages.prefill(token_ids, view)
    for drafter in runtime.drafters:
        try:
            with guarded(drafter):
                drafter.prefill(token_ids, view)
        except DrafterError as error:
            if error.lacks_memory and block_tables.shape[0] > 1:
                raise
            for chunk in chunks:
                chunk.request.gaps.setdefault("model", chunk.start)
            if runtime.routes:
                stats.drafter_failures += 1
                _log.warning("a drafter failed at a prompt (%s)", error)
            else:
                fall_back_to_plain([chunk.request for chunk in chunks], error, stats)


def make_prefill_pass(
    chunks: Sequence[Chunk], block_tables: Tensor, block_size: int, device: torch.device
) -> tuple[Tensor, BatchView]:
    """Token ids [tokens] of the chunks, row after row, and the view of their positions; block_tables [rows,
    max_blocks] of all rows."""
    parts = []
    for chunk in chunks:
        assert chunk.request.row is not None
        parts.append((chunk.request.row, chunk.start, chunk.request.token_ids[chunk.start : chunk.end]))
    return make_pass(sorted(parts), block_tables, block_size, device)


def make_pass(
    parts: Sequence[tuple[int, int, Sequence[int]]],
    block_tables: Tensor,
    block_size: int,
    device: torch.device,
) -> tuple[Tensor, BatchView]:
    """As `make_prefill_pass`, of (row, first position, token ids) in order of rows, at most one of each."""
    num_rows = block_tables.shape[0]
    token_ids = torch.tensor([token for _, _, tokens in parts for token in tokens])
    each = [torch.arange(start, start + len(tokens)) for _, start, tokens in parts]
    positions = upload(torch.cat(each), device)
    q_lens = torch.zeros(num_rows + 1, dtype=torch.int64)
    for row, _, tokens in parts:
        q_lens[row + 1] = len(tokens)
    tables = upload(block_tables, device)
    row_ids = upload(torch.repeat_interleave(torch.arange(num_rows), q_lens[1:]), device)
    view = BatchView(
        positions=positions,
        slots=packed_slots_of(tables, row_ids, positions, block_size),
        block_tables=tables,
        cu_q_lens=upload(q_lens.cumsum(0), device),
        max_q_len=int(q_lens.max()),
        max_context_len=max(start + len(tokens) for _, start, tokens in parts),
    )
    return upload(token_ids, device), view
