"""What benchmarks have in common as commands: their errors, and where results go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hispec.errors import HiSpecError
from hispec.utils.files import check_targets, write_json

USER_ERROR = 2


def run(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    print_result: Callable[[dict[str, Any]], None],
) -> int:
    """Measures, writes the result to options.json, if that is given, and prints it -> the exit code, as
    `exit_code` has it."""

    def work() -> None:
        check_results(options)
        result = measure(options)
        if options.json is not None:
            write_json(options.json, result)
        print_result(result)

    return exit_code(name, work)


def exit_code(name: str, work: Callable[[], int | None]) -> int:
    """What `work` returns, 0 for None. What the user can mend is told in a line, before anything is measured
    if `work` finds it by then."""
    try:
        return work() or 0
    except (HiSpecError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return USER_ERROR


def check_results(
    options: argparse.Namespace, flags: Sequence[str] = ("--json",), read: Iterable[Path] = ()
) -> None:
    """Creates the folders of the files that options with these flags name, as far as they are given. Raises
    ConfigError if one cannot be written, or is read: so are all other paths among the options, and `read`."""
    given = dict(vars(options))
    targets = {flag: given.pop(flag.removeprefix("--").replace("-", "_")) for flag in flags}
    lists = [value if isinstance(value, list) else [value] for value in given.values()]
    paths = [path for each in lists for path in each if isinstance(path, Path)]
    check_targets(targets, [*paths, *read])
