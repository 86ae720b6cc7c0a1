"""Inputs of training for tests of its data, and the examples made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ee_models.training.examples import Example
from hispec.errors import build
from hispec.training.data import make_examples
from hispec.training.schema import TrainConfig

MAX_LENGTH = 120
USER = {"role": "user", "content": "What?"}


def answered(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    }


GOOD = [answered(1), answered(2)]
OPENINGS = [
    {"opening": "Tell me ", "count": 3, "max_tokens": 20},
    {"opening": "", "count": 4, "max_tokens": 20},
]


def write(path: Path, lines: list[Any]) -> Path:
    """Objects as JSON, bytes as they are."""
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def make_config(model: Path, folder: Path, prompts: Any, **data: Any) -> TrainConfig:
    """`prompts`: lines of a file, or sources."""
    if not (isinstance(prompts[0], dict) and {"path", "opening"} & prompts[0].keys()):
        prompts = [{"path": str(write(folder / "in.jsonl", prompts))}]
    values = {"prompts": prompts, "max_tokens": 12, "max_length": MAX_LENGTH, "held_out": 1} | data
    return build(
        TrainConfig,
        {
            "model": str(model),
            "engine": {"max_num_seqs": 4, "max_run_ms": 0.0},
            "data": values,
            "adapters": {"exits": [{"layer": 1}]},
            "loop": {"num_steps": 1},
        }
        | {"output": {"path": str(folder / "out")}},
    )


def examples_of(config: TrainConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    (folder / "work").mkdir(exist_ok=True)
    return make_examples(config, folder / "work", tokenizer, progress=False)


def texts(examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """(prompt, response) of each."""
    return [
        (tokenizer.decode(e.token_ids[: e.prompt_len]), tokenizer.decode(e.token_ids[e.prompt_len :]))
        for e in examples
    ]


def chat(content: str) -> str:
    return f"<|role|>user\n{content}</s><|role|>assistant\n"
