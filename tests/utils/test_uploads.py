"""Copies to a device: from pinned memory of their own on a GPU, as they are elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hispec.utils import uploads
from hispec.utils.uploads import upload, write

CPU = torch.device("cpu")


def test_on_a_cpu_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda *_: pytest.fail("pinned without a GPU"))
    source, target = torch.tensor([3, 1, 2]), torch.zeros(5, dtype=torch.int32)
    write(target[1:4], source)
    source[0] = 9
    assert target.tolist() == [0, 3, 1, 2, 0]
    assert upload(source, CPU) is source


def test_for_a_gpu_a_pinned_copy_is_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source may be written again at once: what is copied is its pinned copy, of the target's type."""
    pinned: list[Tensor] = []
    copies: list[tuple[Any, bool]] = []

    def pin(source: Tensor) -> Tensor:
        pinned.append(source.clone())
        return pinned[-1]

    class Target:
        device, dtype = torch.device("cuda"), torch.int32

        def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
            copies.append((source, non_blocking))

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    source = torch.tensor([3, 1, 2])
    write(Target(), source)  # type: ignore[arg-type]
    source[0] = 9
    ((copied, is_async),) = copies
    assert copied is pinned[0] and is_async
    assert copied.dtype == torch.int32 and copied.tolist() == [3, 1, 2]
    assert uploads._staged(source, torch.device("cuda")) is pinned[1]
