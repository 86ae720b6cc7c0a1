"""Which way imports run: hispec -> ee_models -> cache -> torch; downward inside hispec; no circles; numba and
torch only where they may be."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("hispec", "ee_models", "cache")  # each may import those after it
# The rooms of hispec, folders and the files beside them, from the top down: each may import what stands below
# it, and nothing beside or above it. `hispec/__init__.py` alone stands outside: it hands out public names.
LEVELS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"profile", "training", "simulate", "integrations", "page"},
    {"jobs", "serving"},
    {"llm"},
    {"workers"},
    {"measure"},
    {"engine"},
    {"runner", "trace", "loading"},
    {"drafters", "scheduling", "control"},
    {"decoding", "latency"},
    {"sampling"},
    {"sampling_params"},
    {"config", "prompts", "openai"},
    {"outputs", "stats", "detokenizer", "utils"},
    {"metrics"},
    {"errors", "version"},
]


@dataclass(frozen=True)
class Import:
    """`target`: the module of ours, or another's top-level name. `lazy`: inside a function. `typing`: under
    TYPE_CHECKING."""

    target: str
    lazy: bool
    typing: bool


def module_files() -> dict[str, Path]:
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports_of(name: str, source: str, is_package: bool, known: Iterable[str]) -> Iterator[Import]:
    """All imports in a module's source; `known` are our modules, so that `from . import x` means the module x
    if there is one."""
    known = set(known)

    def visit(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name if alias.name in known else alias.name.split(".")[0], lazy, typing)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(
                    inner if inner in known else base if base in known else base.split(".")[0], lazy, typing
                )
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    is_typing = (
                        isinstance(node, ast.If)
                        and field == "body"
                        and ast.unparse(node.test).endswith("TYPE_CHECKING")
                    )
                    yield from visit(
                        child,
                        lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef),
                        typing or is_typing,
                    )

    return visit(ast.parse(source), False, False)


@cache
def graph() -> dict[str, frozenset[Import]]:
    files = module_files()
    return {
        name: frozenset(imports_of(name, path.read_text(encoding="utf-8"), path.name == "__init__.py", files))
        for name, path in files.items()
    }


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Each circle of imports once, as the modules along it."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(edges.get(name, ())):
                walk(target, [*path, name])
            done.add(name)

    for name in edges:
        walk(name, [])
    return found


def reached(edges: Mapping[str, set[str]], start: str) -> set[str]:
    """What `start` imports, and what that imports, and so on."""
    todo, seen = list(edges.get(start, ())), set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += edges.get(name, ())
    return seen


def level(module: str) -> int | None:
    """The floor of the room that a module of hispec is in; None for other packages and `hispec` itself."""
    parts = module.split(".")
    return next(
        (
            i
            for i, names in enumerate(LEVELS)
            if parts[0] == "hispec" and len(parts) > 1 and parts[1] in names
        ),
        None,
    )


def upward(edges: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """(module, what it reaches although that stands beside or above it)."""
    wrong = []
    for module in edges:
        own = level(module)
        for target in reached(edges, module):
            other = level(target)
            if (
                own is not None
                and other is not None
                and other <= own
                and module.split(".")[1] != target.split(".")[1]
            ):
                wrong.append((module, target))
    return wrong


def targets(module: str) -> set[str]:
    return {entry.target for entry in graph()[module]}


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a Python of its own, with these folders before ours on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT]))}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folders[0] if folders else ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_parser_tells_imports_apart() -> None:
    source = (
        "from typing import TYPE_CHECKING\nimport torch.nn as nn\nfrom . import b\nfrom .b import thing\nfrom"
        " .. import other\nfrom ..sub.b import x\nif TYPE_CHECKING:\n    import c\ndef f():\n    if f:\n     "
        "   from .b import lazy\n    class A:\n        import d\n"
    )
    found = set(imports_of("top.sub.a", source, False, ["top", "top.sub", "top.sub.b"]))
    assert found == {
        *(Import(name, False, False) for name in ("typing", "torch", "top.sub.b", "top")),
        Import("c", False, True),
        Import("top.sub.b", True, False),
        Import("d", True, False),
    }
    assert set(imports_of("top.sub", "from .b import x", True, ["top.sub.b"])) == {
        Import("top.sub.b", False, False)
    }


def test_the_checks_find_what_they_look_for() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    assert upward({"hispec.decoding.round": {"hispec.x"}, "hispec.x": {"hispec.llm"}}) == [
        ("hispec.decoding.round", "hispec.llm")
    ]
    assert upward({"hispec.scheduling.a": {"hispec.control.b", "hispec.scheduling.b"}}) == [
        ("hispec.scheduling.a", "hispec.control.b")
    ]
    assert not upward({"hispec.cli": {"hispec.llm"}, "hispec.llm": {"hispec.engine.engine", "hispec.errors"}})
    for module, expected in (
        ("hispec.decoding.round", "hispec.decoding.stages"),
        ("ee_models.decoder", "cache.paged_kv"),
        ("hispec.sampling.sampler", "hispec.sampling.noise"),
    ):
        assert expected in targets(module)


def test_packages_import_downward_only() -> None:
    """Even lazily and for types."""
    wrong = []
    for module in graph():
        above = PACKAGES[: PACKAGES.index(module.split(".")[0])]
        wrong += [(module, target) for target in targets(module) if target.split(".")[0] in above]
    assert not wrong


def test_parts_of_hispec_import_downward_only() -> None:
    """Even lazily and for types, and through whatever lies between."""
    assert not upward({module: targets(module) for module in graph()})


def test_every_room_of_hispec_has_its_floor() -> None:
    rooms = {module.split(".")[1] for module in graph() if module.startswith("hispec.")}
    assert rooms == set().union(*LEVELS) and sum(map(len, LEVELS)) == len(rooms)
    beside = [path.name for path in (ROOT / "hispec").glob("*.py") if not path.name.startswith("__")]
    assert len(beside) <= 8, f"more files beside the folders of hispec/ than a newcomer can take in: {beside}"


def test_modules_do_not_import_in_circles() -> None:
    """As they load: what is imported in a function, or for types alone, cannot lock up."""
    assert not circles(
        {
            module: {entry.target for entry in entries if not entry.lazy and not entry.typing}
            for module, entries in graph().items()
        }
    )


def test_the_block_pool_imports_the_standard_library_alone() -> None:
    assert targets("cache.blocks") <= set(sys.stdlib_module_names)
    assert not targets("cache"), "importing cache.blocks also runs cache/__init__.py"


def test_cache_imports_nothing_but_torch_and_numpy() -> None:
    for module in graph():
        if module.split(".")[0] == "cache":
            assert {target for target in targets(module) if target.split(".")[0] != "cache"} <= {
                *sys.stdlib_module_names,
                "torch",
                "numpy",
            }, module


@pytest.mark.parametrize(
    ("package", "missing", "others"),
    [
        ("scheduling", "torch=None, numpy=None", ["hispec.scheduling.request", "cache.blocks"]),
        ("control", "torch=None", []),
    ],
)
def test_scheduling_and_control_run_without_torch(package: str, missing: str, others: list[str]) -> None:
    modules = [module for module in graph() if module.split(".")[:2] == ["hispec", package]]
    assert modules
    result = run(f"import sys; sys.modules.update({missing}); import {', '.join([*modules, *others])}")
    assert result.returncode == 0, result.stderr


def test_modules_with_numba_are_imported_lazily() -> None:
    numba = {"numba", "llvmlite", "ee_models.kernel_cache"}
    with_numba = {module for module in graph() if targets(module) & numba}
    # The other halves of modules that have it.
    with_numba |= {"ee_models.fused_pass", "hispec.decoding.rounds_linked"}
    assert {
        "ee_models.kernels.cpu",
        "ee_models.attention.numba_pages",
        "hispec.sampling.noise_numba",
    } <= with_numba
    for module in graph().keys() - with_numba:
        eager = {entry.target for entry in graph()[module] if not entry.lazy and not entry.typing}
        assert not eager & with_numba, module


@pytest.mark.parametrize(
    ("missing", "chosen"), [("", "triton TritonKernels"), (", triton=None", "sdpa ReferenceKernels")]
)
def test_everything_that_a_gpu_needs_is_imported_without_numba(missing: str, chosen: str) -> None:
    result = run(
        f"import sys; sys.modules.update(numba=None, llvmlite=None{missing})\nimport torch,"
        " hispec.engine.engine, hispec.llm, hispec.decoding.round, hispec.decoding.acceptance,"
        " ee_models.decoder\nfrom ee_models.attention import select_backend\nfrom ee_models.kernels import"
        " select_kernels\ngpu = torch.device('cuda')\nprint(select_backend('auto', gpu,"
        " torch.bfloat16).name, type(select_kernels(gpu, torch.bfloat16)).__name__)\n"
    )
    assert (result.stdout.strip(), result.returncode) == (chosen, 0), result.stderr


@pytest.mark.parametrize("name", ["cache", "ee_models"])
@pytest.mark.parametrize("file", ["{}/__init__.py", "{}.py"])
def test_another_package_of_a_generic_name_is_refused_by_its_file(
    tmp_path: Path, name: str, file: str
) -> None:
    shadow = tmp_path / file.format(name)
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("")
    result = run("import hispec", tmp_path)
    assert result.returncode == 1
    assert (
        result.stderr.splitlines()[-1]
        == f"ImportError: hispec needs its own package {name!r}, but Python finds {shadow}; move that out of"
        " the path or rename it"
    )


def test_a_folder_of_a_generic_name_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    result = run("import hispec, cache; print(cache.__file__)", tmp_path)
    assert (result.stdout.strip(), result.returncode) == (
        str(ROOT / "cache" / "__init__.py"),
        0,
    ), result.stderr
