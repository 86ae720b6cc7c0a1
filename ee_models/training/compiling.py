"""Modules in training, compiled: torch.compile fuses what lies between the matrix products."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn

from ..errors import TrainingError

_MAX_VARIANTS = 64  # of a layer's code: with gradients and without, with LoRA and without, in training or not


def compile_methods(modules: Iterable[nn.Module], *names: str) -> None:
    """Has the methods `names` of each module compiled when they are first called, for rows of any length at
    once; modules of one class share the code. Raises TrainingError on a CPU without a C++ compiler."""
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if not torch.cuda.is_available() and not any(map(shutil.which, compilers)):
        raise TrainingError(
            f"loop.compile needs a C++ compiler, and none of {', '.join(compilers)} is here; install one, or"
            " set loop.compile to false"
        )
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _MAX_VARIANTS)
    for module in modules:
        for name in names:
            setattr(module, name, torch.compile(getattr(module, name), dynamic=True))
