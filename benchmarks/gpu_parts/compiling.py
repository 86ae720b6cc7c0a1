"""How long Triton compiled: stated of each step, and left out of what is timed."""

from __future__ import annotations

from typing import Any


class Compiling:
    """Seconds and number of kernels that were compiled, not found in Triton's cache, in this process."""

    def __init__(self) -> None:
        self.seconds, self.kernels = 0.0, 0

    def listen(self) -> None:
        """From now on compilations are counted; without Triton there are none."""
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.compilation.listener = self.compiled

    def compiled(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """What Triton calls; `times` are in microseconds."""
        if not cache_hit:
            self.seconds += times.total / 1e6
            self.kernels += 1


COMPILING = Compiling()
