"""hispec run: an offline job."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .common import ALL_FAILED, OK, PRESET, add_command, add_options

FLAGS = (
    ("--new", "output.overwrite", "start anew, in place of an existing output"),
    ("--only-missing", "output.only_missing", "keep an output of other settings, do what it lacks"),
    ("--retry-failed", "output.retry_failed", "do the rows of the output again that have errors"),
)


def add(commands: Any) -> None:
    description = "Run the job of a YAML file (docs/jobs.md)."
    run = add_command(
        commands, "run", _run, "run an offline job", description, config="JOB.yaml", has_bar=True
    )
    add_options(run, PRESET)
    for flag, setting, text in FLAGS:
        run.add_argument(flag, dest="set", action="append_const", const=f"{setting}=true", help=text)
    run.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="workers on the machines of a Ray cluster: of this machine's, of HOST:PORT, or local",
    )
    run.add_argument("--dry-run", action="store_true", help="check all rows, estimate time and memory")


def _run(options: argparse.Namespace) -> int:
    from ..jobs.load import load_job

    settings = list(options.set or ())
    if options.ray is not None:  # it says where workers are, in place of the file's `workers`
        settings = ["workers=1", f"ray.address={json.dumps(options.ray)}", *settings]
    job = load_job(options.job, settings, options.preset)
    from ..jobs.report import print_job
    from ..jobs.runner import run_job
    from ..jobs.schema import STANDARD
    from ..utils.memory import keep_loaded

    if options.dry_run:
        from ..jobs.dry_run import dry_run, print_dry_run

        found = dry_run(job, progress=not options.no_progress)
        print_dry_run(found)
        return ALL_FAILED if found.all_failed else OK
    try:
        report = run_job(job, progress=not options.no_progress, on_loaded=keep_loaded)
    except KeyboardInterrupt as interrupt:
        words = f"What is done is kept; {job.output.way_on}"
        raise KeyboardInterrupt(str(interrupt) or words) from None
    print_job(report, sys.stderr if job.output.path == STANDARD else None)
    return ALL_FAILED if report.all_failed else OK
