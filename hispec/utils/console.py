"""What commands print their summaries on."""

from __future__ import annotations

import sys
from typing import IO

from rich.console import Console

NOT_A_TERMINAL_WIDTH = 140  # columns: rich would take 80 and break paths


def make_console(file: IO[str] | None = None) -> Console:
    """A console on `file` (default: stdout), without markup, as wide as the terminal or NOT_A_TERMINAL_WIDTH
    columns."""
    file = file or sys.stdout
    return Console(
        file=file, markup=False, highlight=False, width=None if file.isatty() else NOT_A_TERMINAL_WIDTH
    )
