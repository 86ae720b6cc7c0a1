"""The likeliest token, and probabilities by unprocessed logits: the confidence of a drafter or a check."""

from __future__ import annotations

import torch
from torch import Tensor

from ee_models.kernels import runs_numba, runs_triton


def likeliest(logits: Tensor) -> Tensor:
    """argmax over the vocabulary of logits [n, vocab] -> [n] int64; of equal ones, of which bfloat16 has
    many, the lowest token in every pass: torch's argmax on a GPU promises none."""
    if runs_triton(logits.device):
        from . import noise_triton

        return noise_triton.argmax_with_noise(logits, None)
    if _are_scanned(logits):
        from . import scan_numba

        return scan_numba.argmax(logits)
    return logits.argmax(-1)


def likeliest_and_sum(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """What `likeliest` says, and the sum of exp(logit - its logit) [n] float32, where both are found as fast
    as the first alone: on a GPU. None elsewhere."""
    if not runs_triton(logits.device):
        return None
    from . import noise_triton

    return noise_triton.argmax_and_sum(logits)


def max_probability(logits: Tensor, rows: Tensor | None = None) -> Tensor:
    """Probability [n] float32 of the likeliest token of logits [n, vocab], or of their rows [n] int64."""
    if _are_scanned(logits):
        from . import scan_numba

        return scan_numba.max_probability(logits, rows)
    if rows is not None:
        logits = logits[rows]
    if runs_triton(logits.device):
        from .confidence_triton import log_sum_exp

        return (logits.amax(-1).float() - log_sum_exp(logits)).exp()
    return logits.float().softmax(-1).amax(-1)


def probability_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Probabilities [n, m] float32 of token_ids [n, m] by logits [n, vocab]."""
    if runs_triton(logits.device):
        from .confidence_triton import log_sum_exp

        return (logits.gather(1, token_ids).float() - log_sum_exp(logits).unsqueeze(1)).exp()
    if _are_scanned(logits):
        from . import scan_numba

        return scan_numba.probability_of(logits, token_ids)
    return logits.float().softmax(-1).gather(1, token_ids)


def _are_scanned(logits: Tensor) -> bool:
    return runs_numba(logits.device) and logits.dtype == torch.float32
