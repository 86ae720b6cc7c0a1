"""HiSpec's three packages, by name: the generic `cache` must not pick up anything else that lies here."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"
PACKAGES = ["hispec", "ee_models", "cache"]
TRAIN = ["accelerate>=1.10", "peft>=0.17"]  # hispec train
PLOTS = ["matplotlib>=3.9"]  # pictures of hispec profile, report and simulate
QUANTIZE = ["torchao>=0.18"]  # engine.quantization: int4 on a GPU
DATA = ["pyarrow>=18"]  # jobs with Parquet, CSV and .zst files
SERVER = ["fastapi>=0.115", "uvicorn>=0.30", "prometheus_client>=0.21"]  # hispec serve
RAY = ["ray[data]>=2.44"]  # hispec.integrations.ray_data
EVAL = ["lm-eval>=0.4.13"]  # hispec.integrations.lm_eval

setup(
    name="hispec",
    version=runpy.run_path(str(ROOT / "hispec" / "version.py"))["__version__"],
    description=(
        "Early-exit hierarchical speculative decoding: faster LLM output that stays token for token the same"
    ),
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(str(ROOT), include=[*PACKAGES, *(f"{name}.*" for name in PACKAGES)]),
    package_data={
        "hispec": ["py.typed", "page/*.html", "serving/page.html"],
        "ee_models": ["py.typed", "pretrained/*/*"],
        "cache": ["py.typed"],
    },
    python_requires=">=3.11,<3.14",
    install_requires=[
        "torch>=2.10",
        "transformers>=5.0",
        "tokenizers>=0.22.1",
        "safetensors>=0.5",
        "gguf>=0.17",
        "jinja2>=3.1",  # chat templates
        "numba>=0.63",
        "numpy>=2.0",
        "pydantic>=2.7",
        "pyyaml>=6.0",
        "filelock>=3.16",
        "rich>=13.0",
        "tqdm>=4.66",
    ],
    extras_require={
        "train": TRAIN,
        "plots": PLOTS,
        "report": PLOTS,  # its pictures; its pages need nothing
        "quantize": QUANTIZE,
        "data": DATA,
        "ray": RAY,
        "server": SERVER,
        "eval": EVAL,
        "test": [
            *TRAIN,
            *PLOTS,
            *QUANTIZE,
            *DATA,
            *RAY,
            *SERVER,
            "openai>=1.60",  # the client that servers are tried with
            "httpx>=0.27",  # and the one that sends what no client would
            "jsonschema>=4.20",  # answers are as the server's description says
            "pytest>=8.0",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.15",
            "types-PyYAML>=6.0",
            # GPU kernels, by its interpreter; torch for CUDA brings its own
            "triton>=3.6; platform_system == 'Linux'",
            "setuptools>=77",  # tests/test_packaging.py reads setup.py
            "packaging>=24.0",
        ],
    },
    entry_points={
        "console_scripts": ["hispec = hispec.cli:main"],
        "lm_eval.models": ["hispec = hispec.integrations.lm_eval:HiSpecLM"],
    },
)
