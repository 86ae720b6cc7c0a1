"""hispec bench: plain, two-tier and three-tier decoding on the same prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import OK, add_preset, add_set


def add(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="compare transformers, plain, two-tier and three-tier decoding",
        description=(
            "Measure a job's prompts, greedy, in one process with interleaved repeats: transformers, plain,"
            " two-tier, three-tier."
        ),
    )
    bench.add_argument("job", type=Path, metavar="JOB.yaml")
    add_preset(bench)
    bench.add_argument(
        "--plan",
        type=Path,
        action="append",
        default=[],
        metavar="FILE.yaml",
        help="measure this preset's plan too, under the file's name",
    )
    bench.add_argument(
        "--profile",
        type=Path,
        metavar="FILE.json",
        help=(
            "measure the best plan of each drafter too, two-tier and three-tier, of a `hispec profile --json`"
        ),
    )
    add_set(bench)
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    bench.add_argument("--repeats", type=int, metavar="N", help="timed runs of each engine (default: 3)")
    bench.add_argument("--batch-size", type=int, metavar="B", help="prompts that run together (default: 16)")
    bench.add_argument("--max-tokens", type=int, metavar="M", help="new tokens per prompt (default: 64)")
    bench.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sample at this temperature, each prompt with its own seed (default: 0, greedy)",
    )
    bench.add_argument("--limit", type=int, metavar="N", help="use the first N prompts")
    bench.add_argument("--context", type=int, metavar="N", help="repeat or cut each prompt to N tokens")
    bench.add_argument(
        "--no-transformers",
        dest="transformers",
        action="store_false",
        help="leave transformers out, and its copy of the model",
    )
    bench.set_defaults(command=_bench)


def _bench(options: argparse.Namespace) -> int:
    import json

    from ..errors import ConfigError, build
    from ..jobs.bench import BenchOptions, run_bench
    from ..jobs.load import best_plans, load_job, load_preset
    from ..jobs.report import print_bench

    limit = [] if options.limit is None else [f"input.limit={options.limit}"]
    job = load_job(options.job, options.set + limit, options.preset)
    values = {
        name: getattr(options, name)
        for name in BenchOptions.model_fields
        if getattr(options, name, None) is not None
    }
    values["plans"] = {path.stem: load_preset(path).speculative for path in options.plan}
    if options.profile is not None:
        found = best_plans(options.profile)
        if taken := sorted(values["plans"].keys() & found.keys()):
            raise ConfigError(
                f"--plan: {taken[0]!r} is also a name in {options.profile}; rename the file, which names the"
                " plan"
            )
        values["plans"] |= found
    bench_options = build(BenchOptions, values)
    if options.json is not None:
        try:
            options.json.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError(f"--json: cannot write {options.json}: {error.strerror}") from None
    result = run_bench(job, bench_options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print_bench(result)
    return OK
