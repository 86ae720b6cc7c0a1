"""From logits to tokens: bias, penalties, temperature and filters, the same function for every tier.

The order is transformers': logit_bias, penalties, min_tokens, temperature, top_k, top_p, min_p.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import noise
from .sampling_params import SamplingParams

# Tokens that a nucleus is first looked for in; the whole vocabulary is sorted only where they do not hold it.
_NUCLEUS_FIRST = 512


@dataclass(frozen=True)
class RowSampling:
    """What the sampler needs to know of one request. `stop_ids`: tokens that min_tokens forbids."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Places:
    """Where the logits of a pass belong: rows [tokens]; index [tokens], column of the token that was fed in the round's window;
    positions [tokens], absolute position of the token to be chosen; window_tokens [rows, window + 1], the round's tokens so
    far, whose first is the last committed one. In a tree also first [tokens], the column after which it begins, and
    paths [tokens, depth], the columns on the way to the place."""

    rows: Tensor
    index: Tensor
    positions: Tensor
    window_tokens: Tensor
    first: Tensor | None = None
    paths: Tensor | None = None

    def tentative(self) -> Tensor:
        """[tokens, window + 1] bool: the uncommitted tokens of the window that stand before the token to be chosen."""
        columns = torch.arange(self.window_tokens.shape[1], device=self.rows.device)
        if self.first is None or self.paths is None:
            return (columns >= 1) & (columns <= self.index.unsqueeze(-1))
        before = (columns <= self.first.unsqueeze(-1)).scatter(1, self.paths, True)
        before[:, 0] = False
        return before


