"""Consoles, tables, progress bars and number formats of all commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .environment import busy_text

NOT_A_TERMINAL_WIDTH = 140  # columns: rich would take 80 and break paths


def make_console(file: IO[str] | None = None) -> Console:
    """A console on `file` (default: stdout), without markup, as wide as the terminal or NOT_A_TERMINAL_WIDTH
    columns."""
    file = file or sys.stdout
    return Console(
        file=file, markup=False, highlight=False, width=None if file.isatty() else NOT_A_TERMINAL_WIDTH
    )


def make_table(*titles: str, num_left: int = 1) -> Table:
    """A table without lines; its first `num_left` columns are flush left and never wrapped, the others flush
    right."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for at, title in enumerate(titles):
        is_left = at < num_left
        table.add_column(title, justify="left" if is_left else "right", no_wrap=is_left)
    return table


def make_bar(total: int, description: str | None, unit: str, shown: bool, **options: Any) -> tqdm[Any]:
    """A progress bar on stderr; options: further ones of tqdm."""
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        disable=not shown,
        file=sys.stderr,
        dynamic_ncols=True,
        **options,
    )


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
