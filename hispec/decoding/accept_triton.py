"""Coupled acceptance of a chain on a GPU, by one kernel: the twin of `acceptance.coupled`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ee_models.kernels.triton_math import unspecialised_jit


@unspecialised_jit
def _accept_chain(
    own: tl.tensor,
    live: tl.tensor,
    tokens: tl.tensor,
    first: tl.tensor,
    num_proposed: tl.tensor,
    unsure: tl.tensor,
    accepted: tl.tensor,
    out: tl.tensor,
    q_len: int,
    num_drafts: int,
    token_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row, step = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    count = tl.minimum(tl.load(num_proposed + row), num_drafts)
    is_draft = step < count
    drafts = tokens + row * token_stride + tl.load(first + row) + 1
    right = tl.load(own + row * q_len + step, mask=is_draft, other=-1) == tl.load(
        drafts + step, mask=is_draft, other=-2
    )
    if unsure is not None:
        right = right | (tl.load(unsure + row * q_len + step, mask=is_draft, other=0) != 0)
    right = right & is_draft
    # The first step at which the draft is wrong; BLOCK is more than there are drafts.
    num_accepted = tl.min(tl.where(right, BLOCK, step), axis=0)
    last = row * q_len + tl.minimum(num_accepted, q_len - 1)
    token = tl.load(own + last)
    tl.store(accepted + row, num_accepted.to(tl.int64))
    tl.store(out + row, tl.where(tl.load(live + last) != 0, token, 0))


def coupled_chain(
    own: Tensor,
    live: Tensor,
    tokens: Tensor,
    first: Tensor,
    num_proposed: Tensor,
    num_drafts: int,
    unsure: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As acceptance.coupled of chains of num_drafts, in a pass of static shape: own, live (bool), unsure
    (bool) [rows * q_len], tokens [rows, window + 1], in which the num_proposed [rows] drafts of a row stand
    after column first [rows] -> (num_accepted [rows], token [rows])."""
    (rows,) = first.shape
    accepted, out = torch.empty((2, rows), dtype=torch.int64, device=own.device)
    assert all(each.is_contiguous() for each in (own, live, tokens, first, num_proposed))
    assert unsure is None or unsure.is_contiguous()
    _accept_chain[(rows,)](
        own,
        live,
        tokens,
        first,
        num_proposed,
        unsure,
        accepted,
        out,
        own.shape[0] // rows,
        num_drafts,
        tokens.stride(0),
        triton.next_power_of_2(num_drafts + 1),
        num_warps=1,
    )
    return accepted, out