class Sampler:
    """Sampling parameters of the rows of one batch, as tensors; rebuilt when the rows change."""

    def __init__(self, rows: Sequence[RowSampling | None], vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        params = [row.params if row else SamplingParams(temperature=0.0) for row in rows]

        def tensor(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._temperature = tensor([p.temperature for p in params], torch.float32)
        self._top_k = tensor([p.top_k for p in params], torch.int64).clamp_(max=vocab_size)
        self._top_p = tensor([p.top_p for p in params], torch.float32)
        self._min_p = tensor([p.min_p for p in params], torch.float32)
        self._seeds = tensor([row.seed if row else 0 for row in rows], torch.int64)
        self._any_sampled = any(p.temperature > 0 for p in params)
        self._max_top_k = min(vocab_size, max((p.top_k for p in params if p.temperature > 0), default=0))
        self._any_top_p = any(p.top_p < 1.0 and p.temperature > 0 for p in params)
        self._any_min_p = any(p.min_p > 0.0 and p.temperature > 0 for p in params)
        self._adjusters = [
            adjuster
            for adjuster in (_Bias.of(rows, vocab_size, device), _Penalties.of(rows, vocab_size, device), _MinTokens.of(rows, vocab_size, device))
            if adjuster is not None
        ]

    def commit(self, row: int, token_ids: Sequence[int]) -> None:
        """Tells the penalties that `token_ids` are now output of `row`."""
        for adjuster in self._adjusters:
            if isinstance(adjuster, _Penalties):
                adjuster.commit(row, token_ids)

    def choose(self, logits: Tensor, at: Places) -> Tensor:
        """The coupled choice [tokens] from logits [tokens, vocab]: argmax, at temperature > 0 with the position's noise."""
        logits = self._adjusted(logits, at)
        if not self._any_sampled:
            return logits.argmax(-1)
        sampled = self._temperature[at.rows] > 0
        return torch.where(sampled, draw(self._filtered(logits, at.rows), self._choice_keys(at)), logits.argmax(-1))

    def choose_top(self, logits: Tensor, at: Places, num: int) -> Tensor:
        """The `num` likeliest tokens [tokens, num] under the position's noise, the coupled choice first."""
        best = self.choose(logits, at).unsqueeze(-1)
        if num == 1:
            return best
        logits = self._adjusted(logits, at)
        if self._any_sampled:
            sampled = (self._temperature[at.rows] > 0).unsqueeze(-1)
            logits = torch.where(sampled, self._filtered(logits, at.rows) + noise.gumbel(self._choice_keys(at), logits.shape[-1]), logits)
        # The choice itself is put first by hand: a tie, or another rounding of the noise, must not leave it out.
        others = logits.scatter(1, best, -torch.inf).topk(num - 1, dim=-1).indices
        return torch.cat((best, others), dim=1)

    def probabilities(self, logits: Tensor, at: Places) -> Tensor:
        """The distribution [tokens, vocab] that the row samples from; one-hot for greedy rows."""
        logits = self._adjusted(logits, at)
        one_hot = torch.nn.functional.one_hot(logits.argmax(-1), self._vocab_size).float()
        if not self._any_sampled:
            return one_hot
        sampled = (self._temperature[at.rows] > 0).unsqueeze(-1)
        return torch.where(sampled, self._filtered(logits, at.rows).softmax(-1), one_hot)

    def keys(self, rows: Tensor, positions: Tensor, stream: noise.Stream) -> Tensor:
        """Keys of the draws at `positions`, broadcast against rows' seeds."""
        return noise.keys(self._seeds[rows], positions, stream)

    def _choice_keys(self, at: Places) -> Tensor:
        """Of the noise by which every tier chooses at these places."""
        return noise.keys(self._seeds[at.rows], at.positions, noise.Stream.CHOICE)

    def _adjusted(self, logits: Tensor, at: Places) -> Tensor:
        if not self._adjusters and not self._any_sampled:
            return logits
        logits = logits.to(torch.float32, copy=bool(self._adjusters))
        for adjuster in self._adjusters:
            adjuster.apply(logits, at)
        return logits

    def _filtered(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Tempered logits [tokens, vocab], -inf where a filter removes the token. Greedy rows are left as they are."""
        temperature = self._temperature[rows].unsqueeze(-1)
        logits = logits / torch.where(temperature > 0, temperature, 1.0)
        if self._max_top_k:
            top_k = self._top_k[rows].unsqueeze(-1)
            kth = logits.topk(self._max_top_k, dim=-1).values.gather(-1, (top_k - 1).clamp(0, self._max_top_k - 1))
            logits = logits.masked_fill((logits < kth) & (top_k > 0), -torch.inf)
        if self._any_top_p:
            logits = logits.masked_fill(logits < _nucleus_floor(logits, self._top_p[rows].unsqueeze(-1)), -torch.inf)
        if self._any_min_p:
            floor = logits.amax(-1, keepdim=True) + self._min_p[rows].unsqueeze(-1).log()
            logits = logits.masked_fill(logits < floor, -torch.inf)
        return logits


def _nucleus_floor(logits: Tensor, top_p: Tensor) -> Tensor:
    """Smallest logit [tokens, 1] in the nucleus: the fewest most likely tokens whose probability reaches top_p."""
    probabilities = logits.softmax(-1)  # row by row the same bits, which logsumexp does not give
    size = min(_NUCLEUS_FIRST, logits.shape[-1])
    while True:
        largest, token = logits.topk(size, dim=-1)
        before = probabilities.gather(-1, token).cumsum(-1).roll(1, -1)
        inside = before < top_p
        inside[:, 0] = True
        if size == logits.shape[-1] or not bool((inside[:, -1:] & (top_p < 1.0)).any()):
            floor = largest.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
            return torch.where(top_p < 1.0, floor, -torch.inf)
        size = logits.shape[-1]


def draw(logits: Tensor, key: Tensor) -> Tensor:
    """One token per row [n] int64, distributed as softmax(logits [n, vocab]), by the Gumbel noise of key [n]."""
    if logits.device.type == "cpu":
        from .noise_cpu import argmax_with_noise  # here, so that a machine without numba can still use a GPU

        return argmax_with_noise(logits, key)
    return (logits + noise.gumbel(key, logits.shape[-1])).argmax(-1)


class _Bias:
    """logit_bias, as one dense row per request that has it."""

    def __init__(self, slot_of_row: Tensor, bias: Tensor) -> None:
        self._slot_of_row, self._bias = slot_of_row, bias

    @classmethod
    def of(cls, rows: Sequence[RowSampling | None], vocab_size: int, device: torch.device) -> _Bias | None:
        wanted = [(i, row.params.logit_bias) for i, row in enumerate(rows) if row and row.params.logit_bias]
        if not wanted:
            return None
        slot_of_row, bias = torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(wanted) + 1, vocab_size)
        for slot, (row, values) in enumerate(wanted, start=1):
            slot_of_row[row] = slot
            bias[slot, list(values)] = torch.tensor(list(values.values()))
        return cls(slot_of_row.to(device), bias.to(device))

    def apply(self, logits: Tensor, at: Places) -> None:
        logits += self._bias[self._slot_of_row[at.rows]]


class _Penalties:
    """Repetition, presence and frequency penalties. Tokens of the round before the place count as output already."""

    def __init__(self, rows: Sequence[RowSampling | None], wanted: list[int], vocab_size: int, device: torch.device) -> None:
        slot_of_row = torch.zeros(len(rows), dtype=torch.int64)
        self._counts = torch.zeros(len(wanted) + 1, vocab_size, dtype=torch.float32)
        self._in_prompt = torch.zeros(len(wanted) + 1, vocab_size, dtype=torch.bool)
        penalties = torch.ones(len(wanted) + 1, 3)
        penalties[:, 1:] = 0.0
        for slot, index in enumerate(wanted, start=1):
            row = rows[index]
            assert row is not None
            slot_of_row[index] = slot
            self._in_prompt[slot, torch.tensor(row.prompt_token_ids)] = True
            self._counts[slot] = torch.bincount(torch.tensor(row.output_token_ids, dtype=torch.int64), minlength=vocab_size)
            params = row.params
            penalties[slot] = torch.tensor([params.repetition_penalty, params.presence_penalty, params.frequency_penalty])
        self._slot_of_row, self._penalties = slot_of_row.to(device), penalties.to(device)
        self._counts, self._in_prompt = self._counts.to(device), self._in_prompt.to(device)

    @classmethod
    def of(cls, rows: Sequence[RowSampling | None], vocab_size: int, device: torch.device) -> _Penalties | None:
        wanted = [i for i, row in enumerate(rows) if row and row.params.has_penalties]
        return cls(rows, wanted, vocab_size, device) if wanted else None

    def commit(self, row: int, token_ids: Sequence[int]) -> None:
        slot = int(self._slot_of_row[row])
        if slot:
            self._counts[slot].index_add_(0, torch.tensor(token_ids, device=self._counts.device), self._counts.new_ones(len(token_ids)))

    def apply(self, logits: Tensor, at: Places) -> None:
        slots = self._slot_of_row[at.rows]
        counts = self._counts[slots]
        tokens = at.window_tokens[at.rows]
        counts.scatter_add_(1, tokens, (at.tentative() & (slots > 0).unsqueeze(-1)).float())
        repetition, presence, frequency = self._penalties[slots].unsqueeze(-1).unbind(1)
        seen = (counts > 0) | self._in_prompt[slots]
        logits.copy_(torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits))
        logits -= frequency * counts + presence * (counts > 0)


class _MinTokens:
    """No stop token before min_tokens."""

    def __init__(self, first_free: Tensor, slot_of_row: Tensor, forbidden: Tensor) -> None:
        self._first_free, self._slot_of_row, self._forbidden = first_free, slot_of_row, forbidden

    @classmethod
    def of(cls, rows: Sequence[RowSampling | None], vocab_size: int, device: torch.device) -> _MinTokens | None:
        wanted = [(i, row) for i, row in enumerate(rows) if row and row.params.min_tokens and row.stop_ids]
        if not wanted:
            return None
        first_free, slot_of_row = torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64)
        forbidden = torch.zeros(len(wanted) + 1, vocab_size, dtype=torch.bool)
        for slot, (index, row) in enumerate(wanted, start=1):
            first_free[index] = len(row.prompt_token_ids) + row.params.min_tokens
            slot_of_row[index] = slot
            forbidden[slot, list(row.stop_ids)] = True
        return cls(first_free.to(device), slot_of_row.to(device), forbidden.to(device))

    def apply(self, logits: Tensor, at: Places) -> None:
        too_early = at.positions < self._first_free[at.rows]
        logits.masked_fill_(self._forbidden[self._slot_of_row[at.rows]] & too_early.unsqueeze(-1), -torch.inf)
