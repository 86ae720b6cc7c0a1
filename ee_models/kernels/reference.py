"""The kernels in plain torch: the slow twins that define what the others compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from . import QkNorms


class ReferenceKernels:
    def add_rms_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            hidden.add_(delta)
        return _rms_norm(hidden, weight, eps)

    def rope_and_store(
        self, qkv: Tensor, rope: Tensor, norms: QkNorms, eps: float, kv: PagedKV, layer: int, view: BatchView
    ) -> Tensor:
        num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        if norms is not None:
            q, k = _rms_norm(q, norms[0], eps), _rms_norm(k, norms[1], eps)
        cos, sin = rope[view.positions].unsqueeze(2).unbind(1)
        kv.write(layer, view.slots, _rotate(k, cos, sin), v)
        return _rotate(q, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def widen(self, logits: Tensor, vocabulary: Tensor, vocab_size: int) -> Tensor:
        full = logits.new_full((logits.shape[0], vocab_size), float("-inf"))
        full[:, vocabulary] = logits
        return full


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 whatever the dtype, as the models were trained."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim]; cos and sin [tokens, 1, head_dim / 2]: pairs are (i, i + head_dim / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
