"""KeyboardInterrupt before chosen lines of chosen files."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Interrupts each line of files whose paths end so, when it is reached for the `at`-th time: at most once
    in each `armed` block.

    lines   those that were interrupted, as (file, line)
    """

    def __init__(self, *files: str, at: int = 1) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._files, self._at = files, at
        self._reached: Counter[tuple[str, int]] = Counter()

    @contextmanager
    def armed(self) -> Iterator[None]:
        before, is_armed = sys.gettrace(), True

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal is_armed
            place = frame.f_code.co_filename, frame.f_lineno
            if not is_armed or not place[0].endswith(self._files):
                return None
            if event == "line" and place not in self.lines:
                self._reached[place] += 1
                if self._reached[place] >= self._at:
                    self.lines.add(place)
                    is_armed = False
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)
