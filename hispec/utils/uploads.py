"""Copies from the host to a device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def write(target: Tensor, source: Tensor) -> None:
    """target = source, which lies on the host and may be changed or forgotten at once.

    From pageable memory a copy to a GPU has the host wait until the GPU has done all that was launched before
    it. So the copy is from pinned memory, of its own for each call: torch's allocator gives such memory to
    nobody else before the copies from it have ended, even if it is forgotten.
    """
    target.copy_(_staged(source.to(target.dtype), target.device), non_blocking=True)


def upload(source: Tensor, device: torch.device) -> Tensor:
    """`source` on the device; itself if it lies there. As `write` otherwise."""
    return _staged(source, device).to(device, non_blocking=True)


def _staged(source: Tensor, device: torch.device) -> Tensor:
    return source.pin_memory() if device.type == "cuda" else source
