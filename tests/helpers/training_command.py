"""Training files of a tiny model, and runs of `hispec train` over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from ee_models.checkpoint.exit_files import TENSORS
from hispec.cli import main

EXITS = [{"layer": 2, "vocabulary_size": 100}, {"layer": 4, "num_blocks": 2, "intermediate_size": 24}]
SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}


def write_config(folder: Path, model: Path, **changes: Any) -> Path:
    """A training file with its prompts beside it; `changes` are put over its sections."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": f"Say something about {number}."} for number in range(7)]
    lines += [
        {"messages": [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Nothing."}]}
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values: dict[str, Any] = {
        "model": str(model),
        "engine": {"max_num_seqs": 8, "max_run_ms": 0.0},
        "data": {
            "prompts": [{"path": "prompts.jsonl"}, {"opening": "Why ", "count": 3, "max_tokens": 16}],
            "max_tokens": 8,
            "max_length": 100,
            "held_out": 2,
        },
        "adapters": {"exits": EXITS},
        "loop": {"num_steps": 6, "batch_size": 4, "eval_every": 4, "checkpoint_every": 2},
        "output": {"path": str(folder / "out")},
    }
    for section, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(section), dict):
            values[section] = {
                key: item for key, item in (values[section] | value).items() if item != "left out"
            }
        else:
            values[section] = value
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value != "left out"}))
    return path


def train(config: Path, *arguments: str) -> int:
    return main(["train", str(config), "--no-progress", *arguments])


def exits_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / TENSORS)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
