"""Logits processors, which run before the temperature: logit_bias, penalties and min_tokens, for the rows
that ask for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..utils.uploads import write
from .inputs import RowSampling, SamplingInput


class LogitsProcessor(ABC):
    """Changes the logits of the rows that want it. Each of these has a line in tables [lines, vocab]; line 0
    serves all other rows, and changes nothing. Tables are made when a row first needs one, and grow by
    doubling."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._line_of_row = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._capacity = 0
        self.num_lines = 0  # of the rows that want something

    @property
    def mode(self) -> int:
        """Its part of Sampler.mode: the capacity of its tables, 0 if no row wants it."""
        return self._capacity if self.num_lines else 0

    def load(self, rows: Sequence[RowSampling | None]) -> None:
        wanted = [(index, row) for index, row in enumerate(rows) if row is not None and self.wants(row)]
        self.num_lines = 0  # until all is there: memory may be too little
        if not wanted:
            return
        if self._capacity <= len(wanted):
            self._capacity, capacity = 0, 1 << len(wanted).bit_length()
            self.make_tables(capacity)
            self._capacity = capacity
        line_of_row = torch.zeros_like(self._line_of_row, device="cpu")
        for line, (index, _) in enumerate(wanted, start=1):
            line_of_row[index] = line
        write(self._line_of_row, line_of_row)
        self.fill([row for _, row in wanted])
        self.num_lines = len(wanted)

    @abstractmethod
    def wants(self, row: RowSampling) -> bool:
        """Whether the row needs a line in the tables."""

    @abstractmethod
    def make_tables(self, num_lines: int) -> None:
        """Allocates tables of so many lines; line 0 must change nothing."""

    @abstractmethod
    def fill(self, rows: Sequence[RowSampling]) -> None:
        """Writes the parameters of `rows` into lines 1, 2, ..."""

    def advance(self, tokens: Tensor, counts: Tensor) -> None:
        """Takes note of committed tokens, as Sampler.advance has them."""
        return

    @abstractmethod
    def apply(self, logits: Tensor, at: SamplingInput) -> None:
        """Changes logits [tokens, vocab] float32 in place."""


class Bias(LogitsProcessor):
    """logit_bias."""

    def wants(self, row: RowSampling) -> bool:
        return bool(row.params.logit_bias)

    def make_tables(self, num_lines: int) -> None:
        self._bias = torch.zeros(num_lines, self._vocab_size, dtype=torch.float32, device=self._device)

    def fill(self, rows: Sequence[RowSampling]) -> None:
        bias = torch.zeros(len(rows), self._vocab_size, dtype=torch.float32)
        for line, row in enumerate(rows):
            values = torch.tensor(list(row.params.logit_bias.values()), dtype=torch.float32)
            bias[line, list(row.params.logit_bias)] = values
        write(self._bias[1 : len(rows) + 1], bias)

    def apply(self, logits: Tensor, at: SamplingInput) -> None:
        logits += self._bias[self._line_of_row[at.rows]]


class Penalties(LogitsProcessor):
    """Repetition, presence and frequency penalties. Uncommitted tokens of the round before the token to be
    chosen count as output already."""

    def wants(self, row: RowSampling) -> bool:
        return row.params.has_penalties

    def make_tables(self, num_lines: int) -> None:
        self._counts = torch.zeros(num_lines, self._vocab_size, dtype=torch.float32, device=self._device)
        self._in_prompt = torch.zeros(num_lines, self._vocab_size, dtype=torch.bool, device=self._device)
        nothing = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float32, device=self._device)
        self._penalties = nothing.repeat(num_lines, 1)

    def fill(self, rows: Sequence[RowSampling]) -> None:
        counts = torch.stack(
            [
                torch.bincount(
                    torch.tensor(row.output_token_ids, dtype=torch.int64), minlength=self._vocab_size
                )
                for row in rows
            ]
        )
        in_prompt = torch.zeros(len(rows), self._vocab_size, dtype=torch.bool)
        for line, row in enumerate(rows):
            in_prompt[line, torch.tensor(row.prompt_token_ids)] = True
        penalties = torch.tensor(
            [
                [row.params.repetition_penalty, row.params.presence_penalty, row.params.frequency_penalty]
                for row in rows
            ],
            dtype=torch.float32,
        )
        for table, values in (
            (self._counts, counts),
            (self._in_prompt, in_prompt),
            (self._penalties, penalties),
        ):
            write(table[1 : len(rows) + 1], values)

    def advance(self, tokens: Tensor, counts: Tensor) -> None:
        lines = self._line_of_row[: len(counts)].unsqueeze(1)
        columns = torch.arange(1, tokens.shape[1], device=tokens.device)
        is_output = (columns <= counts.unsqueeze(1)) & (lines > 0)
        self._counts.view(-1).scatter_add_(
            0, (lines * self._vocab_size + tokens[:, 1:]).view(-1), is_output.float().view(-1)
        )

    def apply(self, logits: Tensor, at: SamplingInput) -> None:
        lines = self._line_of_row[at.rows]
        counts = self._counts[lines]
        tokens = at.window_tokens[at.rows]
        counts.scatter_add_(1, tokens, (at.tentative() & (lines > 0).unsqueeze(-1)).float())
        repetition, presence, frequency = self._penalties[lines].unsqueeze(-1).unbind(1)
        seen = (counts > 0) | self._in_prompt[lines]
        logits.copy_(
            torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        )
        logits -= frequency * counts + presence * (counts > 0)


class MinTokens(LogitsProcessor):
    """No stop token before min_tokens."""

    def wants(self, row: RowSampling) -> bool:
        return bool(row.params.min_tokens and row.stop_ids)

    def make_tables(self, num_lines: int) -> None:
        self._first_free = torch.zeros(num_lines, dtype=torch.int64, device=self._device)
        self._forbidden = torch.zeros(num_lines, self._vocab_size, dtype=torch.bool, device=self._device)

    def fill(self, rows: Sequence[RowSampling]) -> None:
        forbidden = torch.zeros(len(rows), self._vocab_size, dtype=torch.bool)
        for line, row in enumerate(rows):
            forbidden[line, list(row.stop_ids)] = True
        write(self._forbidden[1 : len(rows) + 1], forbidden)
        first_free = [len(row.prompt_token_ids) + row.params.min_tokens for row in rows]
        write(self._first_free[1 : len(rows) + 1], torch.tensor(first_free))

    def apply(self, logits: Tensor, at: SamplingInput) -> None:
        lines = self._line_of_row[at.rows]
        too_early = at.positions < self._first_free[lines]
        logits.masked_fill_(self._forbidden[lines] & too_early.unsqueeze(-1), -torch.inf)
