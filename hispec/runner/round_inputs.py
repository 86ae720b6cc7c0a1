"""What a static round is told of each row, on the device: taken at its beginning, brought up to date between
rounds."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ee_models.kernels import runs_triton


class Input(IntEnum):
    """What a round is told of a row: its last committed token, the position of that token, the most places
    that it may process, the tokens that it may still output, the most drafts of a cycle, and the most cycles
    of a draft and a check."""

    TOKEN = 0
    START = 1
    CAP = 2
    ROOM = 3
    DRAFTS = 4
    CHECKS = 5


def begin(inputs: Tensor, tokens: Tensor, limits: Tensor) -> None:
    """Writes the first column of tokens [rows, window + 1] and limits [rows], from inputs [6, at least
    rows] by Input."""
    if runs_triton(inputs.device):
        from . import round_inputs_triton

        round_inputs_triton.begin(inputs, tokens, limits, Input.TOKEN, Input.CAP, Input.ROOM)
        return
    token, _, cap, room, _, _ = inputs[:, : len(limits)]
    torch.minimum(cap, room, out=limits)
    tokens[:, 0] = token


def advance(inputs: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Takes note that tokens[:, 1 : counts + 1] of a round's window, counts [rows], were committed: the last
    of them is where the next round begins."""
    if runs_triton(inputs.device):
        from . import round_inputs_triton

        round_inputs_triton.advance(inputs, tokens, counts, Input.TOKEN, Input.START, Input.ROOM)
        return
    token, start, _, room, _, _ = inputs[:, : len(counts)]
    token.copy_(tokens.gather(1, counts.unsqueeze(1)).squeeze(1))
    start += counts
    room -= counts
