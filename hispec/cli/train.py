"""hispec train: exits for a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import OK, add_set


def add(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train exits",
        description="Train exits, or a LayerSkip model, as a YAML file says (docs/training.md).",
    )
    train.add_argument("config", type=Path, metavar="CONFIG.yaml")
    add_set(train)
    train.add_argument(
        "--only-data", action="store_true", help="write prompts and answers, and stop before training"
    )
    train.add_argument("--no-progress", action="store_true", help="no progress bars")
    train.set_defaults(command=_train)


def _train(options: argparse.Namespace) -> int:
    from ..training.schema import load_training

    config = load_training(options.config, options.set)
    from ..training.run import run_training

    report = run_training(config, only_data=options.only_data, progress=not options.no_progress)
    if report is not None:
        for name, value in report.outcome.metrics.items():
            print(f"{name}: {value:.4f}")
        print(f"{report.outcome.steps_run} steps in {report.outcome.seconds:.0f} s; {report.path}")
    return OK
