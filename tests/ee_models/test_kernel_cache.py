"""Compiled kernels are kept between runs, dropped when they are old, and the user hears of their making."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ee_models.kernels.kernel_cache import drop_stale

COUNTS = "from ee_models.kernels.numba_narrow import count_bytes; print(count_bytes(8, 64)[0])"
OF_A_USER = """
import numba
from ee_models.kernels import kernel_cache
names = {}
exec("def add(x): return x + 1", names)  # of no module
print(numba.njit(names["add"])(1), numba.njit(lambda x: x + 1)(1))
"""


def test_compiled_kernels_that_are_older_than_any_source_are_dropped(tmp_path: Path) -> None:
    package = tmp_path / "hispec" / "sampling"
    (package / "__pycache__").mkdir(parents=True)
    source, old, new = package / "a.py", package / "__pycache__" / "a.nbi", package / "__pycache__" / "b.nbi"
    for path, seconds in ((source, 2000), (old, 1000), (new, 3000)):
        path.write_text("")
        os.utime(path, (seconds, seconds))
    drop_stale(tmp_path)
    assert not old.exists() and new.exists() and source.exists()


def run(code: str, cache: Path) -> tuple[str, str]:
    """What a process with this cache prints, and says."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
    )
    return done.stdout, done.stderr


def test_only_a_process_that_compiles_kernels_says_so_and_does_once(tmp_path: Path) -> None:
    printed, said = run(COUNTS, tmp_path)
    assert printed == "2\n" and said.count("compiling kernels") == 1
    printed, said = run(COUNTS, tmp_path)
    assert printed == "2\n" and "compiling" not in said


def test_functions_of_others_are_no_kernels(tmp_path: Path) -> None:
    printed, said = run(OF_A_USER, tmp_path)
    assert printed == "2 2\n" and "compiling" not in said
