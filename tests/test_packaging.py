"""What is installed, pinned and run is said once, and the places that repeat it agree."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ee_models.errors import install_command
from hispec.jobs.load import load_job
from hispec.jobs.rows import Row, read_rows
from hispec.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hispec", "ee_models", "cache")


# In a process of its own: setuptools replaces parts of the standard library on import.
DUMP_SETUP = """
import json, runpy, setuptools
setuptools.setup = lambda **arguments: print(json.dumps(arguments))
runpy.run_path("setup.py")
"""


@pytest.fixture(scope="module")
def setup_arguments() -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    printed = subprocess.run(
        [sys.executable, "-c", DUMP_SETUP], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


def constraints() -> dict[str, Version]:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pins = [line.split("==") for line in lines]
    assert all(len(pin) == 2 for pin in pins), "a constraint is one name==version"
    return {normalized(name): Version(version) for name, version in pins}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_version_stands_in_one_place(setup_arguments: dict[str, Any]) -> None:
    assert setup_arguments["version"] == __version__
    assert str(Version(__version__)) == __version__
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text()).get("project", {})


def test_every_package_is_installed_and_typed(setup_arguments: dict[str, Any]) -> None:
    folders = {path.parent.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert set(setup_arguments["packages"]) == {".".join(folder.parts) for folder in folders}, (
        "a folder with modules lacks its __init__.py"
    )
    for name in PACKAGES:
        assert (ROOT / name / "py.typed").exists()
        assert "py.typed" in setup_arguments["package_data"][name]


def test_entry_points_lead_to_what_is_there(setup_arguments: dict[str, Any]) -> None:
    """Read, not imported: the systems that they are for need not be installed."""
    assert set(setup_arguments["entry_points"]) == {"console_scripts", "lm_eval.models"}
    for line in (line for lines in setup_arguments["entry_points"].values() for line in lines):
        module, _, name = line.partition("=")[2].strip().partition(":")
        place = ROOT.joinpath(*module.split("."))
        source = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
        assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), line


def test_constraints_satisfy_the_ranges(setup_arguments: dict[str, Any]) -> None:
    pins = constraints()
    extras = [text for texts in setup_arguments["extras_require"].values() for text in texts]
    for requirement in map(Requirement, [*setup_arguments["install_requires"], *extras]):
        pin = pins[normalized(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement}: tested with {pin}"
        assert not pin.is_prerelease
        assert pin.local is None, f"{requirement.name}: a local build such as +cpu would shut out all others"


def test_the_wheel_is_tried_with_the_least_that_is_allowed(setup_arguments: dict[str, Any]) -> None:
    """What scripts/try_wheel.py --lowest installs: of every package its lower bound, of each exactly one."""
    script = runpy.run_path(str(ROOT / "scripts" / "try_wheel.py"))
    extras = [text for extra in script["EXTRAS"] for text in setup_arguments["extras_require"][extra]]
    texts = [*setup_arguments["install_requires"], *extras]
    assert script["lowest_pins"]() == [text.replace(">=", "==") for text in texts]


def test_tools_target_the_oldest_python(setup_arguments: dict[str, Any]) -> None:
    supported = SpecifierSet(setup_arguments["python_requires"])
    assert [minor for minor in range(8, 20) if supported.contains(f"3.{minor}.0")] == [11, 12, 13]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["ruff"]["target-version"] == "py311"
    assert tools["mypy"]["python_version"] == "3.11"


def test_readme_ci_and_make_run_the_same_tests() -> None:
    assert re.search(r"^(exec )?make test\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    recipe = (ROOT / "Makefile").read_text().split("\ntest:", 1)[1].split("\n\n", 1)[0]
    assert "scripts/check.sh" in recipe
    assert re.search(r"^\s*make test\b|`make test`", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("script", [".ci/run", "scripts/check.sh"])
def test_scripts_are_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


def test_quickstart_is_valid_and_shows_every_field() -> None:
    job = load_job(ROOT / "configs" / "quickstart.yaml")
    rows = list(read_rows(job, job.input))
    assert len(rows) >= 18
    assert all(isinstance(row, Row) for row in rows)
    assert len({row.input.id for row in rows}) == len(rows)
    lines = (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8").splitlines()
    fields = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    assert {field.partition(":")[0] for field in fields} == field_names(job.model_dump())
    uncommented = [field for field in fields if "#" not in field and not field.endswith(":")]
    assert uncommented == []


def field_names(values: dict[str, Any]) -> set[str]:
    """All keys of nested `values`."""
    return set(values).union(*(field_names(value) for value in values.values() if isinstance(value, dict)))


def test_install_commands_are_those_of_a_checkout(setup_arguments: dict[str, Any]) -> None:
    """HiSpec is on no package index, so `pip install 'hispec[...]'` would find nothing, or something else."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    files += [*(ROOT / "docs").glob("**/*.md"), *(ROOT / "configs").glob("*.yaml"), ROOT / "README.md"]
    extras = set()
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert "hispec[" not in text, path
        extras |= set(re.findall(r"install_command\('(\w+)'\)", text))
    assert extras == {"train", "plots", "quantize"} <= setup_arguments["extras_require"].keys()
    assert install_command("plots") == "pip install '.[plots]' in a checkout of HiSpec"
