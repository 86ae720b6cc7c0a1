"""What the GPU benchmark needs on a machine, found out before anything of it is imported, and how to bring
what is missing. Nothing but Python's own library is imported here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

# Modules, with the names under which pip knows them: without one of these nothing runs.
REQUIRED = {
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "jinja2": "jinja2",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "yaml": "pyyaml",
    "filelock": "filelock",
    "rich": "rich",
    "tqdm": "tqdm",
}
OPTIONAL = {"torchao": ("torchao", "int4"), "gguf": ("gguf", "fetching models")}


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def missing(is_there: Callable[[str], bool] = _is_there, on_gpu: bool = True) -> tuple[list[str], list[str]]:
    """Packages that are missing, as pip names them: those without which nothing runs, and those without which
    something is left out."""
    required = [name for module, name in REQUIRED.items() if (on_gpu or module != "triton")]
    lacking = [name for name in required if not is_there(_module_of(name))]
    return lacking, [name for module, (name, _) in OPTIONAL.items() if not is_there(module)]


def _module_of(package: str) -> str:
    return next(module for module, name in REQUIRED.items() if name == package)


def how_to_bring(packages: list[str]) -> str:
    """What to type where there is a network, and then here."""
    return (
        f"missing: {', '.join(packages)}. With a network: pip install {' '.join(packages)}. Without one: on a"
        " machine that has it run\n"
        f"    python benchmarks/gpu_kit.py pack KIT --packages {','.join(packages)} --python VERSION\n"
        "with the Python of this machine as VERSION, bring the folder KIT here, and run\n"
        "    python benchmarks/gpu_kit.py join KIT FOLDER\n"
        "which says how to use it"
    )


NO_MODEL = (
    "SmolLM2 is not here: random weights of its shape take its place, which measure no acceptance. With a"
    " network: `hispec fetch smollm2`. Without one: on a machine that has it run\n"
    "    python benchmarks/gpu_kit.py pack KIT --model smollm2 --packages ''\n"
    "bring the folder KIT here, and run\n"
    "    python benchmarks/gpu_kit.py join KIT FOLDER\n"
    "which says how to fetch it from there"
)
