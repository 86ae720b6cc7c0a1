"""hispec fetch: a known model."""

from __future__ import annotations

import argparse
from typing import Any

from .common import OK, add_command


def add(commands: Any) -> None:
    description = "Download and convert a known model, and print its folder; without a name, list them."
    fetch = add_command(commands, "fetch", _fetch, "get a model", description, has_set=False)
    fetch.add_argument("name", nargs="?", metavar="NAME", help="such as smollm2")
    fetch.add_argument("--force", action="store_true", help="do it again even if it is there")


def _fetch(options: argparse.Namespace) -> int:
    from ..loading.fetch import fetch
    from ..loading.known_models import describe_known
    from ..utils.console import make_console, make_table

    if options.name is None:
        table = make_table("name", "", num_left=2)
        for name, what in describe_known().items():
            table.add_row(name, what)
        make_console().print(table)
        return OK
    try:
        print(fetch(options.name, force=options.force))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Nothing half-done is kept; the same command goes on") from None
    return OK
