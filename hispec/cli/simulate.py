"""hispec simulate: policies and controllers at any load, without a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import OK, add_set


def add(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="compare policies and controllers at any load, without a model",
        description=(
            "Run the systems of an experiment, the engine's own policies and controllers, over a cost model"
            " and an acceptance model."
        ),
    )
    simulate.add_argument(
        "config",
        type=Path,
        metavar="CONFIG.yaml",
        help="such as configs/simulate_laps.yaml; docs/simulation.md has all settings",
    )
    add_set(simulate)
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    simulate.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw mean and p99 latency by load as PNG files"
    )
    simulate.add_argument("--no-progress", action="store_true", help="no progress bar")
    simulate.set_defaults(command=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from ..simulate.report import print_simulation
    from ..simulate.run import load_simulation, simulate_to_files

    config = load_simulation(options.config, options.set)
    print_simulation(simulate_to_files(config, options.json, options.plots, progress=not options.no_progress))
    return OK
