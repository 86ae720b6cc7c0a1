"""CUDA's current device, which is a thread's own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Within it CUDA's current device is this one: Triton launches kernels there, whatever device their
    tensors are on. Nothing for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
