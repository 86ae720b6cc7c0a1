"""Attention over pages, one signature, several backends. `sdpa` runs everywhere and says what is meant."""
from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

BACKENDS = ("sdpa", "numba")


class AttentionBackend(Protocol):
    """A pass calls `prepare` once and `attend` at every layer."""

    name: str
    row_invariant: bool

    def prepare(self, view: BatchView, kv: PagedKV) -> Any:
        """What `attend` needs of the view, computed once per pass."""

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: Any) -> Tensor:
        """Causal attention of q [tokens, heads, head_dim] over the KV already written at `layer` -> [tokens, heads * head_dim].
        A token sees positions 0 up to its own of its row, in a tree those of its own path; scores are scaled by head_dim ** -0.5;
        query head h reads KV head h // (heads / kv_heads)."""


def select_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend called `name`; "auto" takes numba's on a CPU in float32, else sdpa. Raises ValueError where it cannot run."""
    numba_runs = device.type == "cpu" and dtype == torch.float32
    if name == "auto":
        name = "numba" if numba_runs else "sdpa"
    if name == "numba":
        if not numba_runs:
            raise ValueError(f"attention backend 'numba' runs on a CPU in float32, not on {device} in {dtype}; use 'sdpa' or 'auto'")
        from .numba_pages import NumbaAttention

        return NumbaAttention()
    if name == "sdpa":
        from .sdpa import SdpaAttention

        return SdpaAttention()
    raise ValueError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
