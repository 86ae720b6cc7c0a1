"""Builds HiSpec's wheel, installs it into a fresh environment, and tries it there, away from the checkout.

    python scripts/try_wheel.py --lowest                          # the oldest releases that setup.py allows
    python scripts/try_wheel.py --python python3.13               # the newest that pip finds
    python scripts/try_wheel.py --require torch==2.13.0           # this one, and the newest of all others

Needs a package index, some gigabytes where the index's torch is one for CUDA, and minutes; no model, no GPU.
With --environment FOLDER what was installed there before is used again, and kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("data", "plots", "server")  # the small ones
READ_SETUP = """
import json, runpy, setuptools
setuptools.setup = lambda **given: print(json.dumps([given["install_requires"], given["extras_require"]]))
runpy.run_path("setup.py")
"""


def lowest_pins() -> list[str]:
    """`name==version` of the least version that setup.py allows of each package, the extras' included."""
    read = subprocess.run(
        [sys.executable, "-c", READ_SETUP], cwd=ROOT, check=True, capture_output=True, text=True
    )
    required, extras = json.loads(read.stdout)
    texts = [*required, *(text for extra in EXTRAS for text in extras[extra])]
    pins = []
    for requirement in map(Requirement, texts):
        (bound,) = requirement.specifier
        assert bound.operator == ">=", f"setup.py: {requirement} has no lower bound"
        pins.append(f"{requirement.name}=={bound.version}")
    return pins


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    parser.add_argument(
        "--environment",
        metavar="FOLDER",
        type=lambda name: Path(name).resolve(),  # commands run in other folders than this one
        help="where; default: one that is removed",
    )
    parser.add_argument(
        "--lowest", action="store_true", help="install the oldest releases that setup.py allows"
    )
    parser.add_argument("--require", nargs="+", default=[], metavar="REQUIREMENT", help="install these, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        folder = options.environment or work / "environment"
        python = environment(folder, options.python)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
        source = work / "source"
        shutil.copytree(ROOT, source, ignore=left_out(folder))
        run(pip, "wheel", "--no-deps", "--wheel-dir", work / "wheel", source)
        (wheel,) = (work / "wheel").glob("hispec-*.whl")
        pins = [*(lowest_pins() if options.lowest else []), *options.require]
        if any(pin.startswith("torch=") for pin in pins):  # first, so that no other one is fetched
            run(pip, "install", next(pin for pin in pins if pin.startswith("torch=")))
        upgrade = [] if options.lowest else ["--upgrade", "--upgrade-strategy", "eager"]
        run(pip, "install", *upgrade, f"{wheel}[{','.join(EXTRAS)}]", *pins)
        run(pip, "install", "--force-reinstall", "--no-deps", wheel)  # in an environment from before
        run([python, "-I", ROOT / "scripts" / "wheel_trial.py", ROOT], cwd=work)
        report = subprocess.run(
            [python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
        )
    versions = {entry["name"]: entry["version"] for entry in json.loads(report.stdout)}
    named = ("torch", "transformers", "tokenizers", "numba", "numpy", "pydantic")
    print("the wheel works with", ", ".join(f"{name} {versions[name]}" for name in named))


def left_out(folder: Path) -> Callable[[str, list[str]], set[str]]:
    """For copytree: what an earlier build left in the checkout, which must not get into the wheel, and
    `folder`."""
    by_name = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")

    def ignored(place: str, names: list[str]) -> set[str]:
        return {*by_name(place, names), *(name for name in names if Path(place, name).resolve() == folder)}

    return ignored


def environment(folder: Path, python: str) -> Path:
    """The interpreter of the virtual environment in `folder`, made if it is not there."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    return inside


def run(command: list[object], *arguments: object, cwd: Path = ROOT) -> None:
    words = [str(word) for word in (*command, *arguments)]
    print("$", " ".join(words), flush=True)
    if status := subprocess.run(words, cwd=cwd).returncode:
        sys.exit(f"this failed with status {status}: {' '.join(words)}")


if __name__ == "__main__":
    main()
