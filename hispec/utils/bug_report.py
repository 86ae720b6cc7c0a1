"""What a bug report needs to know of a machine; each part by itself: what is broken hides no other."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

from .environment import environment, package_version
from .files import cache_dir
from .memory import free_memory_bytes

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numba",
    "llvmlite",
    "numpy",
    "pydantic",
    "safetensors",
    "gguf",
)
OPTIONAL = (
    *("triton", "torchao", "pyarrow", "ray", "fastapi", "uvicorn", "prometheus_client", "lm_eval"),
    *("accelerate", "peft", "matplotlib"),
)
_VARIABLES = (  # that change how HiSpec or what it is built on computes; keys are not among them
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    *(
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "OPENBLAS_CORETYPE",
        "NUMBA_NUM_THREADS",
        "NUMBA_DISABLE_JIT",
    ),
    *("CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "HISPEC_DEBUG", "HISPEC_CACHE"),
)
_FEATURES = (
    "avx2",
    "avx512f",
    "avx512bw",
    "avx512vnni",
    "avxvnni",
    "avx512bf16",
    "amx-bf16",
    "amx-int8",
    "neon",
    "dotprod",
)


def bug_report() -> dict[str, Any]:
    """By name, in the order of a report. What cannot be found out is said in its place."""
    parts: dict[str, Callable[[], Any]] = {
        "hispec": lambda: package_version("hispec"),
        "python": lambda: f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform,
        "packages": lambda: {name: package_version(name) or "missing" for name in PACKAGES},
        "extras": lambda: {name: found for name in OPTIONAL if (found := package_version(name)) is not None},
        "cpu": lambda: environment()["cpu"],
        "instructions": _instructions,
        "cores": lambda: "{cores} of {machine_cores}".format_map(environment()),
        "threads": lambda: environment()["threads"],
        "load": lambda: environment()["load"],
        "memory": lambda: f"{free_memory_bytes() / 2**30:.1f} GiB free",
        "gpus": _gpus,
        "variables": lambda: {
            name: _without_home(os.environ[name]) for name in _VARIABLES if name in os.environ
        },
        "cache": lambda: _without_home(str(cache_dir())),
    }
    return {name: _tried(find) for name, find in parts.items()}


def _tried(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:  # a report is wanted most where something is broken
        return f"not found out: {type(error).__name__}: {_without_home(str(error))}"


def _instructions() -> str:
    from llvmlite import binding

    has = binding.get_host_cpu_features()
    return " ".join(name for name in _FEATURES if has.get(name)) or "none that kernels ask for"


def _gpus() -> Any:
    import torch

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        return f"none (torch is built {built})"
    names = []
    for at in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(at)
        size, capability = about.total_memory / 2**30, f"{about.major}.{about.minor}"
        names.append(f"{about.name} ({size:.0f} GiB, compute capability {capability})")
    return f"{'; '.join(names)}; CUDA {torch.version.cuda}"


def _without_home(text: str) -> str:
    """Without the name of the user's folder."""
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text
