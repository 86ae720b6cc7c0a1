"""The work between matrix products: norms, rotary embedding with the KV write, the gated activation, logits
of some tokens at full width.

`reference` runs everywhere and defines the results; `cpu` (numba, float32) and `gpu` (Triton) must agree with
it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

# Weights [head_dim] of the norms of each head's queries and keys; None where the model has no such norms.
QkNorms = tuple[Tensor, Tensor] | None


class Kernels(Protocol):
    """What every set of kernels offers. Tokens are packed: [tokens, ...]."""

    def add_rms_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden += delta, in place; then RMSNorm(hidden) * weight, new, [tokens, hidden]."""

    def rope_and_store(
        self, qkv: Tensor, rope: Tensor, norms: QkNorms, eps: float, kv: PagedKV, layer: int, view: BatchView
    ) -> Tensor:
        """Rotates queries and keys of qkv [tokens, (heads + 2 * kv_heads) * head_dim] by position, after an
        RMSNorm of each head by `norms`; writes keys and values to their slots at `layer` of `kv`; returns the
        queries [tokens, heads, head_dim]. rope [positions, 2, head_dim / 2]: cosines and sines."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of gate_up [tokens, 2 * intermediate]."""

    def widen(self, logits: Tensor, vocabulary: Tensor, vocab_size: int) -> Tensor:
        """Logits [tokens, n] of the tokens vocabulary [n] int64 as [tokens, vocab_size]: -inf of others."""


@cache
def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on tensors of `device`. torch for CUDA does not bring Triton on every
    system."""
    return device.type == "cuda" and find_spec("triton") is not None


def runs_numba(device: torch.device) -> bool:
    """Whether numba's kernels run on tensors of `device`: on every CPU, where numba must be there."""
    return device.type == "cpu"


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """numba's on a CPU in float32, Triton's on a GPU, else the reference."""
    from . import reference

    if runs_numba(device) and dtype == torch.float32:
        from . import cpu  # here, so that a machine without numba can still use a GPU

        return cpu.NumbaKernels()
    if runs_triton(device):
        from . import gpu

        return gpu.TritonKernels()
    return reference.ReferenceKernels()
