"""Plants known faults, one at a time, in a copy of the code, and shows which tests notice: `make faults`.

Arguments are words: only faults whose names have all of them are planted.

A fault that no test notices makes the command fail. Each is a replacement of one piece of text, so that it is
plain what was broken; where the text is gone, the list in faults.py is out of date, and that is an error too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in sys.argv[1:])]
    unnoticed = []
    for fault in chosen:
        noticed_by = run(fault)
        print(
            f"{fault.name}\n    {'noticed by ' + ', '.join(noticed_by[:3]) if noticed_by else 'NOT NOTICED'}",
            flush=True,
        )
        if not noticed_by:
            unnoticed.append(fault.name)
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} planted faults noticed")
    return 1 if unnoticed else 0


def run(fault: Fault) -> list[str]:
    """Names of the tests that fail with `fault` planted."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        for name in ("hispec", "ee_models", "cache", "tests", "pyproject.toml"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        file = copy / fault.file
        text = file.read_text(encoding="utf-8")
        if text.count(fault.right) != 1:
            raise SystemExit(
                f"{fault.name}: {fault.file} has {text.count(fault.right)} places that read {fault.right!r};"
                " bring FAULTS up to date"
            )
        file.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "--tb=no",
            "-rfE",
            "-m",
            "not slow",
            "--maxfail=3",
            "-p",
            "no:cacheprovider",
            *fault.tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        output = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900, check=False
        ).stdout
    return [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]


if __name__ == "__main__":
    sys.exit(main())
