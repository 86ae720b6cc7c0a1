"""hispec train: exits for a model, a model with exits, or n-grams of its answers."""

from __future__ import annotations

import argparse
from typing import Any

from .common import OK, add_command


def add(commands: Any) -> None:
    description = (
        "Train exits or a model with them, or count n-grams, as a YAML file says (docs/training.md)."
    )
    train = add_command(
        commands, "train", _train, "train exits", description, config="CONFIG.yaml", has_bar=True
    )
    only = train.add_mutually_exclusive_group()
    only.add_argument(
        "--only-data", action="store_true", help="write prompts and answers, and stop before training"
    )
    only.add_argument(
        "--only-export",
        action="store_true",
        help="write what the last checkpoint of an interrupted run holds, without training on",
    )


def _train(options: argparse.Namespace) -> int:
    from ..training.schema import load_training

    config = load_training(options.config, options.set)
    from ..training.run import run_training

    try:
        report = run_training(
            config,
            only_data=options.only_data,
            only_export=options.only_export,
            progress=not options.no_progress,
        )
    except KeyboardInterrupt as interrupt:
        words = f"What is done is in {config.output.path}; {config.output.way_on}"
        raise KeyboardInterrupt(str(interrupt) or words) from None
    if report is not None:
        for name, value in report.outcome.metrics.items():
            print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value:,}")
        steps = f"{report.outcome.steps_run} steps in" if config.loop else "counted in"
        rate = report.outcome.tokens_per_s
        speed = "" if rate is None else f", {rate:.0f} tokens/s in the median step"
        print(f"{steps} {report.outcome.seconds:.0f} s{speed}; {report.path}")
    return OK
