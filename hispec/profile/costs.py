"""What each stage costs here: passes of the round's own code over a real model and a real KV, timed at many
widths.

A width is a number of positions that one pass computes, over all rows. Widths up to the number of rows are
one position each of so many rows, as in drafting; larger ones are several positions of every row, as in
checking and verifying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ee_models.decoder import Decoder
from ee_models.exits import Exit

from ..measure.stage_bench import Rig
from ..measure.timing import medians
from .plans import Reach

Key = tuple[str, Any, int]  # stage, layers, width
_SAMPLES = 5  # timings of each pass, of which the median counts


@dataclass(frozen=True)
class Curve:
    """Milliseconds of a pass by its width, straight between the widths that were measured."""

    widths: tuple[int, ...]
    ms: tuple[float, ...]

    def __call__(self, width: float) -> float:
        """Raises ValueError for a width outside of what was measured: nothing is guessed."""
        if not self.widths[0] <= width <= self.widths[-1]:
            raise ValueError(
                f"a pass over {width:.1f} positions was not measured; measured were {self.widths[0]} to"
                f" {self.widths[-1]}"
            )
        return float(np.interp(width, self.widths, self.ms))

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """[positions]: of 0, for which nothing is run, to the widest that was measured."""
        ms = np.interp(np.arange(self.widths[-1] + 1), self.widths, self.ms)
        ms[0] = 0.0
        return ms

    def as_dict(self) -> dict[str, Any]:
        return {"widths": list(self.widths), "ms": list(self.ms)}


@dataclass(frozen=True)
class StageCosts:
    """Milliseconds of every stage, by width.

    draft         {D: one draft pass: layers [0, D), the exit's logits, the choice of a token}; draft_model: a
                  draft model's
    fill          {D: a draft pass whose logits nobody asks for}; fill_model: a draft model's
    check         {(lo, C): layers [lo, C), the exit's logits, acceptance}; lo = 0: the drafter was outside of
                  the model
    verify        {lo: layers [lo, L), the model's logits, acceptance}
    plain         layers [0, L), the model's logits, the choice of a token
    ranks         what it adds to choose several of the likeliest tokens instead of the likeliest
    probability   how likely the likeliest tokens are, which confidences ask for
    lookup        one proposal of prompt lookup, by rows
    """

    context_len: int
    draft: dict[int, Curve]
    fill: dict[int, Curve]
    check: dict[tuple[int, int], Curve]
    verify: dict[int, Curve]
    plain: Curve
    ranks: Curve | None = None
    probability: Curve | None = None
    lookup: Curve | None = None
    draft_model: Curve | None = None
    fill_model: Curve | None = None

    def as_dict(self) -> dict[str, Any]:
        """In plain types: of each stage its layers, `widths` and `ms`."""
        curves: dict[str, list[dict[str, Any]]] = {}
        for name, by_layers in (
            ("draft", self.draft),
            ("fill", self.fill),
            ("check", self.check),
            ("verify", self.verify),
            ("plain", {0: self.plain}),
        ):
            curves[name] = []
            for layers, curve in by_layers.items():
                lo, hi = (
                    layers
                    if isinstance(layers, tuple)
                    else (0, layers)
                    if name in ("draft", "fill")
                    else (layers, None)
                )
                curves[name].append({"from_layer": lo, "to_layer": hi, **curve.as_dict()})
        others = {
            "ranks": self.ranks,
            "probability": self.probability,
            "lookup": self.lookup,
            "draft_model": self.draft_model,
            "fill_model": self.fill_model,
        }
        return {
            "context_len": self.context_len,
            "samples": _SAMPLES,
            **curves,
            **{name: [] if curve is None else [curve.as_dict()] for name, curve in others.items()},
        }


def measure_costs(
    decoder: Decoder,
    layers: Sequence[int],
    exits: Sequence[Exit],
    context: Sequence[int],
    *,
    batch_size: int,
    reach: Reach,
    draft_model: Decoder | None = None,
    progress: bool = False,
) -> StageCosts:
    """Times every stage of every plan over exits at `layers` within `reach`, with rows of `context` tokens
    each."""
    window = max(reach.verify, reach.verify_all, reach.lookup + 1, 2 * reach.level + 1)
    rig = Rig(decoder, exits, context, batch_size, window)
    of_model = None if draft_model is None else Rig(draft_model, [], context, batch_size, 1)
    passes = dict(_passes(rig, of_model, sorted(layers), batch_size, reach))
    try:
        ms = medians(passes, decoder.device, samples=_SAMPLES, what="costs", progress=progress)
    finally:
        for one in (rig, of_model):
            if one is not None:
                one.close()
    return _costs_of(ms, len(context))


def _costs_of(ms: dict[Key, float], context_len: int) -> StageCosts:
    """Curves of what was timed."""
    points: dict[str, dict[Any, list[tuple[int, float]]]] = {}
    for (stage, where, width), value in sorted(ms.items(), key=lambda item: item[0][2]):
        points.setdefault(stage, {}).setdefault(where, []).append((width, value))
    curves = {
        stage: {where: Curve(*zip(*pairs, strict=True)) for where, pairs in of_stage.items()}
        for stage, of_stage in points.items()
    }

    def one(stage: str) -> Curve | None:
        return curves.get(stage, {}).get(None)

    ranks = one("several")
    if (likeliest := one("likeliest")) is not None and ranks is not None:
        ranks = Curve(
            ranks.widths,
            tuple(max(0.0, more - less) for more, less in zip(ranks.ms, likeliest.ms, strict=True)),
        )
    return StageCosts(
        context_len,
        draft=curves.get("draft", {}),
        fill=curves.get("fill", {}),
        check=curves.get("check", {}),
        verify=curves.get("verify", {}),
        plain=curves["plain"][None],
        ranks=ranks,
        probability=one("probability"),
        lookup=one("lookup"),
        draft_model=one("draft_model"),
        fill_model=one("fill_model"),
    )


def grid(most: int) -> list[int]:
    """Sizes from 1 to `most` at which to measure: powers of two, what lies halfway between them, and
    `most`."""
    sizes = {most}
    power = 1
    while power <= most:
        sizes |= {power, power * 3 // 2 if power > 1 else 1}
        power *= 2
    return sorted(size for size in sizes if 1 <= size <= most)


Passes = Iterator[tuple[Key, Callable[[], None]]]


def _passes(rig: Rig, of_model: Rig | None, layers: Sequence[int], batch_size: int, reach: Reach) -> Passes:
    """(stage, layers, width) with what runs it once."""

    def shapes(most: int) -> list[tuple[int, int]]:
        """(rows, positions of each row) from 1 to batch_size * most positions; none if there are no such
        passes."""
        return (
            [(rows, 1) for rows in grid(batch_size)]
            + [(batch_size, q_len) for q_len in grid(most) if q_len > 1]
            if most
            else []
        )

    for rows in grid(batch_size):
        yield ("plain", None, rows), rig.plain(rows)
        if reach.level > 1:
            yield ("likeliest", None, rows), rig.choose(rows, 1)
            yield ("several", None, rows), rig.choose(rows, reach.level)
        if reach.lookup:
            yield ("lookup", None, rows), rig.lookup(rows, reach.lookup)
        if of_model is not None:
            yield ("draft_model", None, rows), of_model.draft(rows, 1, None)
            yield ("fill_model", None, rows), of_model.fill(rows, 1, None)
    for layer in layers:
        for rows, q_len in shapes(reach.level):
            yield ("draft", layer, rows * q_len), rig.draft(rows, q_len, layer)
        for rows, q_len in shapes(reach.fill):
            yield ("fill", layer, rows * q_len), rig.fill(rows, q_len, layer)
    most_checked = max(reach.check, reach.check_all)
    for lo, most in ((0, reach.check_all), *((layer, reach.check) for layer in layers)):
        for hi in (layer for layer in layers if layer > max(lo, 1)):
            for rows, q_len in shapes(most):
                yield ("check", (lo, hi), rows * q_len), rig.check(rows, q_len, lo, hi)
    for lo, most in (
        (0, reach.verify_all),
        *((layer, max(reach.verify, reach.verify_all)) for layer in layers),
    ):
        for rows, q_len in shapes(most):
            yield ("verify", lo, rows * q_len), rig.verify(rows, q_len, lo)
    for rows, q_len in shapes(max(most_checked, reach.level, 1)):
        yield ("probability", None, rows * q_len), rig.probability(rows * q_len)
