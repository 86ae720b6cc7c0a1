"""Prompt lookup in operations of fixed shape, without a host sync: runs on any device, and inside a captured
CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ee_models.kernels import runs_triton

from ..utils.uploads import write
from .lookup import LIKELY, MOST_MATCHED, RIVAL, SEPARATOR, Guesses, Lookup, check_shapes
from .ngram_table import look_up


class TensorLookup(Lookup):
    """The same proposals as LookupIndex's, by comparison with all positions: work is rows * (within +
    store_tokens), and so is scratch where torch does it, not Triton."""

    def __init__(
        self,
        device: torch.device,
        num_rows: int,
        max_len: int,
        min_size: int,
        max_size: int,
        store_tokens: int = 0,
        match_confidence: float | None = None,
        guesses: Guesses | None = None,
    ) -> None:
        super().__init__(num_rows, max_len, min_size, max_size, store_tokens, match_confidence, guesses)
        # Captured graphs read these at their addresses, so they are only ever written in place. One token
        # more than the texts have takes what is to be written nowhere.
        self._flat_texts = torch.zeros(num_rows * max_len + 1, dtype=torch.int32, device=device)
        self._texts = self._flat_texts[:-1].view(num_rows, max_len)
        self._lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # The previous half, the current one.
        self._store = torch.full((2, self._half), SEPARATOR, dtype=torch.int32, device=device)
        self._likely = torch.tensor(LIKELY, dtype=torch.float32, device=device)
        self._host_lengths = [0] * num_rows  # as _lengths, to be read without a sync
        self._stored = 0  # tokens in the current half

    @property
    def num_bytes(self) -> int:
        return self._texts.nbytes + self._lengths.nbytes + self._store.nbytes

    def extend(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
        if runs_triton(tokens.device):
            from . import lookup_triton

            lookup_triton.extend(rows, self._lengths, self._texts, tokens, counts)
            return
        steps = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        ends = self._lengths[rows].unsqueeze(1) + steps
        is_new = (steps < counts.unsqueeze(1)) & (ends < self._max_len)
        targets = torch.where(is_new, rows.unsqueeze(1) * self._max_len + ends, -1)
        self._flat_texts[targets] = tokens[:, 1:].to(torch.int32)
        self._lengths.index_add_(0, rows, counts)
        self._lengths.clamp_(max=self._max_len)

    def length(self, row: int) -> int:
        self._check_row(row)
        return self._host_lengths[row]

    def _store_output(self, output: Any) -> None:
        if self._stored + len(output) > self._half:
            self._store[0].copy_(self._store[1])
            self._store[1].fill_(SEPARATOR)
            self._stored = 0
        write(self._store[1, self._stored : self._stored + len(output)], torch.from_numpy(output))
        self._stored += len(output)

    def propose(
        self, rows: Tensor, tokens: Tensor, tail_lens: Tensor, most: Tensor, within: int | None = None
    ) -> Tensor:
        """As Lookup.propose; values out of range are not noticed, since that would take a sync."""
        check_shapes(rows, tokens, tail_lens, most)
        device, window, num_stored = tokens.device, tokens.shape[1] - 1, self._store.numel()
        within = min(within or self._max_len, self._max_len)
        if runs_triton(device):
            from . import lookup_triton

            texts = (rows, self._lengths, self._texts, self._store)
            n_grams = (self._min_size, self._max_size)
            return lookup_triton.propose(
                *(*texts, tokens, tail_lens, most, within, n_grams, self._likely),
                *(self._match_confidence, self._guesses),
            )
        lengths = self._lengths[rows].clamp(max=within)
        totals = lengths + tail_lens
        # All that is searched [n, columns]: the previous half, the current one, the text. Whatever comes
        # later is preferred. Both halves end with a separator, so that nothing spans them.
        text = pad(self._texts[rows, :within], (0, window))
        text.scatter_(
            1, lengths[:, None] + torch.arange(window, device=device), tokens[:, 1:].to(torch.int32)
        )
        searched = torch.cat([self._store.view(1, num_stored).expand(len(rows), num_stored), text], dim=1)
        columns = torch.arange(searched.shape[1], device=device)

        # sizes [n, columns]: the longest suffix that ends there, up to max_size, if a token follows.
        last = num_stored + totals[:, None] - 1
        padded = pad(searched, (self._max_size - 1, 0), value=SEPARATOR)
        same = torch.where(columns < num_stored, searched.roll(-1, 1) != SEPARATOR, columns < last)
        sizes = torch.zeros(searched.shape, dtype=torch.int16, device=device)
        for back in range(self._max_size):
            token = searched.gather(1, (last - back).clamp(min=0))
            start = self._max_size - 1 - back
            same = same & (padded[:, start : start + len(columns)] == token) & (totals[:, None] > back + 1)
            sizes += same
        # The largest size first, then the latest column.
        best = (sizes.to(torch.int64) * len(columns) + columns).amax(1, keepdim=True)
        found, end = best >= self._min_size * len(columns), best % len(columns)

        backs = torch.arange(MOST_MATCHED, device=device)
        ours, theirs = (searched.gather(1, (column - backs).clamp(min=0)) for column in (last, end))
        matched = ((ours == theirs) & (backs < totals[:, None]) & (backs <= end)).cumprod(1).sum(1)

        # proposed [n, window]: what follows; in the text its end repeats with the period of the copy, in the
        # store a separator comes before that.
        steps, period = torch.arange(window, device=device), (last - end).clamp(min=1)
        proposed = searched.gather(1, (end + 1 + steps % period).clamp(max=len(columns) - 1)).long()
        counts = self._chain(text, totals, found[:, 0], matched, proposed, most)

        # ranks [n, window + 1]: which proposal each column of tokens would take.
        ranks = torch.arange(window + 1, device=device) - tail_lens[:, None] - 1
        written = (ranks >= 0) & (ranks < counts[:, None])
        moved = pad(proposed, (0, 1)).gather(1, ranks.clamp(min=0))
        tokens.copy_(torch.where(written, moved.to(tokens.dtype), tokens))
        return counts

    def _chain(
        self, text: Tensor, totals: Tensor, copies: Tensor, matched: Tensor, proposed: Tensor, most: Tensor
    ) -> Tensor:
        """Of each row, whose text [n, columns] has `totals` tokens: how many proposals it gets, [n]. It has
        copies if copies [n] bool holds, proposed [n, window], after `matched` tokens that were the same;
        guesses take the place of those that they are surer than."""
        device, num_steps = text.device, proposed.shape[1]
        table, confidence = self._guesses or (None, 1.0)
        near = 0 if table is None else table.max_size
        ends = totals.clamp(max=near)
        columns = (totals - ends).unsqueeze(1) + torch.arange(near + num_steps, device=device)
        line = text.gather(1, columns.clamp(max=text.shape[1] - 1)).long()  # the last tokens, and room
        counts = torch.zeros_like(totals)
        sure = torch.ones(len(totals), dtype=torch.float32, device=device)
        token, share = torch.zeros_like(totals), torch.zeros_like(sure)
        for step in range(num_steps):
            copy = proposed[:, step]
            copies = copies & (copy != SEPARATOR)
            right = self._likely[(matched + step).clamp(max=MOST_MATCHED)]
            if table is not None:
                token, share = look_up(table, line, ends + step)
                agrees = (share > 0) & (token == copy)
                right = torch.where(agrees, right + share - right * share, right)
                copies = copies & (agrees | (share <= RIVAL * right))
            sure = sure * torch.where(copies, right, share)
            goes_on = sure >= torch.where(copies, self._match_confidence, confidence)
            counts = counts + (goes_on & (counts == step) & (step < most))
            proposed[:, step] = torch.where(copies, copy, token)
            line.scatter_(1, (ends + step).unsqueeze(1), proposed[:, step : step + 1])
        return counts

    def _write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        added = self._check_tokens(row, start, token_ids)
        stop = start + len(added)
        write(self._texts[row, start:stop], torch.from_numpy(added))
        self._lengths[row].fill_(stop)
        self._host_lengths[row] = stop
