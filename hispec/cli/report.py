"""hispec report: the summary and the picture of a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .common import OK, add_command, add_options


def add(commands: Any) -> None:
    report = add_command(
        commands,
        "report",
        _report,
        "show what an engine decided and did",
        "Sum up a trace (engine.trace=FILE) and draw it: plans, speed, acceptance and load over time"
        " (docs/control.md). Of several, such as those of a job's workers, all as one.",
        has_set=False,
    )
    report.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    picture = "the picture (default: beside the trace, with the suffix .png)"
    report.add_argument("-o", "--output", type=Path, metavar="FILE.png", help=picture)
    add_options(report, ("--json", Path, "FILE", "write the summary as JSON"))


def _report(options: argparse.Namespace) -> int:
    from ee_models.errors import install_command

    from ..trace.merge import merge
    from ..trace.plots import draw_trace
    from ..trace.report import print_report
    from ..trace.summary import summarize
    from ..trace.writer import read_trace
    from ..utils.files import write_json
    from ..utils.plots import check_matplotlib, has_matplotlib

    # First: what is no file has no name to take the picture's from.
    trace = merge([read_trace(path) for path in options.traces])
    picture = options.traces[0].with_suffix(".png") if options.output is None else options.output
    for path in options.traces:
        _check_targets(path, picture, options.json)
    if options.output is not None:
        check_matplotlib("-o")
    summary = summarize(trace)
    print_report(summary)
    if options.json is not None:
        write_json(options.json, summary)
    if has_matplotlib():
        draw_trace(trace, picture)
        print(f"drawn: {picture}")
    else:
        print(f"not drawn: matplotlib is not installed: {install_command('plots')}", file=sys.stderr)
    return OK


def _check_targets(trace: Path, picture: Path, summary: Path | None) -> None:
    """Creates missing folders. Raises ConfigError for what must not be written, or can't be."""
    from ..errors import ConfigError
    from ..utils.files import check_target

    if picture.suffix.lower() != ".png":
        raise ConfigError(f"-o: {picture} is drawn as PNG; give it a name that ends with .png")
    for flag, path in (("-o", picture), ("--json", summary)):
        if path is None:
            continue
        if path.absolute() == trace.absolute() or (path.exists() and trace.exists() and path.samefile(trace)):
            raise ConfigError(f"{flag}: {path} is the trace itself; choose another path")
        check_target(flag, path)
    if summary is not None and summary.absolute() == picture.absolute():
        raise ConfigError(f"-o and --json both name {picture}; give each a path of its own")
