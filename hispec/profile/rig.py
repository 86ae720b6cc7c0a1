"""Rows in the middle of an answer, on which single stages of a round can be run again and again."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cache.hidden import HiddenBuffer
from cache.paged_kv import PagedKV
from cache.view import BatchView, packed_slots_of
from ee_models.decoder import Decoder
from ee_models.exits import Exit

from ..config import PLAIN, Plan
from ..judges import CoupledJudge
from ..round import check, run_round, verify
from ..sampling import Sampler
from ..stages import PassCounts, RoundBatch, Stages, Tier

_BLOCK_SIZE = 16
_TOKENS_PER_PASS = 512


class Rig:
    """`rows` rows that all have the tokens `context`, the last of which is not processed yet: a round's entry invariant.

    Every method returns what runs one stage once, in the code of `hispec.round`, except for a single draft pass, which
    is a piece of its loop. Stages overwrite what they wrote before; nothing is ever committed.
    """

    def __init__(self, decoder: Decoder, exits: Sequence[Exit], context: Sequence[int], rows: int, window: int) -> None:
        config = decoder.config
        self._start = len(context) - 1
        max_blocks = -(-(self._start + window) // _BLOCK_SIZE)
        num_kv_layers = config.num_layers + sum(exit_.num_kv_layers for exit_ in exits)
        self._tables = torch.arange(rows * max_blocks, device=decoder.device).view(rows, max_blocks)
        self._kv = PagedKV(num_kv_layers, rows * max_blocks, _BLOCK_SIZE, config.num_kv_heads, config.head_dim, decoder.dtype, decoder.device)
        hidden = HiddenBuffer(len(Tier), rows, window, config.hidden_size, decoder.dtype, decoder.device)
        self._stages = Stages(decoder, config.num_layers, self._kv, hidden, PassCounts(), exits)
        self._judge = CoupledJudge()
        self._vocab_size, self._device = config.vocab_size, decoder.device
        self._tokens = torch.tensor([context[-1], *(context[at % len(context)] for at in range(window))], device=decoder.device).expand(rows, -1)
        with torch.inference_mode():
            self._prefill(context)
            # Tiers resume from hidden states of an ordinary size, not from what the memory held.
            hidden.data[:] = decoder.embed(self._tokens[:, :window].reshape(-1)).view(rows, window, -1)

    def close(self) -> None:
        """Gives the KV memory back."""
        self._kv.release()

    def plain(self, rows: int) -> Callable[[], None]:
        batch = self._batch(rows, 1)
        return _quietly(lambda: run_round(self._stages, PLAIN, self._judge, batch))

    def draft(self, rows: int, layer: int) -> Callable[[], None]:
        """As a step of `hispec.round.draft`, at the round's first column."""
        batch = self._batch(rows, 1)

        def run() -> None:
            span = self._stages.select(batch, torch.zeros(rows, 1, dtype=torch.int64, device=self._device), (batch.limits > 0).unsqueeze(-1))
            hidden = self._stages.run(self._stages.embed(batch, span), 0, layer, span)
            self._stages.leave(Tier.DRAFT, span, hidden)
            batch.tokens[span.rows, span.index + 1] = self._judge.choose(self._stages.logits(hidden, layer, span), batch, span)

        return _quietly(run)

    def fill(self, rows: int, layer: int) -> Callable[[], None]:
        """As the last step of `hispec.round.draft`."""
        batch = self._batch(rows, 1)

        def run() -> None:
            span = self._stages.select(batch, torch.zeros(rows, 1, dtype=torch.int64, device=self._device), (batch.limits > 0).unsqueeze(-1))
            hidden = self._stages.run(self._stages.embed(batch, span), 0, layer, span)
            self._stages.leave(Tier.DRAFT, span, hidden)
            self._stages.fill(hidden, layer, span.view)

        return _quietly(run)

    def check(self, rows: int, q_len: int, draft_layer: int, check_layer: int) -> Callable[[], None]:
        """A check of q_len - 1 drafts in each row."""
        batch, plan = self._batch(rows, q_len), Plan(draft_layer, check_layer, max(1, q_len - 1))
        offset = torch.zeros_like(batch.limits)
        return _quietly(lambda: check(self._stages, plan, check_layer, self._judge, batch, offset, batch.limits - 1))

    def verify(self, rows: int, q_len: int, layer: int) -> Callable[[], None]:
        """Verify from `layer` on, over q_len positions of each row."""
        batch, plan = self._batch(rows, q_len), Plan(layer, None, max(1, q_len - 1))
        none = torch.zeros_like(batch.limits)
        return _quietly(lambda: verify(self._stages, plan, self._judge, batch, batch.limits, none, none))

    def _batch(self, rows: int, window: int) -> RoundBatch:
        """The first `rows` rows in a round of `window` positions."""
        return RoundBatch(
            tokens=self._tokens[:rows, : window + 1].clone(),
            starts=torch.full((rows,), self._start, device=self._device),
            limits=torch.full((rows,), window, device=self._device),
            block_tables=self._tables[:rows],
            block_size=_BLOCK_SIZE,
            max_context_len=self._start + window,
            sampler=Sampler([None] * rows, self._vocab_size, self._device),
        )

    def _prefill(self, context: Sequence[int]) -> None:
        """KV of all but the last token: computed for the first row, copied for the others."""
        for start in range(0, self._start, _TOKENS_PER_PASS):
            stop = min(start + _TOKENS_PER_PASS, self._start)
            positions = torch.arange(start, stop, device=self._device)
            slots = packed_slots_of(self._tables[:1], torch.zeros_like(positions), positions, _BLOCK_SIZE)
            view = BatchView(positions, slots, self._tables[:1], torch.tensor([0, stop - start], device=self._device), stop - start, stop)
            self._stages.prefill(torch.tensor(context[start:stop], device=self._device), view)
        of_rows = self._kv.data.unflatten(2, (self._tables.shape[0], -1))
        of_rows[:, :, 1:] = of_rows[:, :, :1]


def _quietly(run: Callable[[], object]) -> Callable[[], None]:
    """`run` without autograd's bookkeeping, as the engine runs it."""

    def quiet() -> None:
        with torch.inference_mode():
            run()

    return quiet
