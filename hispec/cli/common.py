"""Exit codes of commands, and how their options are declared and read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ..jobs.schema import Job

OK, ALL_FAILED, USER_ERROR, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
Option = tuple[str, Callable[[str], Any], str, str]  # flag, type of the value, its name in the help, help
PRESET: Option = (
    "--preset",
    Path,
    "FILE.yaml",
    "take model, engine, plan and sampling from this file, such as configs/smollm2.yaml",
)


def written(text: str) -> Path:
    """The type of an option that names what is written: with ~ as the home folder, which a shell leaves as
    it is after `=`."""
    from ..errors import ConfigError
    from ..utils.files import known_place

    try:
        return known_place(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    *,
    config: str | None = None,
    has_set: bool = True,
    has_bar: bool = False,
) -> argparse.ArgumentParser:
    """A parser of the command `name`. config: name in the help of the YAML file that it takes; has_set: it
    takes --set; has_bar: it takes --no-progress."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(command=run)
    if config is not None:
        parser.add_argument(config.partition(".")[0].lower(), type=Path, metavar=config)
    if has_set:
        parser.add_argument(
            "--set",
            action="extend",
            nargs="+",
            default=[],
            metavar="KEY.PATH=VALUE",
            help="override settings, such as sampling.max_tokens=64",
        )
    if has_bar:
        parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    return parser


def add_options(parser: argparse.ArgumentParser, *options: Option) -> None:
    for flag, kind, metavar, text in options:
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)


def given_fields(options: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """The fields of `model` that options of these names set."""
    values = {name: getattr(options, name, None) for name in model.model_fields}
    return {name: value for name, value in values.items() if value is not None}


def load_limited_job(options: argparse.Namespace, preset: Path | None = None) -> Job:
    """The job file, with --set and --limit put over it. Raises ConfigError."""
    from ..jobs.load import load_job

    limit: Sequence[str] = [] if options.limit is None else [f"input.limit={options.limit}"]
    return load_job(options.job, [*options.set, *limit], preset)
