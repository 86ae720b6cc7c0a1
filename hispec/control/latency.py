"""What stages cost: milliseconds of each as a linear function of what it is run over [SmartSpec §4.2]."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ..errors import ConfigError


@dataclass(frozen=True)
class Linear:
    """Milliseconds of a pass: constant + row * rows + token * tokens + context * context tokens.

    tokens          batched tokens: positions that the pass computes, over all rows
    context tokens  positions that the rows attend to, summed over rows
    """

    constant_ms: float = 0.0
    row_ms: float = 0.0
    token_ms: float = 0.0
    context_ms: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{each.name}={value!r} of a stage's cost must be a number of milliseconds >= 0; measure again: hispec profile --latency")

    def __call__(self, rows: float, tokens: float, context_tokens: float) -> float:
        return self.constant_ms + self.row_ms * rows + self.token_ms * tokens + self.context_ms * context_tokens


NOTHING = Linear()


@dataclass(frozen=True)
class LatencyModel:
    """Costs of the stages of one model on one machine, by name:

    plain          a round of plain decoding: layers [0, L), the model's logits, the choice of a token
    draft/D        one draft pass: layers [0, D), the exit's logits, the choice of a token; draft_model: of a separate model
    fill/D         the same without logits: what is fed to the draft tier, but asked for nothing; fill_model: of a separate model
    check/lo-C     layers [lo, C), the exit's logits, acceptance; lo = 0: the drafter was outside of the model
    verify/lo      layers [lo, L), the model's logits, acceptance
    along/D        the KV of the trained exit at D, from hidden states that a pass went through anyway
    shadow/D       the logits of the exit at D and the choice of a token, from such hidden states
    lookup         one proposal of prompt lookup in each row
    prefill        layers [0, L) and all exits over prompt tokens
    swap           KV of so many positions to host memory and back
    round          what a round costs besides its passes

    is_static   whether rounds have static shapes: every pass takes its whole rectangle of places, whatever was drafted, and rows are rounded up
                to `row_buckets`
    """

    stages: Mapping[str, Linear]
    is_static: bool = False
    row_buckets: tuple[int, ...] = field(default=())

    def __getitem__(self, name: str) -> Linear:
        """Raises ConfigError for a stage that was not measured."""
        try:
            return self.stages[name]
        except KeyError:
            there = ", ".join(sorted(self.stages))
            raise ConfigError(f"the latency profile has no stage {name!r}, only {there}; measure again: hispec profile --latency") from None

    def __contains__(self, name: str) -> bool:
        return name in self.stages

    def rows(self, num_rows: int) -> int:
        """Rows that a round of `num_rows` costs."""
        return next((bucket for bucket in self.row_buckets if bucket >= num_rows), num_rows) if self.is_static else num_rows
