"""A job of a few prompts, and the options of a profile that is over soon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

SMALL = [
    "--max-tokens",
    "24",
    "--max-drafts",
    "2",
    "--max-checks",
    "2",
    "--max-window",
    "6",
    "--top",
    "1",
    "--repeats",
    "2",
    "--no-progress",
]
ROWS: list[dict[str, Any]] = [
    {"prompt": "hello there", "metadata": {"task": "chat"}},
    {"prompt": "1+1=", "metadata": {"task": "maths"}},
    {"prompt": "what is the air speed", "metadata": {"task": "chat"}},
]


def write_job(folder: Path, model: Path, rows: list[dict[str, Any]] | None = None, **fields: Any) -> Path:
    (folder / "in.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (ROWS if rows is None else rows))
    )
    values = {
        "model": str(model),
        "engine": {"max_num_seqs": 2, "max_model_len": 128, "dtype": "float32"},
        "input": {"path": "in.jsonl"},
        "output": {"path": str(folder / "out.jsonl"), "overwrite": True},
        "sampling": {
            "temperature": 0.0,
            "max_tokens": 24,
            "ignore_eos": True,
            "logit_bias": {"5": -1.0},
            "stop": ["no", "x: y"],
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values | fields))
    return folder / "job.yaml"
