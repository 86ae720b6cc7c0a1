"""hispec report: the summary and the picture of a trace, and a page of what a file holds."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import OK, add_command, add_options, written

if TYPE_CHECKING:
    from ..trace.records import Trace


def add(commands: Any) -> None:
    report = add_command(
        commands,
        "report",
        _report,
        "show what an engine decided and did",
        "Sum up a trace (engine.trace=FILE) and draw it: plans, speed, acceptance and load over time"
        " (docs/control.md). Of several, such as those of a job's workers, all as one. With --html a page of"
        " its own, of traces, results of `hispec bench --json` and rows of jobs.",
        has_set=False,
    )
    report.add_argument("files", type=Path, nargs="+", metavar="FILE")
    picture = "the picture (default without --html: beside the trace, with the suffix .png)"
    report.add_argument("-o", "--output", type=written, metavar="FILE.png", help=picture)
    add_options(
        report,
        ("--html", written, "OUT.html", "write a page that needs no network"),
        ("--json", written, "FILE", "write the summary of traces as JSON"),
    )


def _report(options: argparse.Namespace) -> int:
    from ee_models.errors import install_command

    from ..trace.merge import read_together
    from ..utils.plots import has_matplotlib

    if options.html is None:
        # First: what is no file has no name to take the picture's from.
        trace = read_together(options.files)
        beside = options.files[0].with_suffix(".png")
        can_write = has_matplotlib() and os.access(beside.absolute().parent, os.W_OK)
        picture = options.output or (beside if can_write else None)
        _check_targets(options, picture)
        _show(trace, options, picture)
        if picture is None:
            why = f"{beside.absolute().parent} cannot be written: choose another place with -o"
            if not has_matplotlib():
                why = f"matplotlib is not installed: {install_command('plots')}"
            print(f"not drawn: {why}", file=sys.stderr)
        return OK
    from ..errors import ConfigError
    from ..page.make import is_trace, write_page

    has_trace = any(is_trace(path) for path in options.files)
    for flag, path in (("-o", options.output), ("--json", options.json)):
        if path is not None and not has_trace:
            raise ConfigError(f"{flag} is of traces, and none of the files is one; leave it out")
    _check_targets(options, options.output)
    page_trace = write_page(options.files, options.html)
    if page_trace is not None:
        _show(page_trace, options, options.output)
    print(f"written: {options.html}")
    return OK


def _show(trace: Trace, options: argparse.Namespace, picture: Path | None) -> None:
    """Prints the summary of a trace, writes it as JSON and draws the picture, where these are asked for."""
    from ..trace.plots import draw_trace
    from ..trace.report import print_report
    from ..trace.summary import summarize
    from ..utils.files import write_json

    summary = summarize(trace)
    print_report(summary)
    if options.json is not None:
        write_json(options.json, summary)
    if picture is not None:
        draw_trace(trace, picture)
        print(f"drawn: {picture}")


def _check_targets(options: argparse.Namespace, picture: Path | None) -> None:
    """Creates missing folders. Raises ConfigError for what must not be written, or can't be."""
    from ..errors import ConfigError
    from ..utils.files import check_targets
    from ..utils.plots import check_matplotlib

    if options.output is not None:
        check_matplotlib("-o")
    if picture is not None and picture.suffix.lower() != ".png":
        raise ConfigError(f"-o: {picture} is drawn as PNG; give it a name that ends with .png")
    check_targets({"-o": picture, "--html": options.html, "--json": options.json}, options.files)
