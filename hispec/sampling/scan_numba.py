"""The likeliest token of logits and its probability on a CPU, float32, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ee_models.kernel_cache import njit
from ee_models.kernels.numba_math import ZERO, exp32
from ee_models.kernels.numba_scan import scan_row

_ALL = np.empty(0, np.int64)


@njit
def _scan(logits: Any, rows: Any, best: Any, sums: Any) -> None:
    """As `scan_row` of each of `rows`; no sums if `sums` is empty. No rows: all."""
    for i in range(best.shape[0]):
        row = logits[rows[i] if rows.shape[0] > 0 else i]
        best[i], total = scan_row(row.ctypes.data, row.shape[0], sums.shape[0] > 0)
        if sums.shape[0] > 0:
            sums[i] = total


@njit
def _divide(logits: Any, token_ids: Any, best: Any, sums: Any, out: Any) -> None:
    for row in range(out.shape[0]):
        peak = logits[row, best[row]]
        for i in range(out.shape[1]):
            logit = logits[row, token_ids[row, i]]
            # Of -inf exp32 would give its least number. Without any likelihood sums are NaN, and so is this.
            out[row, i] = (ZERO if logit == -np.inf else exp32(logit - peak)) / sums[row]


def argmax(logits: Tensor) -> Tensor:
    """argmax over the vocabulary of logits [n, vocab] -> [n] int64; of equal ones the lowest token."""
    best = np.empty(logits.shape[0], np.int64)
    _scan(logits.contiguous().numpy(), _ALL, best, np.empty(0, np.float32))
    return torch.from_numpy(best)


def max_probability(logits: Tensor, rows: Tensor | None) -> Tensor:
    """Probability [n] of the likeliest token of logits [n, vocab], or of their rows [n]; a copy of rows would
    take longer than looking at them."""
    return 1 / _best_and_sums(logits, rows)[1]


def probability_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Probabilities [n, m] of token_ids [n, m] by logits [n, vocab], of which each row has one above -inf."""
    logits = logits.contiguous()
    best, sums = _best_and_sums(logits)
    out = np.empty(token_ids.shape, np.float32)
    _divide(logits.numpy(), token_ids.numpy(), best.numpy(), sums.numpy(), out)
    return torch.from_numpy(out)


def _best_and_sums(logits: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    count = logits.shape[0] if rows is None else rows.shape[0]
    best, sums = np.empty(count, np.int64), np.empty(count, np.float32)
    if count > 0:
        _scan(logits.contiguous().numpy(), _ALL if rows is None else rows.numpy(), best, sums)
    return torch.from_numpy(best), torch.from_numpy(sums)
