"""Which rows run together, and for how long, where requests are served in order: what the engine does with
prompts that are all there when it begins, under the policy `fcfs` and without its prefix cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .recording import Ints


@dataclass
class _Row:
    """prompt: positions that are left to compute; rounds: that follow"""

    prompt: int
    rounds: int


def stretches(
    rounds: Ints, prompts: Ints, batch_size: int, max_prefill_tokens: int
) -> Counter[tuple[int, int]]:
    """{(rows, number of rounds): how often}: rounds that follow each other over the same rows, and that the
    engine may run together.

    rounds              [answers] that each takes
    prompts             [answers] positions of its prompt that are computed before them
    max_prefill_tokens  of these, those that one step computes at most, of all rows together; rows whose
                        prompts are there have single rounds meanwhile
    """
    found: Counter[tuple[int, int]] = Counter()
    waiting = iter(map(_Row, prompts.tolist(), rounds.tolist()))
    rows: list[_Row] = []
    while True:
        while len(rows) < batch_size and (row := next(waiting, None)) is not None:
            rows.append(row)
        if not rows:
            return found
        room = max_prefill_tokens
        for row in rows:
            taken = min(row.prompt, room)
            row.prompt, room = row.prompt - taken, room - taken
        ready = [row for row in rows if row.prompt == 0]
        if ready:
            together = min(row.rounds for row in ready) if len(ready) == len(rows) else 1
            found[len(ready), together] += 1
            for row in ready:
                row.rounds -= together
            rows = [row for row in rows if row.rounds > 0]
