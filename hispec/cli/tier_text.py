"""A stream's text with each token in the colour of its tier."""

from __future__ import annotations

import sys
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from ..utils.console import make_console

if TYPE_CHECKING:
    from ..outputs import Delta

STYLES = {"draft": "cyan", "check": "yellow underline", "verify": "magenta bold"}
_MEANINGS = {"draft": "drafted and kept", "check": "the check's own", "verify": "the full model's own"}


class TierText:
    """Prints Deltas with tiers. On a terminal tokens are coloured; elsewhere the text is printed as it is, as
    without tiers. NO_COLOR is heeded as rich heeds it."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: the model's; None for a model without one, whose outputs have no text."""
        from ..detokenizer import IncrementalText

        self.counts: Counter[str] = Counter()
        self._console = make_console()
        self._text = None if tokenizer is None else IncrementalText(tokenizer, ())
        self._waiting: deque[tuple[str, str]] = deque()  # (text, tier) that no Delta has released yet

    def print(self, delta: Delta) -> None:
        """Prints the text that the Delta released. Some of it may be of tokens that came before: what could
        have been the beginning of a stop string, or of a character."""
        tiers = delta.tiers or []
        self.counts.update(tiers)
        if not sys.stdout.isatty() or self._text is None:
            print(delta.text, end="", flush=True)
            return
        is_last = delta.finish_reason is not None
        for place, (token, tier) in enumerate(zip(delta.token_ids, tiers, strict=True), start=1):
            self._text.append(token)
            self._waiting.append((self._text.release(is_last and place == len(tiers)), tier))
        left = len(delta.text)
        while left and self._waiting:
            piece, whose = self._waiting.popleft()
            if len(piece) > left:
                self._waiting.appendleft((piece[left:], whose))
            self._console.print(piece[:left], style=STYLES[whose], end="", soft_wrap=True)
            left -= min(left, len(piece))
        if left:  # of a last Delta without tokens: bytes that no token has completed
            print(delta.text[-left:], end="")
        sys.stdout.flush()

    def print_legend(self) -> None:
        """The tiers with their counts, each in its colour, on stderr."""
        from rich.text import Text

        counts = [
            Text(f"{tier}: {self.counts[tier]} ({meaning})", STYLES[tier])
            for tier, meaning in _MEANINGS.items()
        ]
        make_console(sys.stderr).print(Text("tokens by tier: ") + Text(", ").join(counts), soft_wrap=True)
