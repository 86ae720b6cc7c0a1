"""hispec simulate: policies and controllers at any load, without a model."""

from __future__ import annotations

import argparse
from typing import Any

from .common import OK, add_command, add_options, written


def add(commands: Any) -> None:
    simulate = add_command(
        commands,
        "simulate",
        _simulate,
        "compare policies and controllers at any load, without a model",
        "Run the systems of an experiment, the engine's own policies and controllers, over a cost model and"
        " an acceptance model (docs/simulation.md; configs/simulate_laps.yaml is an example).",
        config="CONFIG.yaml",
        has_bar=True,
    )
    add_options(
        simulate,
        ("--json", written, "FILE", "write all figures as JSON"),
        ("--plots", written, "DIR", "draw mean and p99 latency by load as PNG files"),
    )


def _simulate(options: argparse.Namespace) -> int:
    from ..simulate.report import print_simulation
    from ..simulate.run import load_simulation, simulate_to_files

    config = load_simulation(options.config, options.set)
    result = simulate_to_files(
        config, options.json, options.plots, config_file=options.config, progress=not options.no_progress
    )
    print_simulation(result)
    return OK
