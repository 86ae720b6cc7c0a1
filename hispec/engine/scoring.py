"""Log-probabilities of given continuations: plain passes of the full model over the KV of an idle engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cache.blocks import BlockPool, BlockTable
from cache.paged_kv import PagedKV

from ..config import EngineConfig
from ..decoding.stages import DecoderLike
from ..outputs import ContinuationScore
from ..runner.prefill import make_pass
from ..sampling.confidence import likeliest

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt and of a continuation
_MOST_LOGITS = (
    64  # positions whose logits are there at once: with large vocabularies they are what takes memory
)


@dataclass(eq=False)
class _Row:
    """inputs    what the model reads: the pair without its last token
    targets   the continuation: the first of them is predicted at the position `first` of `inputs`
    """

    inputs: list[int]
    targets: list[int]
    table: BlockTable
    logprobs: list[float]
    is_greedy: bool = True

    @property
    def first(self) -> int:
        return len(self.inputs) - len(self.targets)

    def make_score(self) -> ContinuationScore:
        if all(map(math.isfinite, self.logprobs)):
            return ContinuationScore(self.logprobs, self.is_greedy)
        error = (
            f"the model's logits are no numbers for a prompt of {self.first + 1} tokens with a continuation"
            f" of {len(self.targets)}: they overflow in this dtype, or its weights are damaged; try"
            " engine.dtype=float32, or fetch the model again"
        )
        return ContinuationScore(self.logprobs, is_greedy=False, error=error)


@dataclass(frozen=True)
class _Chunk:
    """Positions [start, end) of a row, in one pass."""

    row: _Row
    start: int
    end: int


class Scorer:
    """Scores pairs in passes of at most max_prefill_tokens positions of at most max_num_seqs pairs. Pairs
    that begin alike share the KV blocks of what they share, which are computed once.

    decoder, kv   `kv` has the layers of the model first. It is written over from its first block on: nobody
                  else may hold any of it
    """

    def __init__(self, decoder: DecoderLike, kv: PagedKV, config: EngineConfig) -> None:
        self._decoder, self._kv, self._config = decoder, kv, config
        self._pool = BlockPool(kv.num_blocks, kv.block_size)

    def score(self, pairs: Sequence[Pair]) -> list[ContinuationScore]:
        """The score of each pair, whose sizes were checked."""
        rows = [_Row([*prompt, *after][:-1], list(after), BlockTable(), []) for prompt, after in pairs]
        # Neighbours in this order have the longest beginnings in common.
        ordered = sorted((row for row in rows if row.targets), key=lambda row: row.inputs)
        for chunks in self._passes(ordered):
            self._run(chunks)
            for chunk in chunks:
                if chunk.end == len(chunk.row.inputs):
                    self._pool.free(chunk.row.table)
        return [row.make_score() for row in rows]

    def _passes(self, rows: Sequence[_Row]) -> Iterator[list[_Chunk]]:
        """The chunks of each pass, in an order in which a block is computed before it is read, or in the same
        pass, which writes the KV of a layer before it attends."""
        chunks: list[_Chunk] = []
        room = most = self._config.prefill_tokens(self._decoder.device.type)
        for row in rows:
            start = self._allocate(row)
            if start is None:  # all blocks are there once the rows before have been computed
                yield chunks
                chunks, room = [], most
                start = self._allocate(row)
                assert start is not None, "checked before"
            while start < len(row.inputs):
                end = min(len(row.inputs), start + room)
                chunks.append(_Chunk(row, start, end))
                start, room = end, room - (end - start)
                if room == 0 or len(chunks) == self._config.max_num_seqs:
                    yield chunks
                    chunks, room = [], most
        if chunks:
            yield chunks

    def _allocate(self, row: _Row) -> int | None:
        """Gives a row its blocks -> the first position to compute, below `row.first` or at it; None, with
        nothing changed, if blocks do not suffice."""
        table, start = BlockTable(), 0
        if self._config.enable_prefix_caching:
            table, start = self._pool.allocate(row.inputs[: row.first])
        if not self._pool.extend(table, len(row.inputs)):
            self._pool.free(table)
            return None
        if self._config.enable_prefix_caching:
            self._pool.publish(table, row.inputs, len(row.inputs))
        row.table = table
        return start

    def _run(self, chunks: Sequence[_Chunk]) -> None:
        decoder, num_layers = self._decoder, self._decoder.config.num_layers
        tables = torch.zeros(
            len(chunks), max(len(chunk.row.table.blocks) for chunk in chunks), dtype=torch.int64
        )
        for at, chunk in enumerate(chunks):
            blocks = chunk.row.table.blocks
            tables[at, : len(blocks)] = torch.tensor(blocks)
        parts = [
            (at, chunk.start, chunk.row.inputs[chunk.start : chunk.end]) for at, chunk in enumerate(chunks)
        ]
        token_ids, view = make_pass(parts, tables, self._kv.block_size, decoder.device)
        hidden = decoder.run_layers(decoder.embed(token_ids), 0, num_layers, self._kv, view)
        read: list[tuple[int, _Row, int]] = []  # token of the pass, row, token that follows there
        offset = 0
        for chunk in chunks:
            row, start = chunk.row, max(chunk.start, chunk.row.first)
            read += [
                (offset + position - chunk.start, row, row.targets[position - row.first])
                for position in range(start, chunk.end)
            ]
            offset += chunk.end - chunk.start
        for begin in range(0, len(read), _MOST_LOGITS):
            self._read(hidden, read[begin : begin + _MOST_LOGITS])

    def _read(self, hidden: torch.Tensor, read: Sequence[tuple[int, _Row, int]]) -> None:
        places, rows, targets = zip(*read, strict=True)
        device = hidden.device
        logits = self._decoder.logits(
            hidden[torch.tensor(places, device=device)], self._decoder.config.num_layers
        )
        wanted = torch.tensor(targets, device=device)
        # As for the tokens of an output (RoundResult.logprobs), to the bit.
        logprobs = logits.float().log_softmax(-1).gather(1, wanted.unsqueeze(1)).squeeze(1)
        greedy = likeliest(logits) == wanted
        for row, logprob, is_greedy in zip(rows, logprobs.tolist(), greedy.tolist(), strict=True):
            row.logprobs.append(logprob)
            row.is_greedy &= is_greedy
