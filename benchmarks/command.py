"""What benchmarks have in common as commands: their errors, and where results go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from ee_models.errors import CheckpointError
from hispec.errors import HiSpecError
from hispec.utils.files import check_target, write_json

USER_ERROR = 2


def run(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    print_result: Callable[[dict[str, Any]], None],
) -> int:
    """Measures, writes the result to options.json, if that is given, and prints it -> the exit code. What the
    user can mend is told in a line, before anything is measured if `measure` finds it by then."""
    try:
        if options.json is not None:
            check_target("--json", options.json)
        result = measure(options)
        if options.json is not None:
            write_json(options.json, result)
    except (HiSpecError, CheckpointError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return USER_ERROR
    print_result(result)
    return 0
