"""What stages cost: milliseconds of each as a function of what it is run over, linear but for few tokens
[SmartSpec §4.2]."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

Value = TypeVar("Value", float, NDArray[np.float64])
Knots = tuple[tuple[float, float], ...]  # (tokens, ms)
_LEAST_ROWS = 1e-9  # in whose place no rows stand, over which nothing is run


def rising(knots: Knots) -> Knots:
    """The knots of a Linear. Raises ValueError if they do not rise."""
    for (fewer, less), (tokens, ms) in pairwise(knots):
        if not fewer < tokens or not less <= ms:
            raise ValueError(
                f"must rise: more tokens cost no less, but ({fewer:g}, {less:g}) is followed by"
                f" ({tokens:g}, {ms:g})"
            )
    if not all(0 <= value < math.inf for knot in knots for value in knot):
        raise ValueError("must be of numbers >= 0")
    return knots


@dataclass(frozen=True)
class Linear:
    """Milliseconds of a pass:

        constant + row * rows + of_tokens(tokens) + context * context tokens + pair * tokens * context tokens
        / rows

    tokens          batched tokens: positions that the pass computes, over all rows
    context tokens  positions that the rows attend to, summed over rows
    knots           ((tokens, ms), ...), both rising: what so many tokens cost; between them a straight line,
                    below the first as much as it, beyond the last token_ms for each token. None of them:
                    token_ms for each token. The weights are read for one token anyway, and kernels compute in
                    tiles, so that a fifth token may cost what a sixth to an eighth do not
    pair_ms         of one position that attends to another: several positions of a row read its context once,
                    but each computes with it. SmartSpec has neither this nor knots
    """

    constant_ms: float = 0.0
    row_ms: float = 0.0
    token_ms: float = 0.0
    context_ms: float = 0.0
    pair_ms: float = 0.0
    knots: Knots = ()

    def __post_init__(self) -> None:
        again = "measure again: hispec profile JOB.yaml --latency"
        for name in ("constant_ms", "row_ms", "token_ms", "context_ms", "pair_ms"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name}={value!r} of a stage's cost must be a number >= 0; {again}")
        try:
            rising(self.knots)
        except ValueError as error:
            raise ConfigError(f"knots={self.knots!r} of a stage's cost {error}; {again}") from None

    def __call__(self, rows: Value, tokens: Value, context_tokens: Value) -> Value:
        """Milliseconds; takes numbers, or arrays of one shape."""
        each = context_tokens / np.maximum(rows, _LEAST_ROWS)
        of_tokens = sum(slope * np.maximum(tokens - knot, 0.0) for knot, slope in self.bends())
        return (
            self.least_ms
            + self.row_ms * rows
            + of_tokens
            + self.context_ms * context_tokens
            + self.pair_ms * tokens * each
        )

    @property
    def least_ms(self) -> float:
        """Of a pass whatever it is run over."""
        return self.constant_ms + (self.knots[0][1] if self.knots else 0.0)

    def bends(self) -> list[tuple[float, float]]:
        """(tokens, ms): beyond so many tokens each costs so much more than those before, or less."""
        if not self.knots:
            return [(0.0, self.token_ms)]
        between = [(ms - less) / (tokens - fewer) for (fewer, less), (tokens, ms) in pairwise(self.knots)]
        changes = [after - before for before, after in pairwise((0.0, *between, self.token_ms))]
        return [(tokens, change) for (tokens, _), change in zip(self.knots, changes, strict=True)]


NOTHING = Linear()


def num_bends(stages: Sequence[Linear]) -> int:
    return sum(len(stage.bends()) for stage in stages)


def terms(stages: Sequence[Linear], most_bends: int) -> NDArray[np.float64]:
    """What a pass through all of these stages costs, [4 + 2 * most_bends]: the least, of a row, of a context
    token, of a pair; then the tokens of each bend, and what each token beyond costs more."""
    fixed = [
        sum(getattr(stage, name) for stage in stages)
        for name in ("least_ms", "row_ms", "context_ms", "pair_ms")
    ]
    bends = [value for stage in stages for bend in stage.bends() for value in bend]
    return np.array([*fixed, *bends, *[0.0] * (2 * most_bends - len(bends))])


_FREE = frozenset({"lookup", "round"})  # cost nothing if nothing is said of them, as cold ones


def cold_stage(layer: int) -> str:
    """The stage of the first of several passes over layers [0, layer)."""
    return f"cold/{layer}"


def stage_names(layers: Collection[int], trained: Collection[int], has_draft_model: bool) -> list[str]:
    """The stages that a profile has for exits at `layers`, of which those in `trained` are trained: as
    LatencyModel says."""
    above = {lo: [layer for layer in sorted(layers) if layer > max(lo, 1)] for lo in (0, *sorted(layers))}
    return [
        "plain",
        *(f"draft/{layer}" for layer in sorted(layers)),
        *(f"fill/{layer}" for layer in sorted(layers)),
        *(("draft_model", "fill_model") if has_draft_model else ()),
        *(f"check/{lo}-{hi}" for lo, his in above.items() for hi in his),
        *(f"verify/{lo}" for lo in above),
        *(f"along/{layer}" for layer in sorted(trained)),
        *(f"shadow/{layer}" for layer in sorted(layers)),
        "lookup",
        "prefill",
        "swap",
        "round",
    ]


@dataclass(frozen=True)
class LatencyModel:
    """Costs of the stages of one model on one machine, by name:

    plain          a round of plain decoding: layers [0, L), the model's logits, the choice of a token
    draft/D        one draft pass: layers [0, D), the exit's logits, the choice of a token; draft_model: of a
                   separate model. As fill/D and check/0-C after another over the same layers
    cold/D         what the first pass over layers [0, D) takes more than those that follow it: a CPU's near
                   caches hold what the last verify has read
    fill/D         the same without logits: what is fed to the draft tier, but asked for nothing; fill_model:
                   of a separate model
    check/lo-C     layers [lo, C), the exit's logits, acceptance; lo = 0: the drafter was outside of the model
    verify/lo      layers [lo, L), the model's logits, acceptance
    along/D        the KV of the trained exit at D, from hidden states that a pass went through anyway
    shadow/D       the logits of the exit at D and the choice of a token, from such hidden states
    lookup         one proposal of prompt lookup in each row
    prefill        layers [0, L) and all exits over prompt tokens
    swap           KV of so many positions to host memory and back
    round          what a round costs besides its passes

    plain, lookup and round are of as many tokens as rows; prefill of a chunk that ends at so many context
    tokens; swap of as many context tokens as tokens; both of one row.

    is_static   whether rounds have static shapes: every pass takes its whole rectangle of places, whatever
                was drafted, and rows are rounded up to `row_buckets`
    origin      where stages are from, and what to do where one is missing, in words
    """

    stages: Mapping[str, Linear]
    is_static: bool = False
    row_buckets: tuple[int, ...] = field(default=())
    origin: tuple[str, str] = ("the latency profile", "measure again: hispec profile JOB.yaml --latency")

    def __getitem__(self, name: str) -> Linear:
        """Raises ConfigError for a stage that was not measured, unless it is one of those that may be left
        out, `lookup`, `round` and cold ones: these cost nothing then."""
        try:
            return self.stages[name]
        except KeyError:
            if name in _FREE or name.startswith("cold/"):
                return NOTHING
            there = ", ".join(sorted(self.stages))
            raise ConfigError(
                f"{self.origin[0]} has no stage {name!r}, only {there}; {self.origin[1]}"
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self.stages

    def rows(self, num_rows: int) -> int:
        """Rows that a round of `num_rows` is run with, and costs: in static shapes those of its bucket."""
        return (
            next((bucket for bucket in self.row_buckets if bucket >= num_rows), num_rows)
            if self.is_static
            else num_rows
        )
