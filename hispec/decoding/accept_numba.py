"""Coupled acceptance of chains in a packed pass on a CPU: the twin of `acceptance.coupled`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ee_models.kernel_cache import njit

from .row_steps_numba import _NEVER


@njit
def _accept(own: Any, begins: Any, tokens: Any, first: Any, counts: Any, unsure: Any, out: Any) -> None:
    for row in range(first.shape[0]):
        begin, end = begins[row], begins[row + 1]
        if begin == end:  # nothing of it is judged
            out[:, row] = 0
            continue
        kept = 0
        # The token after the last one fed has nothing that could judge it.
        while kept < counts[row] and begin + kept < end:
            is_right = own[begin + kept] == tokens[row, first[row] + kept + 1]
            if not (is_right or (unsure.shape[0] > 0 and unsure[begin + kept])):
                break
            kept += 1
        out[0, row] = kept
        out[1, row] = own[min(begin + kept, end - 1)]


def coupled_chain(
    own: Tensor, cu_q_lens: Tensor, tokens: Tensor, first: Tensor, counts: Tensor, unsure: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `acceptance.coupled` of chains: own [tokens], the tier's choice after each token of a pass, of which
    row r has those from cu_q_lens[r] on; tokens [rows, window + 1], in which the counts [rows] drafts of a
    row stand after column first [rows]; unsure [tokens] bool -> (num_accepted [rows], token [rows])."""
    out = np.empty((2, first.shape[0]), np.int64)
    never = _NEVER if unsure is None else unsure.numpy()
    _accept(own.numpy(), cu_q_lens.numpy(), tokens.numpy(), first.numpy(), counts.numpy(), never, out)
    num_accepted, token = torch.from_numpy(out).unbind()
    return num_accepted, token
