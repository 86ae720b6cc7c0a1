"""hispec run: an offline job."""

from __future__ import annotations

import argparse
from typing import Any

from .common import ALL_FAILED, OK, PRESET, add_command, add_options


def add(commands: Any) -> None:
    description = "Run the job of a YAML file (docs/jobs.md)."
    run = add_command(
        commands, "run", _run, "run an offline job", description, config="JOB.yaml", has_bar=True
    )
    add_options(run, PRESET)


def _run(options: argparse.Namespace) -> int:
    from ..jobs.load import load_job

    job = load_job(options.job, options.set, options.preset)
    from ..jobs.report import print_job
    from ..jobs.runner import run_job

    try:
        report = run_job(job, progress=not options.no_progress)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(str(interrupt) or "No row was run; give the same command again") from None
    print_job(report)
    return ALL_FAILED if report.all_failed else OK
