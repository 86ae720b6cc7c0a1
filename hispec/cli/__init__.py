"""The command line, one module per command. Everything heavy is imported when a command runs, so that
`--help` answers at once."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence

from ..version import __version__
from . import bench, env, fetch, generate, profile, report, run, schema, serve, simulate, train
from .common import BROKEN_PIPE, INTERRUPTED, USER_ERROR

_SETTING = re.compile(r"\w[\w.]*=")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code (docs/jobs.md). HISPEC_DEBUG=1 lets errors through, with their
    traceback."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    streams = {"output": sys.stdout, "error": sys.stderr}
    for name, stream in streams.items():
        # Python has None for one that is closed, and the system gives its number to the next file that is
        # opened, which whatever writes there would spoil.
        if stream is None:
            if sys.stderr is not None:
                print(f"hispec: standard {name} is closed; send it to /dev/null instead", file=sys.stderr)
            return USER_ERROR
        # What a terminal of another encoding cannot show must not end a command that has measured for hours.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(_bind_settings(sys.argv[1:] if arguments is None else arguments))
    debug = os.environ.get("HISPEC_DEBUG", "") not in ("", "0")
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        print(f"\nInterrupted. {interrupt}".rstrip(), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; what Python would still flush at exit must go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if debug or not _is_users(error):
            raise
        print(f"hispec: {error}", file=sys.stderr)
        return USER_ERROR


def _bind_settings(arguments: Sequence[str]) -> list[str]:
    """`--set a=1 b=2 TEXT` as `--set=a=1 --set=b=2 TEXT`: argparse would take TEXT for a setting, too."""
    bound: list[str] = []
    are_settings = False
    for argument in arguments:
        if are_settings and _SETTING.match(argument):
            if bound[-1] == "--set":
                bound.pop()
            bound.append(f"--set={argument}")
        else:
            are_settings = argument == "--set"
            bound.append(argument)
    return bound


def _is_users(error: Exception) -> bool:
    """Whether `error` is shown as its message alone, without a traceback."""
    from ..errors import HiSpecError

    return isinstance(error, HiSpecError | OSError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hispec", description="Early-exit hierarchical speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"hispec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (run, generate, serve, bench, profile, simulate, report, train, fetch, schema, env):
        command.add(commands)
    return parser
