"""Prefill: chunks of several prompts as one pass.

packed   the pass has the tokens that there are. For CPUs
static   it is padded to one of a few shapes, so that it can be a captured graph, as a round is: Python takes
         as long to launch the kernels of a pass over a short prompt as a GPU takes for thousands of tokens.
         For GPUs
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from cache.view import BatchView, packed_slots_of

from ..decoding.drafter import DrafterError, guarded
from ..scheduling.scheduler import Chunk
from ..stats import EngineStats
from ..utils.uploads import upload, write
from .buckets import context_bucket, prompt_bucket, prompt_rows_bucket
from .cuda_graphs import GraphCache
from .drafter_failures import fall_back_to_plain
from .plan_runtime import PlanRuntime

_log = logging.getLogger(__name__)

Part = tuple[int, int, Sequence[int]]  # row, first position, token ids


class PromptPasses(Protocol):
    """Runs the model over parts of prompts, in order of rows, at most one of each row."""

    def run(
        self, runtime: PlanRuntime, parts: Sequence[Part], block_tables: Tensor
    ) -> tuple[Tensor, BatchView]:
        """Computes the KV of all layers and exits; block_tables [rows, max_blocks] of all rows, on the host
        -> what it ran over: token ids [tokens], and their view."""

    def forget(self) -> None:
        """Called when all graphs were dropped."""


class PackedPrompts:
    """Over the tokens that there are."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def run(
        self, runtime: PlanRuntime, parts: Sequence[Part], block_tables: Tensor
    ) -> tuple[Tensor, BatchView]:
        token_ids, view = make_pass(parts, block_tables, self._block_size, runtime.kv.data.device)
        runtime.stages.prefill(token_ids, view)
        return token_ids, view

    def forget(self) -> None:
        pass


@dataclass(frozen=True)
class _Shape:
    """tokens, those of padding among them; rows, but for one more, which padding is of; longest: tokens of a
    row at most; context_len: positions that any may attend to."""

    tokens: int
    rows: int
    longest: int
    context_len: int


