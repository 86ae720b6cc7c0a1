"""Modules of kernels as a CPU with other vectors would load them."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest

_copies = itertools.count()


def load_with_vectors_of(
    width: int,
    names: Sequence[str],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    constants: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[ModuleType]:
    """Copies of the modules `names`, in which a vector has `width` numbers; LLVM splits what this CPU lacks.
    `cache`: an empty folder for what they compile, which must not meet the code of the real ones; constants:
    by module, set before those after it compile what it has."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(cache))
    loaded = []
    for name in ("ee_models.kernels.numba_vectors", *names):
        original = importlib.util.find_spec(name)
        assert original is not None and original.origin is not None
        # In a name of its own, of which compiled code is called: two kernels of one name, of which numba has
        # taken one from its files, may have the same number, too, and then one is run in place of the other.
        spec = importlib.util.spec_from_file_location(f"{name}_{next(_copies)}", original.origin)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, spec.name, module)
        package, _, own = name.rpartition(".")
        monkeypatch.setattr(sys.modules[package], own, module, raising=False)  # `from . import` looks there
        with monkeypatch.context() as patch:
            if not loaded:
                patch.setattr(numba.config, "CPU_FEATURES", "+fma,+avx512f" if width == 16 else "+fma,+avx2")
            spec.loader.exec_module(module)
        loaded.append(module)
        for constant, value in (constants or {}).get(name, {}).items():
            setattr(module, constant, value)
    assert width == loaded[0].WIDTH
    return loaded[1:]
