"""hispec bench: plain, two-tier and three-tier decoding on the same prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import OK, PRESET, add_command, add_options, given_fields, load_limited_job, written


def add(commands: Any) -> None:
    bench = add_command(
        commands,
        "bench",
        _bench,
        "compare transformers, plain, two-tier and three-tier decoding",
        "Measure a job's prompts, greedy, in one process with interleaved repeats: transformers, plain,"
        " two-tier, three-tier.",
        config="JOB.yaml",
    )
    bench.add_argument(
        "--plan",
        type=Path,
        action="append",
        default=[],
        metavar="FILE.yaml",
        help="measure this preset's plan too, under the file's name",
    )
    best = "measure the best plan of each drafter too, two-tier and three-tier, of a `hispec profile --json`"
    sampled = "sample at this temperature, each prompt with its own seed (default: 0, greedy)"
    add_options(
        bench,
        PRESET,
        ("--profile", Path, "FILE.json", best),
        ("--json", written, "FILE", "write the result as JSON"),
        ("--repeats", int, "N", "timed runs of each engine (default: 3)"),
        ("--batch-size", int, "B", "prompts that run together (default: 16)"),
        ("--max-tokens", int, "M", "new tokens per prompt (default: 64)"),
        ("--temperature", float, "T", sampled),
        ("--limit", int, "N", "use the first N prompts"),
        ("--context", int, "N", "repeat or cut each prompt to N tokens"),
    )
    bench.add_argument(
        "--by-batch",
        action="store_true",
        help="time every batch by itself, engines taking turns, which cancels the machine's drift and gives"
        " intervals",
    )
    bench.add_argument(
        "--no-transformers",
        dest="transformers",
        action="store_false",
        help="leave transformers out, and its copy of the model",
    )


def _bench(options: argparse.Namespace) -> int:
    from ..errors import ConfigError, build
    from ..jobs.bench import BenchOptions, run_bench
    from ..jobs.inputs import files_read
    from ..jobs.load import best_plans, load_preset
    from ..jobs.report import print_bench
    from ..utils.files import check_targets, write_json

    job = load_limited_job(options, options.preset)
    files: dict[str, Path] = {}
    for path in options.plan:
        if (other := files.setdefault(path.stem, path)) is not path:
            raise ConfigError(
                f"--plan: {other} and {path} are both named {path.stem!r}; rename one of the files, which"
                " name the plans"
            )
    plans = {name: load_preset(path).speculative for name, path in files.items()}
    if options.profile is not None:
        found = best_plans(options.profile)
        if taken := sorted(plans.keys() & found.keys()):
            raise ConfigError(
                f"--plan: {taken[0]!r} is also a name in {options.profile}; rename the file, which names the"
                " plan"
            )
        plans |= found
    bench_options = build(BenchOptions, given_fields(options, BenchOptions) | {"plans": plans})
    own = [options.job, options.preset, options.profile, *options.plan]
    check_targets({"--json": options.json}, [*files_read(job), *(path for path in own if path is not None)])
    try:
        result = run_bench(job, bench_options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Nothing was written; the same command starts again") from None
    if options.json is not None:
        write_json(options.json, result)
    print_bench(result)
    return OK
