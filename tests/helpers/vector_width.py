"""Modules of kernels as a CPU with other vectors would load them."""

from __future__ import annotations

import importlib.util
import itertools
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numba
import pytest
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher

import ee_models.fused_pass  # noqa: F401, see below
from ee_models import attention, kernels

_copies = itertools.count()
# Before any copy stands in a module's place: a real module that was first imported then would hold functions
# of copies.
for _package in (attention, kernels):
    for _module in pkgutil.iter_modules(_package.__path__, f"{_package.__name__}."):
        if "triton" not in _module.name and not _module.name.endswith(".gpu"):
            importlib.import_module(_module.name)


def load_with_vectors_of(
    width: int,
    names: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    constants: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[ModuleType]:
    """Copies of the modules `names`, in which a vector has `width` numbers; LLVM splits what this CPU lacks.
    What they compile is kept nowhere: numba files it by the path of the module, which is the real one's.
    constants: by module, set before those after it compile what it has."""
    loaded: list[ModuleType] = []
    # Only while they are loaded: numba asks by name for the module of a real kernel that it compiles later.
    with monkeypatch.context() as patch:
        for kind in (Dispatcher, CFunc):
            patch.setattr(kind, "enable_caching", lambda kernel: None)
        for name in ("ee_models.kernels.numba_vectors", *names):
            original = importlib.util.find_spec(name)
            assert original is not None and original.origin is not None
            # In a name of its own, of which compiled code is called: two kernels of one name, of which numba
            # has taken one from its files, may have the same number, and then one runs in place of the other.
            spec = importlib.util.spec_from_file_location(f"{name}_{next(_copies)}", original.origin)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, spec.name, module)
            patch.setitem(sys.modules, name, module)
            package, _, own = name.rpartition(".")
            patch.setattr(sys.modules[package], own, module, raising=False)  # `from . import` looks there
            with monkeypatch.context() as features:
                if not loaded:
                    own_features = "+fma,+avx512f" if width == 16 else "+fma,+avx2"
                    features.setattr(numba.config, "CPU_FEATURES", own_features)
                spec.loader.exec_module(module)
            loaded.append(module)
            for constant, value in (constants or {}).get(name, {}).items():
                setattr(module, constant, value)
    assert width == loaded[0].WIDTH
    return loaded[1:]
