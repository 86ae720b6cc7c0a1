"""hispec profile: the plan that is fastest here."""

from __future__ import annotations

import argparse
from typing import Any

from .common import OK, add_command, add_options, given_fields, load_limited_job, written


def add(commands: Any) -> None:
    profile = add_command(
        commands,
        "profile",
        _profile,
        "find the plan that is fastest here",
        "Measure exits and stages on a job's prompts, greedy; predict every plan, run the best for real, and"
        " keep the simplest of the fastest as a preset.",
        config="JOB.yaml",
        has_bar=True,
    )
    exits = "trained exits to profile (default: the job's, else those that come with HiSpec for the model)"
    drafters = "drafters to look at: exit, tree, ngram, hybrid, model (default: all that apply)"
    add_options(
        profile,
        ("--json", written, "FILE", "write everything that was measured and predicted as JSON"),
        ("--plots", written, "DIR", "draw acceptance by layer and predicted speed by exits as PNG files"),
        ("--exits", str, "FOLDER", exits),
        ("--batch-size", int, "B", "prompts that run together (default: the job's engine.max_num_seqs)"),
        ("--max-tokens", int, "M", "new tokens per prompt (default: the job's sampling.max_tokens)"),
        ("--limit", int, "N", "use the first N prompts"),
        ("--max-drafts", int, "K", "largest num_draft_tokens of exits and draft models (default: 8)"),
        ("--max-checks", int, "R", "largest num_checks of a plan (default: 8)"),
        ("--max-window", int, "W", "places of a round at most, R * (B * K + 1) (default: 32)"),
        ("--top", int, "N", "plans of each kind that are run for real (default: 2)"),
        ("--repeats", int, "N", "timed runs of each (default: 3)"),
    )
    profile.add_argument(
        "--write-preset",
        dest="preset",
        type=written,
        metavar="FILE.yaml",
        help="write the best plan as the settings of a job",
    )
    profile.add_argument("--overwrite", action="store_true", help="replace an existing preset")
    profile.add_argument("--drafters", nargs="+", metavar="KIND", help=drafters)
    profile.add_argument(
        "--latency",
        nargs="?",
        const="",
        metavar="FILE",
        help="only measure what stages cost here, for control: goodput and simulations, and write FILE;"
        " without FILE keep it for this machine, and measure how many workers `workers: auto` is to take",
    )
    profile.add_argument(
        "--numbers",
        nargs="*",
        metavar="NAME",
        help="only compare what weights may be held in, by plain decoding: float32, bfloat16, float16, int8,"
        " int4, int8_kv (int8, keys and values too), the others with the first (default: float32 bfloat16"
        " int8, on a GPU bfloat16 int8)",
    )
    add_options(
        profile,
        ("--max-kl", float, "NATS", "of --numbers: how far the best may be from the first (default: 0.005)"),
    )


def _profile(options: argparse.Namespace) -> int:
    if options.latency is not None:
        return _latency(options)
    if options.numbers is not None:
        return _numbers(options)
    if options.max_kl is not None:
        from ..errors import ConfigError

        raise ConfigError("--max-kl: means nothing without --numbers; give that, too, or leave it out")
    from ..errors import build
    from ..profile.options import ProfileOptions, Targets

    job = load_limited_job(options)
    profile_options = build(ProfileOptions, given_fields(options, ProfileOptions))
    targets = Targets(
        json=options.json,
        preset=options.preset,
        plots=options.plots,
        overwrite=options.overwrite,
        job_file=options.job,
    )
    from ..profile.report import print_profile
    from ..profile.run import profile_to_files

    print_profile(profile_to_files(job, profile_options, targets, progress=not options.no_progress))
    return OK


def _numbers(options: argparse.Namespace) -> int:
    taken = {"numbers", "max_kl", "json", "batch_size", "max_tokens", "limit", "repeats"}
    _check_alone(options, "numbers", "compares the model's numbers by plain decoding", taken)
    from ..errors import build
    from ..profile.numbers import default_numbers, numbers_to_file, print_numbers
    from ..profile.options import NumbersOptions

    job = load_limited_job(options)
    numbers = options.numbers or default_numbers(job.engine.device)
    asked = build(NumbersOptions, given_fields(options, NumbersOptions) | {"numbers": numbers})
    result = numbers_to_file(job, asked, options.json, job_file=options.job, progress=not options.no_progress)
    print_numbers(result, options.job)
    return OK


def _check_alone(options: argparse.Namespace, mode: str, does: str, taken: set[str]) -> None:
    """Raises ConfigError for options that mean nothing beside the one that `mode` names."""
    from ..errors import ConfigError

    taken = taken | {"job", "set", "no_progress", "command"}
    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    given -= taken
    if given:
        flags = ["write-preset" if name == "preset" else name.replace("_", "-") for name in sorted(given)]
        names = ", ".join(f"--{flag}" for flag in flags)
        raise ConfigError(f"{names}: means nothing with --{mode}, which only {does}; leave it out")


def _latency(options: argparse.Namespace) -> int:
    _check_alone(options, "latency", "measures stages", {"latency", "max_window"})
    from ..jobs.load import load_job

    job = load_job(options.job, options.set)
    from ..profile.stage_latency import print_latency, profile_latency
    from ..utils.files import known_place

    path = known_place(options.latency) if options.latency else None
    progress = not options.no_progress
    profile, place = profile_latency(
        job, path, max_window=options.max_window, job_file=options.job, progress=progress
    )
    print_latency(profile, place)
    if path is None:  # it is for this machine, and so is the number of workers that `auto` takes
        from ..profile.worker_speed import keep_worker_speeds, print_workers

        if (counts := keep_worker_speeds(job, progress=progress)) is not None:
            print_workers(counts)
    return OK
