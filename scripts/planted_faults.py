"""Plants known faults, one at a time, in copies of the code, and shows which tests notice: `make faults`.

Arguments are words: only faults whose names have all of them are planted. As many faults are tried at once as
there are cores, each by a single-threaded pytest in a copy of its own.

First the tests of each fault run over the code as it is: what fails there would notice anything. A fault
that no test notices makes the command fail; those in a CPU's matrix tiles are left out where it has none.
Each is a replacement of one piece of text, so that it is plain what was broken; where the text is gone, the
list in faults/ is out of date, and that is an error too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from faults import FAULTS, Fault
from faults.suites import BFLOAT16

from ee_models.kernels.numba_narrow import multiplies_bfloat16
from ee_models.kernels.numba_pairs import HAS_PAIRS
from ee_models.kernels.numba_tiles import can_multiply

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
LIMIT_S = 1800  # for the tests of one fault
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
    if not chosen:
        print(f"no fault's name has all of: {' '.join(sys.argv[1:])}", file=sys.stderr)
        return 2
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
        suites = list(dict.fromkeys(fault.tests for fault in chosen))
        for suite, failed in zip(suites, workers.map(lambda suite: run(suite, copies), suites), strict=True):
            if failed:
                print(f"{', '.join(suite)}: fails without a fault: {', '.join(failed[:3])}", file=sys.stderr)
                return 2
        for fault, noticed_by in zip(
            chosen, workers.map(lambda fault: run(fault.tests, copies, fault), chosen), strict=True
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


def run(tests: Sequence[str], copies: SimpleQueue[Path], fault: Fault | None = None) -> list[str]:
    """Names of the `tests` that fail in one of the copies, with `fault` planted in it meanwhile."""
    copy = copies.get()
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        with planted(fault, copy) as own_cache:
            pytest = subprocess.Popen(
                [sys.executable, *PYTEST, "not slow", *tests],
                cwd=copy,
                env=environment | own_cache,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            try:
                output, _ = pytest.communicate(timeout=LIMIT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(pytest.pid, signal.SIGKILL)  # what tests have started, too
    except subprocess.TimeoutExpired:
        return [f"a test that does not end within {LIMIT_S} s"]
    finally:
        shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # examples that an earlier fault failed
        copies.put(copy)
    if pytest.returncode < 0:  # by a signal, as for an address that is none
        return [f"the end of Python by signal {-pytest.returncode}"]
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if pytest.returncode > 1 and not failed:
        return [f"the end of pytest with {pytest.returncode}"]
    return failed


@contextmanager
def planted(fault: Fault | None, copy: Path) -> Iterator[dict[str, str]]:
    """`fault` in the copy, which is then as before -> the environment that it needs."""
    if fault is None:
        yield {}
        return
    file = copy / fault.file
    text, before = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(fault.plant(text), encoding="utf-8")
    try:
        with tempfile.TemporaryDirectory() as own_cache:
            # Numba's cache knows when a file changes, but not when one that it calls into does.
            yield {"NUMBA_CACHE_DIR": own_cache} if "njit" in text else {}
    finally:
        file.write_text(text, encoding="utf-8")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


if __name__ == "__main__":
    sys.exit(main())
