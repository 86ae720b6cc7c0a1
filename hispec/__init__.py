"""HiSpec: hierarchical speculative decoding with one early-exit model. Faster than plain decoding, the same
output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .config import EngineConfig, SpeculativeConfig
    from .engine import Engine
    from .errors import ClosedError, ConfigError, HiSpecError, ProcessError, RequestError
    from .jobs.load import load_preset
    from .llm import LLM
    from .outputs import CompletionOutput, ContinuationScore, Delta, RequestOutput
    from .sampling_params import SamplingParams

# Public names by the module that has them: imported on first use, so that `import hispec` and `hispec --help`
# are instant.
_MODULE_OF = {
    "LLM": "llm",
    "Engine": "engine",
    "SamplingParams": "sampling_params",
    "SpeculativeConfig": "config",
    "EngineConfig": "config",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "ContinuationScore": "outputs",
    "Delta": "outputs",
    "HiSpecError": "errors",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "ProcessError": "errors",
    "RequestError": "errors",
    "load_preset": "jobs.load",
}
__all__ = [
    "LLM",
    "ClosedError",
    "CompletionOutput",
    "ConfigError",
    "ContinuationScore",
    "Delta",
    "Engine",
    "EngineConfig",
    "HiSpecError",
    "ProcessError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "__version__",
    "load_preset",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hispec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _check_neighbours() -> None:
    """`cache` and `ee_models` are generic names: refuses to run with another package's."""
    import importlib.util

    for name in ("cache", "ee_models"):
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or []) if spec else []
        if not any(_is_ours(place) for place in places):
            found = (spec.origin or places) if spec else "nothing"
            raise ImportError(
                f"hispec needs its own package {name!r}, but Python finds {found}; move that out of the path"
                " or rename it"
            )


def _is_ours(place: str) -> bool:
    from pathlib import Path

    try:
        return 'OWNER = "hispec"' in (Path(place) / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return False


def _shorten_spinning() -> None:
    """Lets torch's idle OpenMP threads sleep sooner, unless the user has said how they should wait, or torch
    is loaded already.

    By default they spin for milliseconds after each matrix product, and take power and a core from what runs
    next. This long a spin still spans the gaps between the products of one layer.
    """
    import os
    import sys

    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")


_check_neighbours()
_shorten_spinning()
