"""A fault to plant: what is right, what is wrong instead, and which tests should notice."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .suites import LAWS


@dataclass(frozen=True)
class Fault:
    """`right`, a piece of `file`, is found however the formatter laid it out: line breaks, indentation and
    commas before a closing bracket do not matter."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = LAWS

    def find(self, text: str) -> list[re.Match[str]]:
        """The places of `text` that read `right`."""
        characters = re.sub(r",(?=[)\]}])", "", "".join(self.right.split()))
        pattern = (",?\\s*" * (c in ")]}") + re.escape(c) for c in characters)
        return list(re.finditer("\\s*".join(pattern), text))

    def plant(self, text: str) -> str:
        """`text` with `wrong` at its only place, indented as the line where that begins. Raises ValueError
        if there is not exactly one place."""
        places = self.find(text)
        if len(places) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {len(places)} places that read {self.right!r};"
                " bring scripts/faults up to date"
            )
        start, end = places[0].span()
        line = text[text.rfind("\n", 0, start) + 1 :]
        shift = _indent(line) - _indent(self.right.lstrip("\n")) if self.right[:1].isspace() else 0
        first, *others = self.wrong.strip().split("\n") if self.wrong.strip() else [""]
        lines = [first, *(" " * (_indent(other) + shift) + other.lstrip() for other in others)]
        return text[:start] + "\n".join(lines) + text[end:]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