class StaticPrompts:
    """Padded to one of few shapes. Tensors of a shape that is captured stay where they are, for its graph
    reads them there."""

    def __init__(
        self, block_size: int, max_model_len: int, max_num_seqs: int, graphs: GraphCache | None
    ) -> None:
        """graphs: where passes are captured, in memory of their own, since a prompt is computed while the
        results of a round are still to be read; None = they run eagerly, with the same results."""
        self._block_size, self._max_model_len, self._max_num_seqs = block_size, max_model_len, max_num_seqs
        self.graphs = graphs
        self._seen: set[tuple[PlanRuntime, _Shape]] = set()
        self._numbers: dict[_Shape, Tensor] = {}

    def run(
        self, runtime: PlanRuntime, parts: Sequence[Part], block_tables: Tensor
    ) -> tuple[Tensor, BatchView]:
        shape, numbers = self._pad(parts, block_tables)
        device, key = runtime.kv.data.device, (runtime, shape)
        if self.graphs is None or not runtime.captures or not self._comes_again(key):
            token_ids, view = _unpack(upload(numbers, device), shape)
            runtime.stages.prefill(token_ids, view)
            return token_ids, view
        if shape not in self._numbers:
            self._numbers[shape] = torch.empty_like(numbers, device=device)
        write(self._numbers[shape], numbers)
        token_ids, view = _unpack(self._numbers[shape], shape)
        self.graphs.run(key, partial(runtime.stages.prefill, token_ids, view))
        return token_ids, view

    def _comes_again(self, key: tuple[PlanRuntime, _Shape]) -> bool:
        """Many shapes come but once: a graph pays from the second time on."""
        if key in self._seen:
            return True
        self._seen.add(key)
        return False

    def forget(self) -> None:
        self._seen.clear()
        self._numbers.clear()

    def _pad(self, parts: Sequence[Part], block_tables: Tensor) -> tuple[_Shape, Tensor]:
        """The shape, and its numbers one after the other, as `_unpack` reads them.

        Padding is tokens of a row of its own, all at position 0 of the first part's row: it is computed like
        any other, reads what is there, and is written nowhere."""
        q_lens = [len(tokens) for _, _, tokens in parts]
        num, context_len = sum(q_lens), max(start + len(tokens) for _, start, tokens in parts)
        tokens = prompt_bucket(num)
        longest = min(prompt_rows_bucket(max(*q_lens, tokens - num)), tokens)
        rows = min(prompt_rows_bucket(len(parts)), self._max_num_seqs)
        shape = _Shape(tokens, rows, longest, context_bucket(context_len, self._max_model_len))
        columns = min(-(-shape.context_len // self._block_size), block_tables.shape[1])
        tables = torch.zeros(rows + 1, columns, dtype=torch.int64)
        tables[: len(parts)] = block_tables[[row for row, _, _ in parts], :columns]
        tables[-1] = tables[0]
        token_ids, positions = torch.zeros(2, tokens, dtype=torch.int64)
        token_ids[:num] = torch.tensor([token for _, _, part in parts for token in part])
        positions[:num] = torch.cat([torch.arange(start, start + len(part)) for _, start, part in parts])
        lengths = torch.tensor(q_lens)
        row_ids = torch.repeat_interleave(torch.arange(len(parts)), lengths)
        slots = torch.full((tokens,), -1, dtype=torch.int64)
        slots[:num] = packed_slots_of(tables, row_ids, positions[:num], self._block_size)
        cu_q_lens = torch.full((rows + 2,), num, dtype=torch.int64)
        cu_q_lens[0], cu_q_lens[1 : len(parts) + 1], cu_q_lens[-1] = 0, lengths.cumsum(0), tokens
        return shape, torch.cat([token_ids, positions, slots, cu_q_lens, tables.view(-1)])


def _unpack(numbers: Tensor, shape: _Shape) -> tuple[Tensor, BatchView]:
    sizes = [shape.tokens] * 3 + [shape.rows + 2]
    token_ids, positions, slots, cu_q_lens, tables = numbers.split([*sizes, len(numbers) - sum(sizes)])
    view = BatchView(
        positions, slots, tables.view(shape.rows + 1, -1), cu_q_lens, shape.longest, shape.context_len
    )
    return token_ids, view


def prefill(
    runtime: PlanRuntime,
    chunks: Sequence[Chunk],
    block_tables: Tensor,
    passes: PromptPasses,
    stats: EngineStats,
) -> None:
    """Computes the KV of prompt positions at every layer, of all exits and of the draft model; several
    requests' chunks in one pass. block_tables [rows, max_blocks] of all rows. If the draft model fails, its
    requests go on with plain decoding; if there are other drafters too, its KV is backfilled when it is used
    again. Raises DrafterError if it lacks memory and fewer rows might do."""
    token_ids, view = passes.run(runtime, parts_of(chunks), block_tables)
    for drafter in runtime.drafters:
        try:
            with guarded(drafter):
                drafter.prefill(token_ids, view)
        except DrafterError as error:
            if error.lacks_memory and block_tables.shape[0] > 1:
                raise
            if "model" in runtime.all_extra_kv:  # else nobody lacks anything
                for chunk in chunks:
                    chunk.request.gaps.setdefault("model", chunk.start)
            if runtime.routes:
                stats.drafter_failures += 1
                _log.warning("a drafter failed at a prompt (%s)", error)
            else:
                fall_back_to_plain([chunk.request for chunk in chunks], error, stats)


def parts_of(chunks: Sequence[Chunk]) -> list[Part]:
    """In order of rows."""
    parts = []
    for chunk in chunks:
        assert chunk.request.row is not None
        parts.append((chunk.request.row, chunk.start, chunk.request.token_ids[chunk.start : chunk.end]))
    return sorted(parts)


def make_pass(
    parts: Sequence[Part], block_tables: Tensor, block_size: int, device: torch.device
) -> tuple[Tensor, BatchView]:
    """Token ids [tokens] of the parts, row after row, and the view of their positions, whose rows are those
    of the parts; block_tables [rows, max_blocks] of all rows."""
    token_ids = torch.tensor([token for _, _, tokens in parts for token in tokens])
    each = [torch.arange(start, start + len(tokens)) for _, start, tokens in parts]
    positions = upload(torch.cat(each), device)
    q_lens = torch.tensor([len(tokens) for _, _, tokens in parts])
    tables = upload(block_tables[[row for row, _, _ in parts]], device)
    row_ids = upload(torch.repeat_interleave(torch.arange(len(parts)), q_lens), device)
    view = BatchView(
        positions=positions,
        slots=packed_slots_of(tables, row_ids, positions, block_size),
        block_tables=tables,
        cu_q_lens=upload(pad(q_lens.cumsum(0), (1, 0)), device),
        max_q_len=int(q_lens.max()),
        max_context_len=max(start + len(tokens) for _, start, tokens in parts),
    )
    return upload(token_ids, device), view
