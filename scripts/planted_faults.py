"""Plants known faults, one at a time, in copies of the code, and shows which tests notice: `make faults`.

Arguments are words: only faults whose names have all of them are planted. As many faults are tried at once as
there are cores, each by a single-threaded pytest in a copy of its own.

A fault that no test notices makes the command fail; those in a CPU's matrix tiles are left out where it has
none. Each is a replacement of one piece of text, so that it is plain what was broken; where the text is gone,
the list in faults/ is out of date, and that is an error too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from faults import FAULTS, Fault
from faults.suites import BFLOAT16

from ee_models.kernels.numba_narrow import multiplies_bfloat16
from ee_models.kernels.numba_pairs import HAS_PAIRS
from ee_models.kernels.numba_tiles import can_multiply

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PYTEST = [
    "-m",
    "pytest",
    "-q",
    "--no-header",
    "--tb=no",
    "-rfE",
    "--maxfail=3",
    "-p",
    "no:cacheprovider",
    "-m",
]


def can_show(fault: Fault) -> bool:
    """Whether this CPU runs what the fault is in."""
    if "vectors of pairs" in fault.name:
        return HAS_PAIRS
    if "matrix tiles" in fault.name or (fault.tests == BFLOAT16 and "tile" in fault.name):
        return can_multiply()
    return fault.tests != BFLOAT16 or multiplies_bfloat16()


def main() -> int:
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in sys.argv[1:])]
    shown = [fault for fault in chosen if can_show(fault)]
    if len(shown) < len(chosen):
        print(f"left out, for want of the CPU's instructions: {len(chosen) - len(shown)} faults")
    chosen = shown
    for fault in chosen:
        fault.plant((ROOT / fault.file).read_text(encoding="utf-8"))  # raises before any test runs
    unnoticed = []
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(CORES) as workers:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(CORES):
            copies.put(copy_code(Path(place, str(number))))
        for fault, noticed_by in zip(
            chosen, workers.map(lambda fault: run(fault, copies), chosen), strict=True
        ):
            said = f"noticed by {', '.join(noticed_by[:3])}" if noticed_by else "NOT NOTICED"
            print(f"{fault.name}\n    {said}", flush=True)
            if not noticed_by:
                unnoticed.append(fault.name)
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} planted faults noticed")
    return 1 if unnoticed else 0


def copy_code(folder: Path) -> Path:
    """What the tests of faults read: without a file of it they fail, whatever is planted."""
    for name in ("hispec", "ee_models", "cache", "tests", "examples", "docs", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(fault: Fault, copies: SimpleQueue[Path]) -> list[str]:
    """Names of the tests that fail with `fault` planted in one of the copies, which is then as before."""
    copy = copies.get()
    file = copy / fault.file
    text, before = file.read_text(encoding="utf-8"), file.stat()
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    file.write_text(fault.plant(text), encoding="utf-8")
    with tempfile.TemporaryDirectory() as own_cache:
        if "njit" in text:
            # Numba's cache knows when a file changes, but not when one that it calls into does.
            environment["NUMBA_CACHE_DIR"] = own_cache
        try:
            ended = subprocess.run(
                [sys.executable, *PYTEST, "not slow", *fault.tests],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                timeout=1800,
                check=False,
            )
        finally:
            file.write_text(text, encoding="utf-8")
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
            shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # examples that an earlier fault failed
            copies.put(copy)
    if ended.returncode < 0:  # by a signal, as for an address that is none
        return [f"the end of Python by signal {-ended.returncode}"]
    return [line.split()[1] for line in ended.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]


if __name__ == "__main__":
    sys.exit(main())
