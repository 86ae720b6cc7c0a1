"""Why rows have no outputs, counted."""

from __future__ import annotations

from ..errors import cut
from .rows import BadRow, Row

_MOST = 1000  # different reasons that are counted by themselves: there may be millions of rows
_MOST_CHARACTERS = 200  # of each


class Reasons:
    """Rows without outputs, by the reason. total: all of them."""

    def __init__(self) -> None:
        self.total = 0
        self._rows: dict[str, int] = {}
        self._first: dict[str, str] = {}  # where the first row of each is

    def add(self, row: Row | BadRow, reason: str) -> None:
        """Counts a row."""
        reason = cut(" ".join(reason.split()), _MOST_CHARACTERS)
        self.total += 1
        if reason in self._rows or len(self._rows) < _MOST:
            self._rows[reason] = self._rows.get(reason, 0) + 1
            self._first.setdefault(reason, row.where)

    def lines(self, most: int) -> list[str]:
        """The most frequent reasons, each with its rows and where the first of them is; then how many rows
        had others."""
        frequent = sorted(self._rows.items(), key=lambda each: -each[1])[:most]
        lines = [f"{rows} × {reason} ({self._place(reason)})" for reason, rows in frequent]
        if rest := self.total - sum(rows for _, rows in frequent):
            lines.append(f"{rest} × other reasons")
        return lines

    def _place(self, reason: str) -> str:
        return self._first[reason] if self._rows[reason] == 1 else f"first in {self._first[reason]}"
