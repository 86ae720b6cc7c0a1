"""Attention over pages, one signature, several backends. `sdpa` runs everywhere and says what is meant."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView

from ..kernels import runs_triton

BACKENDS = ("sdpa", "numba", "triton")


class AttentionBackend(Protocol):
    """A pass calls `prepare` once and `attend` at every layer."""

    name: str
    row_invariant: bool

    def prepare(self, view: BatchView, kv: PagedKV) -> Any:
        """What `attend` needs of the view, computed once per pass."""

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: Any) -> Tensor:
        """Causal attention of q [tokens, heads, head_dim] over the KV already written at `layer` -> [tokens,
        heads * head_dim]. A token sees positions 0 up to its own of its row, in a tree those of its own path;
        scores are scaled by head_dim ** -0.5; query head h reads KV head h // (heads / kv_heads)."""


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, exact: bool = False
) -> AttentionBackend:
    """The backend called `name`; "auto" takes numba's on a CPU in float32, Triton's on a GPU, else sdpa.
    Raises ValueError where it cannot run.

    exact   on a GPU, whether a token's output must keep its bits whatever else is in the pass, which takes
            Triton's
    """
    numba_runs, triton_runs = device.type == "cpu" and dtype == torch.float32, runs_triton(device)
    if name == "auto":
        name = "numba" if numba_runs else "triton" if triton_runs else "sdpa"
    if exact and device.type != "cpu" and name != "triton":
        raise ValueError(
            f"exact_verify needs the attention backend 'triton' on {device}, not {name!r}; use attention"
            " 'auto', or leave exact_verify out"
        )
    if name == "triton":
        if not triton_runs:
            raise ValueError(
                f"attention backend 'triton' needs a CUDA GPU and the package triton, not {device}; use"
                " 'sdpa' or 'auto'"
            )
        from .triton_pages import TritonAttention

        return TritonAttention(invariant=exact)
    if name == "numba":
        if not numba_runs:
            raise ValueError(
                f"attention backend 'numba' runs on a CPU in float32, not on {device} in {dtype}; use 'sdpa'"
                " or 'auto'"
            )
        from .numba_pages import NumbaAttention

        return NumbaAttention()
    if name == "sdpa":
        from .sdpa import SdpaAttention

        return SdpaAttention()
    raise ValueError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
