"""How long Triton compiled: stated of each step, and left out of what is timed."""

from __future__ import annotations

import time
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
        self._time_launchers()

    def _time_launchers(self) -> None:
        """A kernel's first launch builds a launcher in C, of which the listener is told nothing."""
        from triton.runtime import build

        original = getattr(build, "_build", None)  # not of the public interface
        if original is None:
            return

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started

        build._build = timed

    def compiled(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """What Triton calls; `times` are in microseconds."""
        if not cache_hit:
            self.seconds += times.total / 1e6
            self.kernels += 1


COMPILING = Compiling()
