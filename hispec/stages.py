"""Runs one stage of a round: picks the live places, runs a span of layers over them, keeps what the next tier resumes from."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV
from cache.view import BatchView, packed_slots_of
from ee_models.config import ModelConfig
from ee_models.exits import Exit

from .sampling import Places, Sampler


class DecoderLike(Protocol):
    """What a round needs of a model; ee_models.decoder.Decoder is one, tests script others."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_positions: int  # positions that its rotary table has

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def run_layers(self, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> Tensor: ...

    def logits(self, hidden: Tensor, exit_layer: int) -> Tensor: ...


class Tier(IntEnum):
    """The tiers that leave hidden states behind; also their index in the hidden buffer."""

    DRAFT = 0
    CHECK = 1


@dataclass
class RoundBatch:
    """The rows of one round, on the device. Column j of the window is position starts + j of the row's sequence.

    tokens           [rows, window + 1] int64: column 0 is x_n, the last committed token; the rest is filled by the tiers
    starts           [rows] int64: n, the position of x_n; KV is valid below it at every layer
    limits           [rows] int64: columns that the row may process: 0 = no row here, 1 = plain decoding, at most window
    block_tables     [rows, max_blocks] int64, covering starts + limits positions
    max_context_len  int, at least starts + limits of every row
    """

    tokens: Tensor
    starts: Tensor
    limits: Tensor
    block_tables: Tensor
    block_size: int
    max_context_len: int
    sampler: Sampler

    def __post_init__(self) -> None:
        self.window = self.tokens.shape[1] - 1
        self.columns = torch.arange(self.window, device=self.tokens.device)


@dataclass(frozen=True)
class Span:
    """Live places of one pass, packed row after row.

    rows, index [tokens]: row, and column in the round's window; flat [tokens] = row * window + index;
    place [tokens]: flat place in the rectangle [rows, q_len] that the span was picked from, whose sizes are `shape`.
    """

    rows: Tensor
    index: Tensor
    flat: Tensor
    place: Tensor
    shape: tuple[int, int]
    view: BatchView

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0]

    def spread(self, values: Tensor) -> Tensor:
        """values [tokens, ...] at their places of a rectangle [rows, q_len, ...]; zeros elsewhere."""
        rows, q_len = self.shape
        if self.num_tokens == rows * q_len:
            return values.view(rows, q_len, *values.shape[1:])
        out = values.new_zeros(rows * q_len, *values.shape[1:])
        out[self.place] = values
        return out.view(rows, q_len, *values.shape[1:])


@dataclass
class PassCounts:
    """Layers of the model run, summed over passes; layers times positions; and passes over an adapter's blocks for logits."""

    layer_passes: int = 0
    layer_positions: int = 0
    adapter_passes: int = 0


class Stages:
    """The eager executor of stages, over one decoder with its exits, one KV and one hidden-state buffer.

    Exits that are not among `exits` are read through the model's own head. KV of each exit follows that of the model's
    layers and of the exits before it.
    """

    def __init__(self, decoder: DecoderLike, num_layers: int, kv: PagedKV, hidden: HiddenBuffer, counts: PassCounts, exits: Iterable[Exit] = ()) -> None:
        self.num_layers = num_layers
        self.counts = counts
        self._decoder, self._kv, self._hidden = decoder, kv, hidden
        self._exits: dict[int, tuple[Exit, int]] = {}
        kv_layer = num_layers
        for exit_ in sorted(exits, key=lambda exit_: exit_.layer):
            self._exits[exit_.layer] = exit_, kv_layer
            kv_layer += exit_.num_kv_layers

    def select(self, batch: RoundBatch, index: Tensor, live: Tensor) -> Span:
        """The places of index [rows, q_len] that are live [rows, q_len]."""
        rows, q_len = live.shape
        place = live.reshape(-1).nonzero().squeeze(-1)
        row = place // q_len
        column = index.expand_as(live).reshape(-1)[place]
        positions = batch.starts[row] + column
        slots = packed_slots_of(batch.block_tables, row, positions, batch.block_size)
        cu_q_lens = torch.zeros(rows + 1, dtype=torch.int64, device=live.device)
        torch.cumsum(live.sum(-1), 0, out=cu_q_lens[1:])
        view = BatchView(positions, slots, batch.block_tables, cu_q_lens, max_q_len=q_len, max_context_len=batch.max_context_len)
        return Span(row, column, row * batch.window + column, place, (rows, q_len), view)

    def embed(self, batch: RoundBatch, span: Span) -> Tensor:
        """Hidden states [tokens, hidden] of the tokens at the span's places."""
        return self._decoder.embed(batch.tokens[span.rows, span.index])

    def run(self, hidden: Tensor, lo: int, hi: int, span: Span) -> Tensor:
        """Runs layers [lo, hi) and writes their KV."""
        self.count(lo, hi, span.num_tokens)
        return self._decoder.run_layers(hidden, lo, hi, self._kv, span.view)

    def count(self, lo: int, hi: int, num_tokens: int) -> None:
        self.counts.layer_passes += hi - lo
        self.counts.layer_positions += (hi - lo) * num_tokens

    def leave(self, tier: Tier, span: Span, hidden: Tensor) -> None:
        """Leaves hidden [tokens, hidden] for the tier that resumes here."""
        self._hidden.write(tier, span.flat, hidden)

    def resume(self, tier: Tier, span: Span) -> Tensor:
        """What `tier` left at the span's places."""
        return self._hidden.read(tier, span.flat)

    def logits(self, hidden: Tensor, exit_layer: int, span: Span) -> Tensor:
        """[tokens, vocab], read at the exit after `exit_layer` layers; an adapter there writes its KV."""
        if exit_layer not in self._exits:
            return self._decoder.logits(hidden, exit_layer)
        exit_, kv_layer = self._exits[exit_layer]
        self.counts.adapter_passes += exit_.num_kv_layers
        return exit_.logits(hidden, self._kv, kv_layer, span.view)

    def fill(self, hidden: Tensor, exit_layer: int, view: BatchView) -> None:
        """What `logits` does besides: an adapter after `exit_layer` layers writes its KV."""
        if exit_layer in self._exits:
            exit_, kv_layer = self._exits[exit_layer]
            exit_.fill(hidden, self._kv, kv_layer, view)

    def prefill(self, token_ids: Tensor, view: BatchView) -> None:
        """Writes the KV of all layers and of all exits for token_ids [tokens]."""
        hidden, lo = self._decoder.embed(token_ids), 0
        for hi in [*self._exits, self.num_layers]:
            self.count(lo, hi, view.num_tokens)
            hidden = self._decoder.run_layers(hidden, lo, hi, self._kv, view)
            self.fill(hidden, hi, view)
            lo = hi

    @staticmethod
    def places(batch: RoundBatch, span: Span) -> Places:
        """Where the logits of the span's places belong."""
        return Places(span.rows, span.index, span.view.positions + 1, batch.tokens)
