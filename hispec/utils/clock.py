"""How long something took, by a clock that may be set anew meanwhile."""

from __future__ import annotations

import time


def seconds_since(started_s: float) -> float:
    """Seconds since time.perf_counter() said started_s; 0 if it has gone back since, as clocks of virtual
    machines have done when these were moved or resumed."""
    return max(0.0, time.perf_counter() - started_s)
