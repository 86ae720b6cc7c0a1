"""Attention over paged KV: one signature, several backends. `sdpa`, the reference, runs everywhere."""

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
        """Whatever `attend` needs of the view, computed once per pass."""

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: Any) -> Tensor:
        """Causal attention of q [tokens, heads, head_dim] over the KV already written at `layer` -> [tokens,
        heads * head_dim]. A token sees positions 0 up to its own of its row, in a tree those of its own path;
        scores are scaled by head_dim ** -0.5; query head h reads KV head h // (heads / kv_heads)."""


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, exact: bool = False, in_bfloat16: bool = False
) -> AttentionBackend:
    """The backend called `name`; "auto" is numba on a CPU in float32, triton on a GPU that has it, else sdpa.

    exact: whether a token's output must keep its bits whatever else is in the pass; only triton does that on
    a GPU, and numba on a CPU. in_bfloat16: of numba, see NumbaAttention. Raises ValueError for a backend that
    is unknown or cannot run so.
    """
    on_cpu = device.type == "cpu"
    runs = {"numba": on_cpu and dtype == torch.float32, "triton": runs_triton(device), "sdpa": True}
    needs = {
        "numba": f"runs on a CPU in float32, not on {device} in {dtype}",
        "triton": "needs the package triton, which is not installed"
        if device.type == "cuda"
        else f"needs a CUDA GPU and the package triton, not {device}",
    }
    if name == "auto":
        name = next(backend for backend in runs if runs[backend])
    exact_one = "numba" if on_cpu else "triton"
    if exact and name in runs and name != exact_one:
        if not runs[exact_one]:
            raise ValueError(
                f"exact_verify needs the attention backend {exact_one!r}, which {needs[exact_one]}; leave"
                " exact_verify out"
            )
        raise ValueError(
            f"exact_verify needs the attention backend {exact_one!r} on {device}, not {name!r}; use attention"
            " 'auto', or leave exact_verify out"
        )
    if name not in runs:
        raise ValueError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    if not runs[name]:
        raise ValueError(f"attention backend {name!r} {needs[name]}; use 'sdpa' or 'auto'")
    # Imported here, so that a machine needs no more than the backend that it uses.
    if name == "triton":
        from .triton_pages import TritonAttention

        return TritonAttention(invariant=exact)
    if name == "numba":
        from .numba_pages import NumbaAttention

        return NumbaAttention(in_bfloat16)
    from .sdpa import SdpaAttention

    return SdpaAttention()
