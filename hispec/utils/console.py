"""Consoles, tables, progress bars and number formats of all commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .environment import busy_text

_LINE = "{desc}{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_LOG_S = 30.0  # seconds between lines of progress in a log
NOT_A_TERMINAL_WIDTH = 140  # columns: rich would take 80 and break paths


def make_console(file: IO[str] | None = None) -> Console:
    """A console on `file` (default: stdout), which shows text as it is, as wide as the terminal or
    NOT_A_TERMINAL_WIDTH columns."""
    file = file or sys.stdout
    return Console(
        file=file,
        markup=False,
        emoji=False,
        highlight=False,
        width=None if file.isatty() else NOT_A_TERMINAL_WIDTH,
    )


def make_table(*titles: str, num_left: int = 1) -> Table:
    """A table without lines; its first `num_left` columns are flush left and never wrapped, the others flush
    right."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for at, title in enumerate(titles):
        is_left = at < num_left
        table.add_column(title, justify="left" if is_left else "right", no_wrap=is_left)
    return table


class _Lines:
    """What a bar writes, as whole lines: a log has no place to draw over."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        if text := text.strip():
            self._file.write(f"{text}\n")

    def flush(self) -> None:
        self._file.flush()


def make_bar(total: int, description: str | None, unit: str, shown: bool, **options: Any) -> tqdm[Any]:
    """Progress on stderr: a bar, or where that is no terminal a line now and then. options: further ones of
    tqdm."""
    if sys.stderr.isatty():
        options = {"file": sys.stderr, "dynamic_ncols": True} | options
    else:
        options = {"file": _Lines(sys.stderr), "bar_format": _LINE, "mininterval": _LOG_S} | options
        description = description and f"{description}: "  # which tqdm adds in its own format
    return tqdm(total=total, desc=description, unit=unit, disable=not shown, **options)


def count(amount: int, noun: str) -> str:
    """1, "prompt" -> "1 prompt"; 2 -> "2 prompts"."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def percent(share: float | None, digits: int = 1) -> str:
    """0.1234 -> "12.3%"; nothing for None."""
    return "" if share is None else f"{share:.{digits}%}"


def number(value: float | None, digits: int = 2, kind: str = "f") -> str:
    """1.234 -> "1.23" (kind: the type in a format string); nothing for None."""
    return "" if value is None else f"{value:.{digits}{kind}}"


def print_if_busy(console: Console, values: Mapping[str, Any], what: str = "speeds") -> None:
    """A warning if other programs took so much of the machine, by `busy_text`, that figures are void."""
    if (text := busy_text(values)) is not None:
        console.print(f"{text}: do not rely on these {what}.")
