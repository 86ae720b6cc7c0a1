"""Causal attention over whole rows in training, of trunks and exits alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

NAME = "hispec_causal"  # among transformers' attention functions
AHEAD = "positions_ahead"  # what a layer is told by, that so many keys are there of an earlier pass
# On a CPU, in bfloat16, products and a softmax of short rows take a third of the fused kernel's time; beyond
# this length whole score matrices take more memory than they save time.
_SHORT = 512
# cuDNN's would plan anew for each shape of rows, which takes longer than a step: ours have many.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_SPLIT = 128  # longer rows in two parts, of which the first leaves the keys of the second alone


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """q [rows, heads, last positions, head_dim], k and v [rows, kv_heads, length, head_dim] -> [rows, last
    positions, heads, head_dim] of v's dtype. Rows may be padded on the right: what is real attends to nothing
    behind it.

    q        of all positions, or of the last ones
    scale    of the scores; None = 1 / sqrt(head_dim)
    window   positions that each attends to at most, itself included; None = all before it
    """
    length = k.shape[2]
    first = length - q.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) if group > 1 else each for each in (k, v))
    is_banded = window is not None and window < length
    if q.is_cuda or length > _SHORT or is_banded:
        band = None
        if is_banded or first:
            ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
            band = ones.tril()[first:]
            if window is not None:
                band = band & ~ones.tril(-window)[first:]
        # Rotation leaves q and k in float32 where the products are in bfloat16.
        q, k = q.to(v.dtype), k.to(v.dtype)
        with sdpa_kernel(_KERNELS):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=band, is_causal=band is None, scale=scale)
        return out.transpose(1, 2).contiguous()
    if first < _SPLIT < length:
        parts = [
            _attend(q[:, :, low - first : high - first], k, v, scale, low, high)
            for low, high in ((first, _SPLIT), (_SPLIT, length))
        ]
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous()
    return _attend(q, k, v, scale, first, length).transpose(1, 2).contiguous()


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, low: int, high: int) -> Tensor:
    """Of the positions [low, high), whose queries q are, and which attend to those below `high`: [rows,
    heads, high - low, head_dim]."""
    scores = (scale * q) @ k[:, :, :high].transpose(2, 3)
    # Added, not filled in, which takes longer, backwards above all.
    behind = torch.full((high - low, high), -torch.inf, dtype=scores.dtype, device=q.device).triu(low + 1)
    return (scores + behind).softmax(-1, dtype=torch.float32).to(v.dtype) @ v[:, :, :high]


def register() -> None:
    """Makes `causal_attention` known to transformers, as NAME: no mask is made then, so rows must be whole,
    but for what AHEAD says, and padded on the right."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _of_transformers)


def _of_transformers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    positions_ahead: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None or key.shape[2] != query.shape[2] + positions_ahead:
        raise ValueError(f"{NAME} takes whole rows without a mask, as training has them, and no KV cache")
    return causal_attention(query, key, value, scaling, sliding_window), None
