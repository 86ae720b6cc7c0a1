"""Compiled kernels are kept between runs, made anew with any change of a source, and the user hears of it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ee_models import kernel_cache
from ee_models.kernel_cache import PACKAGES, sources_of
from tests.helpers.sweeps import sweep

ROOT = Path(__file__).parents[2]
COUNTS = "from ee_models.kernels.numba_int8 import group_size; print(group_size(128) // 64)"
OF_A_USER = """
import numba
from ee_models import kernel_cache
names = {}
exec("def add(x): return x + 1", names)  # of no module
print(numba.njit(names["add"])(1), numba.njit(lambda x: x + 1)(1))
"""
CALLER = """
from ee_models.kernel_cache import njit
from hispec.callee import NUMBER
@njit
def caller():
    return NUMBER
"""


def test_sources_are_those_that_are_imported_and_a_digest_is_of_these_and_their_names(tmp_path: Path) -> None:
    """Digests are taken in processes of their own, as each reads a source once."""
    sources = {
        "hispec/sampling/a.py": "from . import b, nothing\nfrom ..config import (\n    A,  # c\n    d,\n)\n",
        "hispec/sampling/b.py": "def late():\n    from ee_models.e import E as F\n",
        "hispec/sampling/__init__.py": "",
        "hispec/config/__init__.py": "import numpy, cache.f as g\nfrom .c import A\n",
        "hispec/config/c.py": "from . import __init__\nfrom .. import other\nimport other\n",
        "hispec/config/d.py": "",
        "ee_models/e.py": "",
        "cache/f.py": "from hispec.sampling.a import A\n",
        "hispec/not_imported.py": "from .sampling import a\n",
        "other/__init__.py": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "hispec" / ".#other.py").symlink_to("nobody@nowhere.1:2")  # Emacs's, of a file with changes
    first = tmp_path / "hispec" / "sampling" / "a.py"
    found = {str(path.relative_to(tmp_path)) for path in sources_of(tmp_path, first)}
    assert found == sources.keys() - {"hispec/not_imported.py", "other/__init__.py"}
    code = (
        "from pathlib import Path; from ee_models.kernel_cache import digest_of;"
        f" root = Path({str(tmp_path)!r}); print(digest_of(root, root / 'hispec' / 'sampling' / 'a.py'))"
    )
    digests = []
    for text in ("A = 1\n", "A = 2\n", "A = 2\n", "A = 1\n"):
        (tmp_path / "ee_models" / "e.py").write_text(text)
        (tmp_path / "hispec" / "not_imported.py").write_text(f"# {len(digests)}\n")
        digests.append(run(code, ROOT)[0])
    assert digests[0] == digests[3] != digests[1] == digests[2]
    (tmp_path / "cache" / "f.py").rename(tmp_path / "cache" / "g.py")
    assert run(code, ROOT)[0] != digests[3]


def test_no_import_of_a_source_is_missed() -> None:
    """Against parsing all of them."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = path.relative_to(ROOT).parent.parts
                above = above[: len(above) + 1 - node.level] if node.level else ()
                base = ".".join((*above, *filter(None, [node.module])))
                names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        files = {ROOT / f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py")}
        ours = {file for file in files if file.is_file() and file.relative_to(ROOT).parts[0] in PACKAGES}
        assert ours <= kernel_cache._imported(ROOT, path), path


def run(code: str, folder: Path, **environment: str) -> tuple[str, str]:
    """What a process in a folder prints, and says."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env=os.environ | environment,
    )
    return done.stdout, done.stderr


@sweep("is_in_tree", [True, False], 2)
def test_a_kernel_is_made_anew_if_what_it_reads_has_changed(tmp_path: Path, is_in_tree: bool) -> None:
    """Though that is another file, and older than the compiled kernel, as files are that are copied."""
    install, cache = tmp_path / "install", tmp_path / "cache"
    for name in PACKAGES:
        (install / name).mkdir(parents=True)
        (install / name / "__init__.py").write_text("")
    source = (ROOT / "ee_models" / "kernel_cache.py").read_text(encoding="utf-8")
    (install / "ee_models" / "kernel_cache.py").write_text(source, encoding="utf-8")
    (install / "hispec" / "caller.py").write_text(CALLER)
    callee, printed = install / "hispec" / "callee.py", []
    elsewhere = {} if is_in_tree else {"NUMBA_CACHE_DIR": str(cache)}
    own = {"PYTHONPATH": str(install), "PYTHONDONTWRITEBYTECODE": "1"} | elsewhere
    for number in (4, 8, 8):
        callee.write_text(f"NUMBER = {number}\n")
        os.utime(callee, (1000, 1000))
        printed.append(run("from hispec.caller import caller; print(caller())", install, **own))
    assert [out for out, _ in printed] == ["4\n", "8\n", "8\n"]
    assert ["compiling kernels" in said for _, said in printed] == [True, True, False]
    assert any((install if is_in_tree else cache).rglob("*.nbi"))


def test_all_kernels_are_declared_by_it() -> None:
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    files.remove(ROOT / "ee_models" / "kernel_cache.py")
    declared = {"njit", "jit", "cfunc"}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "numba":
                assert not declared & {alias.name for alias in node.names}, path
            if isinstance(node, ast.Attribute) and node.attr in declared:
                assert ast.unparse(node.value) == "triton", path


def test_only_a_process_that_compiles_kernels_says_so_and_does_once(tmp_path: Path) -> None:
    printed, said = run(COUNTS, ROOT, NUMBA_CACHE_DIR=str(tmp_path))
    assert printed == "2\n" and said.count("compiling kernels") == 1
    printed, said = run(COUNTS, ROOT, NUMBA_CACHE_DIR=str(tmp_path))
    assert printed == "2\n" and "compiling" not in said


NOWHERE = """
from numba.core import caching
def ensure_cache_path(locator):
    raise PermissionError("read-only")
for kind in (caching.InTreeCacheLocator, caching.UserWideCacheLocator, caching.UserProvidedCacheLocator):
    kind.ensure_cache_path = ensure_cache_path
"""


def test_where_nothing_may_be_written_kernels_are_compiled_all_the_same(tmp_path: Path) -> None:
    """As in a container without a home. The folder of a process goes with it."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", NOWHERE + COUNTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env=environment | {"TMPDIR": str(tmp_path)},
    )
    assert done.stdout == "2\n" and not list(tmp_path.iterdir())
    assert done.stderr.count("set NUMBA_CACHE_DIR to a folder that may be written") == 1


def test_functions_of_others_are_no_kernels(tmp_path: Path) -> None:
    printed, said = run(OF_A_USER, ROOT, NUMBA_CACHE_DIR=str(tmp_path))
    assert printed == "2 2\n" and "compiling" not in said


RELOADED = f"""
import importlib
from ee_models import kernel_cache
importlib.reload(kernel_cache)
{COUNTS}
"""


@pytest.mark.slow
def test_it_may_be_loaded_again(tmp_path: Path) -> None:
    assert run(RELOADED, ROOT, NUMBA_CACHE_DIR=str(tmp_path))[0] == "2\n"


@pytest.mark.slow
def test_other_locators_that_somebody_chose_are_warned_of(tmp_path: Path) -> None:
    chosen = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    printed, said = run(COUNTS, ROOT, **chosen)
    assert printed == "2\n" and "NUMBA_CACHE_LOCATOR_CLASSES is set" in said
