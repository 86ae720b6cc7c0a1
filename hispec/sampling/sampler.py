"""From logits to tokens: bias, penalties, temperature and filters, the same function for every tier.

The order is transformers': logit_bias, penalties, min_tokens, temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ee_models.kernels import runs_triton

from ..sampling_params import SamplingParams
from ..utils.uploads import write
from . import noise
from .confidence import likeliest
from .inputs import RowSampling, SamplingInput
from .logits_processors import Bias, LogitsProcessor, MinTokens, Penalties

# Tokens that a nucleus is first looked for in; the whole vocabulary is sorted only where they do not hold it.
_NUCLEUS_FIRST = 512
_GREEDY = SamplingParams(temperature=0.0)  # of a row without a request


class Sampler:
    """Sampling parameters of the rows of a batch, as tensors. They stay where they are when the rows change
    (`load`), since a captured graph reads them there."""

    def __init__(
        self,
        rows: Sequence[RowSampling | None],
        vocab_size: int,
        device: torch.device,
        num_rows: int | None = None,
    ) -> None:
        """num_rows: as many as there can ever be; None = those of `rows`."""
        self._vocab_size, self._device = vocab_size, device
        self._num_rows = num_rows or len(rows)
        self._floats = torch.zeros(3, self._num_rows, dtype=torch.float32, device=device)
        self._ints = torch.zeros(2, self._num_rows, dtype=torch.int64, device=device)
        self._temperature, self._top_p, self._min_p = self._floats
        self._top_k, self._seeds = self._ints
        self._processors: tuple[LogitsProcessor, ...] = tuple(
            kind(self._num_rows, vocab_size, device) for kind in (Bias, Penalties, MinTokens)
        )
        self.load(rows)

    def load(self, rows: Sequence[RowSampling | None]) -> None:
        """Takes the parameters of other rows from now on; rows past the last of `rows` are greedy."""
        missing: list[RowSampling | None] = [None] * (self._num_rows - len(rows))
        rows = [*rows, *missing]
        params = [row.params if row else _GREEDY for row in rows]
        floats = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
        top_k = [min(p.top_k, self._vocab_size) for p in params]
        write(self._floats, torch.tensor(floats, dtype=torch.float32))
        write(self._ints, torch.tensor([top_k, [row.seed if row else 0 for row in rows]]))
        sampled = [p for p in params if p.temperature > 0]
        self._any_sampled = bool(sampled)
        # A power of two, as graphs are captured anew for another number.
        most = max((p.top_k for p in sampled), default=0)
        self._max_top_k = min(self._vocab_size, 1 << (most - 1).bit_length()) if most else 0
        self._any_top_p = any(p.top_p < 1.0 for p in sampled)
        self._any_min_p = any(p.min_p > 0.0 for p in sampled)
        for processor in self._processors:
            processor.load(rows)
        self._active = [processor for processor in self._processors if processor.num_lines]

    @property
    def takes_likeliest(self) -> bool:
        """Whether every row takes the largest of its logits as they are."""
        return not (self._any_sampled or self._active)

    @property
    def mode(self) -> tuple[object, ...]:
        """What the operations below depend on besides values of tensors: a graph captured in one mode must
        not be replayed in another."""
        return (
            self._any_sampled,
            self._max_top_k,
            self._any_top_p,
            self._any_min_p,
            *(processor.mode for processor in self._processors),
        )

    def advance(self, tokens: Tensor, counts: Tensor) -> None:
        """Takes note that tokens[:, 1 : counts + 1] of a round's window, counts [rows], were committed."""
        for processor in self._active:
            processor.advance(tokens, counts)

    def choose(self, logits: Tensor, at: SamplingInput) -> Tensor:
        """The coupled choice [tokens] from logits [tokens, vocab]: argmax, at temperature > 0 with the
        position's noise."""
        logits = self._processed(logits, at)
        if runs_triton(logits.device):
            return self._choose_on_gpu(logits, at)
        if not self._any_sampled:
            return likeliest(logits)
        sampled = self._temperature[at.rows] > 0
        return torch.where(
            sampled, draw(self._filtered(logits, at.rows), self._choice_keys(at)), likeliest(logits)
        )

    def _choose_on_gpu(self, logits: Tensor, at: SamplingInput) -> Tensor:
        """As `choose`, without a copy of the logits in float32, and without sorting any. Of equal logits, of
        which bfloat16 has many, the lowest token wins in every pass; torch's argmax on a GPU promises
        none."""
        from . import floor_triton, noise_triton

        if not self._any_sampled:
            return noise_triton.argmax_with_noise(logits, None)
        floor = None
        if self._max_top_k or self._any_top_p or self._any_min_p:
            floor = floor_triton.nucleus_floor(
                logits,
                at.rows,
                self._temperature,
                self._top_k if self._max_top_k else None,
                self._top_p if self._any_top_p else None,
                self._min_p if self._any_min_p else None,
            )
        draws = noise_triton.Draws(at.rows, at.fed, self._seeds, self._temperature)
        return noise_triton.argmax_with_noise(logits, draws, floor)

    def choose_top(self, logits: Tensor, at: SamplingInput, num: int) -> Tensor:
        """The `num` likeliest tokens [tokens, num] under the position's noise, the coupled choice first."""
        best = self.choose(logits, at).unsqueeze(-1)
        if num == 1:
            return best
        logits = self._processed(logits, at)
        if self._any_sampled:
            sampled = (self._temperature[at.rows] > 0).unsqueeze(-1)
            logits = torch.where(
                sampled,
                self._filtered(logits, at.rows) + noise.gumbel(self._choice_keys(at), logits.shape[-1]),
                logits,
            )
        # The choice itself is put first by hand: a tie, or noise rounded otherwise, must not leave it out.
        others = logits.scatter(1, best, -torch.inf).topk(num - 1, dim=-1).indices
        return torch.cat((best, others), dim=1)

    def probabilities(self, logits: Tensor, at: SamplingInput) -> Tensor:
        """The distribution [tokens, vocab] that the row samples from; one-hot for greedy rows."""
        logits = self._processed(logits, at)
        one_hot = torch.nn.functional.one_hot(likeliest(logits), self._vocab_size).float()
        if not self._any_sampled:
            return one_hot
        sampled = (self._temperature[at.rows] > 0).unsqueeze(-1)
        return torch.where(sampled, self._filtered(logits, at.rows).softmax(-1), one_hot)

    def keys(self, rows: Tensor, positions: Tensor, stream: noise.Stream) -> Tensor:
        """Keys of the draws at `positions`, broadcast against rows' seeds."""
        return noise.keys(self._seeds[rows], positions, stream)

    def _choice_keys(self, at: SamplingInput) -> Tensor:
        """Keys [tokens] of the noise by which every tier chooses at these positions."""
        return noise.keys(self._seeds[at.rows], at.positions, noise.Stream.CHOICE)

    def _processed(self, logits: Tensor, at: SamplingInput) -> Tensor:
        """Logits after all processors: the same tensor if none is active, else a float32 copy."""
        if not self._active:
            return logits
        logits = logits.to(torch.float32, copy=True)
        for processor in self._active:
            processor.apply(logits, at)
        return logits

    def _filtered(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Tempered logits [tokens, vocab], -inf where a filter removes the token. Greedy rows are left as
        they are."""
        temperature = self._temperature[rows].unsqueeze(-1)
        logits = logits / torch.where(temperature > 0, temperature, 1.0)
        if self._max_top_k:
            top_k = self._top_k[rows].unsqueeze(-1)
            kth = logits.topk(self._max_top_k, dim=-1).values.gather(
                -1, (top_k - 1).clamp(0, self._max_top_k - 1)
            )
            logits = logits.masked_fill((logits < kth) & (top_k > 0), -torch.inf)
        if self._any_top_p:
            logits = logits.masked_fill(
                logits < _nucleus_floor(logits, self._top_p[rows].unsqueeze(-1)), -torch.inf
            )
        if self._any_min_p:
            floor = logits.amax(-1, keepdim=True) + self._min_p[rows].unsqueeze(-1).log()
            logits = logits.masked_fill(logits < floor, -torch.inf)
        return logits


def _nucleus_floor(logits: Tensor, top_p: Tensor) -> Tensor:
    """Smallest logit [tokens, 1] in the nucleus: the fewest most likely tokens whose probability reaches
    top_p."""
    probabilities = logits.softmax(-1)  # row by row the same bits, which logsumexp does not give
    # On a GPU a second look would need a sync, so that the first takes in the whole vocabulary.
    size = min(_NUCLEUS_FIRST, logits.shape[-1]) if logits.device.type == "cpu" else logits.shape[-1]
    while True:
        largest, token = logits.topk(size, dim=-1)
        before = probabilities.gather(-1, token).cumsum(-1).roll(1, -1)
        inside = before < top_p
        inside[:, 0].fill_(True)
        if size == logits.shape[-1] or not bool((inside[:, -1:] & (top_p < 1.0)).any()):
            floor = largest.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
            return torch.where(top_p < 1.0, floor, -torch.inf)
        size = logits.shape[-1]


def draw(logits: Tensor, key: Tensor) -> Tensor:
    """One token per row [n] int64, distributed as softmax(logits [n, vocab]), by the Gumbel noise of key
    [n]."""
    if logits.device.type == "cpu":
        from .noise_numba import argmax_with_noise  # here: a machine with a GPU need not have numba

        return argmax_with_noise(logits, key)
    return (logits + noise.gumbel(key, logits.shape[-1])).argmax(-1)
