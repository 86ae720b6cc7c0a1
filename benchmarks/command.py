"""What benchmarks have in common as commands: their arguments, their errors, and where results go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least_one
from ee_models.errors import CheckpointError
from hispec.errors import HiSpecError
from hispec.utils.files import check_target, write_json

USER_ERROR = 2


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Of a benchmark that decodes the prompts of one file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--limit", type=at_least_one, metavar="N", help="the first N prompts")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


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
