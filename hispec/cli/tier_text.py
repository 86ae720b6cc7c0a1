"""A stream's text with each token in the colour of its tier."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..utils.console import make_console

if TYPE_CHECKING:
    from ..outputs import Delta

STYLES = {"draft": "cyan", "check": "yellow underline", "verify": "magenta bold"}
_MEANINGS = {"draft": "drafted and kept", "check": "the check's own", "verify": "the full model's own"}


class TierText:
    """Prints Deltas with tiers. On a terminal tokens are coloured; elsewhere the text is printed as it is, as
    without tiers. NO_COLOR is heeded as rich heeds it."""

    def __init__(self, tokenizer: Any, continues: bool) -> None:
        """tokenizer: the model's; None for a model without one, whose outputs have no text. continues: as of
        IncrementalText."""
        from ..detokenizer import TokenPieces

        self.counts: Counter[str] = Counter()
        self._console = make_console()
        self._pieces = None if tokenizer is None else TokenPieces(tokenizer, continues)

    def print(self, delta: Delta) -> None:
        """Prints the text that the Delta released."""
        tiers = delta.tiers or []
        self.counts.update(tiers)
        if not sys.stdout.isatty() or self._pieces is None:
            print(delta.text, end="", flush=True)
            return
        is_last = delta.finish_reason is not None
        for piece, tier in self._pieces.cut(delta.token_ids, tiers, delta.text, is_last):
            self._console.print(piece, style=STYLES.get(tier), end="", soft_wrap=True)
        sys.stdout.flush()

    def print_legend(self) -> None:
        """The tiers with their counts, each in its colour, on stderr."""
        from rich.text import Text

        counts = [
            Text(f"{tier}: {self.counts[tier]} ({meaning})", STYLES[tier])
            for tier, meaning in _MEANINGS.items()
        ]
        make_console(sys.stderr).print(Text("tokens by tier: ") + Text(", ").join(counts), soft_wrap=True)
