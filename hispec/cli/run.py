"""hispec run: an offline job."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import ALL_FAILED, OK, add_preset, add_set


def add(commands: Any) -> None:
    run = commands.add_parser(
        "run", help="run an offline job", description="Run the job of a YAML file (docs/jobs.md)."
    )
    run.add_argument("job", type=Path, metavar="JOB.yaml")
    add_preset(run)
    add_set(run)
    run.add_argument("--no-progress", action="store_true", help="no progress bar")
    run.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from ..jobs.load import load_job

    job = load_job(options.job, options.set, options.preset)
    from ..jobs.report import print_job
    from ..jobs.runner import run_job

    report = run_job(job, progress=not options.no_progress)
    print_job(report)
    return ALL_FAILED if report.all_failed else OK
