"""Copies of rounds' results to the host, beside what the device does next."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor


class Downloads(Protocol):
    """Of an engine's rounds, of which at most two are in flight."""

    def begin(self, source: Tensor) -> Callable[[], Tensor]:
        """Begins to copy what was computed last -> a function that waits for it, and gives what may be read
        until two further copies have begun."""

    def settle(self) -> None:
        """Called before `source` may be written again: whatever is launched from now on begins after the
        copy, which nobody waits for otherwise."""


def make_downloads(device: torch.device) -> Downloads:
    return CudaDownloads(device) if device.type == "cuda" else LateDownloads()


class LateDownloads:
    """On a CPU, where nothing runs beside anything else: a copy is made only when it must be, so that whoever
    forgets `settle` reads the results of a later round here, too."""

    def __init__(self) -> None:
        self._last: _LateCopy | None = None

    def begin(self, source: Tensor) -> Callable[[], Tensor]:
        self._last = _LateCopy(source)
        return self._last

    def settle(self) -> None:
        if self._last is not None:
            self._last.keep()
            self._last = None


class _LateCopy:
    def __init__(self, source: Tensor) -> None:
        self._values = source

    def __call__(self) -> Tensor:
        return self._values

    def keep(self) -> None:
        self._values = self._values.clone()


class CudaDownloads:
    """On a stream of their own, into two buffers of pinned memory in turn: the device goes on with what lies
    between two rounds while the copy engine is at it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._buffers = cycle([_PinnedBuffer(), _PinnedBuffer()])
        # Of the last copy. Its source is held: the memory of a tensor that was dropped would be given to what
        # is launched next, which waits for nothing.
        self._last: tuple[Tensor, torch.cuda.Event] | None = None

    def begin(self, source: Tensor) -> Callable[[], Tensor]:
        host, done = next(self._buffers).view(source), torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
            done.record()
        self._last = source, done

        def wait() -> Tensor:
            done.synchronize()
            return host

        return wait

    def settle(self) -> None:
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last[1])
            self._last = None


class _PinnedBuffer:
    """Pinned memory that grows as it is asked for."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def view(self, like: Tensor) -> Tensor:
        """As many values as `like` has, in its shape and dtype."""
        if self._memory.dtype != like.dtype or self._memory.numel() < like.numel():
            self._memory = torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)
        return self._memory[: like.numel()].view(like.shape)
