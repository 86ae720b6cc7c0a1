"""hispec profile: the plan that is fastest here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import OK, add_set


def add(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="find the plan that is fastest here",
        description=(
            "Measure exits and stages on a job's prompts, greedy; predict every plan, run the best for real,"
            " and keep the fastest as a preset."
        ),
    )
    profile.add_argument("job", type=Path, metavar="JOB.yaml")
    add_set(profile)
    profile.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything that was measured and predicted as JSON"
    )
    profile.add_argument(
        "--write-preset",
        dest="preset",
        type=Path,
        metavar="FILE.yaml",
        help="write the fastest plan as the settings of a job",
    )
    profile.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="draw acceptance by layer and predicted speed by exits as PNG files",
    )
    profile.add_argument("--overwrite", action="store_true", help="replace an existing preset")
    profile.add_argument(
        "--exits",
        metavar="FOLDER",
        help="trained exits to profile (default: the job's, else those that come with HiSpec for the model)",
    )
    profile.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="prompts that run together (default: the job's engine.max_num_seqs)",
    )
    profile.add_argument("--max-tokens", type=int, metavar="M", help="new tokens per prompt (default: 64)")
    profile.add_argument("--limit", type=int, metavar="N", help="use the first N prompts")
    profile.add_argument(
        "--max-drafts",
        type=int,
        metavar="K",
        help="largest num_draft_tokens of exits and draft models (default: 8)",
    )
    profile.add_argument(
        "--max-checks", type=int, metavar="R", help="largest num_checks of a plan (default: 8)"
    )
    profile.add_argument(
        "--max-window", type=int, metavar="W", help="places of a round at most, R * (B * K + 1) (default: 32)"
    )
    profile.add_argument(
        "--drafters",
        nargs="+",
        metavar="KIND",
        help="drafters to look at: exit, tree, ngram, hybrid, model (default: all that apply)",
    )
    profile.add_argument(
        "--top", type=int, metavar="N", help="plans of each kind that are run for real (default: 2)"
    )
    profile.add_argument("--repeats", type=int, metavar="N", help="timed runs of each (default: 3)")
    profile.add_argument(
        "--latency",
        nargs="?",
        const="",
        metavar="FILE",
        help=(
            "only measure what stages cost here, for control: goodput and simulations, and write FILE"
            " (default: where it is kept)"
        ),
    )
    profile.add_argument("--no-progress", action="store_true", help="no progress bars")
    profile.set_defaults(command=_profile)


def _profile(options: argparse.Namespace) -> int:
    if options.latency is not None:
        return _latency(options)
    from ..errors import build
    from ..jobs.load import load_job
    from ..profile.options import ProfileOptions, Targets

    limit = [] if options.limit is None else [f"input.limit={options.limit}"]
    job = load_job(options.job, options.set + limit)
    values = {
        name: getattr(options, name)
        for name in ProfileOptions.model_fields
        if getattr(options, name) is not None
    }
    profile_options = build(ProfileOptions, values)
    targets = Targets(
        json=options.json, preset=options.preset, plots=options.plots, overwrite=options.overwrite
    )
    from ..profile.report import print_profile
    from ..profile.run import profile_to_files

    print_profile(profile_to_files(job, profile_options, targets, progress=not options.no_progress))
    return OK


def _latency(options: argparse.Namespace) -> int:
    from ..errors import ConfigError
    from ..jobs.load import load_job

    taken = {"job", "set", "latency", "max_window", "no_progress", "command"}
    if given := [
        name for name, value in vars(options).items() if name not in taken and value not in (None, False)
    ]:
        names = ", ".join(
            "--write-preset" if name == "preset" else "--" + name.replace("_", "-") for name in sorted(given)
        )
        raise ConfigError(f"{names}: means nothing with --latency, which only measures stages; leave it out")
    job = load_job(options.job, options.set)
    from ..profile.latency import print_latency, profile_latency

    path = Path(options.latency).expanduser() if options.latency else None
    profile, place = profile_latency(
        job, path, max_window=options.max_window, progress=not options.no_progress
    )
    print_latency(profile, place)
    return OK
