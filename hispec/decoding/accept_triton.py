"""Coupled acceptance of a chain on a GPU, by one kernel: the twin of `acceptance.coupled`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _accept_chain(
    own: tl.tensor,
    proposed: tl.tensor,
    num_proposed: tl.tensor,
    unsure: tl.tensor,
    accepted: tl.tensor,
    tokens: tl.tensor,
    q_len: int,
    num_drafts: int,
    own_stride: int,
    proposed_stride: int,
    unsure_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row, step = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_draft = step < num_drafts
    right = tl.load(own + row * own_stride + step, mask=is_draft, other=-1) == tl.load(
        proposed + row * proposed_stride + step, mask=is_draft, other=-2
    )
    if unsure is not None:
        right = right | (tl.load(unsure + row * unsure_stride + step, mask=is_draft, other=0) != 0)
    right = right & is_draft & (step < tl.load(num_proposed + row))
    # The first step at which the draft is wrong; BLOCK is more than there are drafts.
    num_accepted = tl.min(tl.where(right, BLOCK, step), axis=0)
    tl.store(accepted + row, num_accepted.to(tl.int64))
    tl.store(tokens + row, tl.load(own + row * own_stride + tl.minimum(num_accepted, q_len - 1)))


def coupled_chain(
    own: Tensor, proposed: Tensor, num_proposed: Tensor, unsure: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As acceptance.coupled of a chain: own [rows, q_len], proposed [rows, drafts], num_proposed [rows] ->
    (num_accepted [rows], token [rows])."""
    rows, q_len = own.shape
    num_drafts = proposed.shape[1]
    accepted, tokens = torch.empty(2, rows, dtype=torch.int64, device=own.device)
    own, proposed, num_proposed = own.contiguous(), proposed.contiguous(), num_proposed.contiguous()
    unsure = unsure.contiguous() if unsure is not None else None
    _accept_chain[(rows,)](
        own,
        proposed,
        num_proposed,
        unsure,
        accepted,
        tokens,
        q_len,
        num_drafts,
        own.stride(0),
        proposed.stride(0),
        unsure.stride(0) if unsure is not None else 0,
        triton.next_power_of_2(num_drafts + 1),
        num_warps=1,
    )
    return accepted, tokens
