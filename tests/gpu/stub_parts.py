"""A part of the GPU benchmark for tests of the processes that it starts: what it does follows from its
name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from benchmarks.gpu_parts.run import Bench


def run(bench: Bench, out: dict[str, Any]) -> None:
    # Each part of a run is a process: which one this is follows from the file that it writes.
    name = bench.path.stem
    out["gc"] = os.environ.get("TORCH_CUDAGRAPH_GC")
    bench.step(out, "first", 0, lambda: {"value": 1})
    if name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # as if C code never came back
        time.sleep(600)
    if name == "wrong":
        bench.fail("tokens differ")
    bench.figure("host_gap_fraction", {"fine": 0.2, "wrong": 0.5}.get(name, 0.0))
