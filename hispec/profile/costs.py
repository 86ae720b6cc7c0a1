"""What each stage costs here: passes of the round's own code over a real model and a real KV, timed at many widths.

A width is a number of positions that one pass computes, over all rows. Widths up to the number of rows are one position
each of so many rows, as in drafting; larger ones are several positions of every row, as in checking and verifying.
"""
from __future__ import annotations

import random
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from ee_models.decoder import Decoder
from ee_models.exits import Exit

from .rig import Rig

_SAMPLES = 5  # timings of each pass, of which the median counts


@dataclass(frozen=True)
class Curve:
    """Milliseconds of a pass by its width, straight between the widths that were measured."""

    widths: tuple[int, ...]
    ms: tuple[float, ...]

    def __call__(self, width: float) -> float:
        """Raises ValueError for a width outside of what was measured: nothing is guessed."""
        if not self.widths[0] <= width <= self.widths[-1]:
            raise ValueError(f"a pass over {width:.1f} positions was not measured; measured were {self.widths[0]} to {self.widths[-1]}")
        right = bisect_left(self.widths, width)
        if self.widths[right] == width:
            return self.ms[right]
        lo, hi = self.widths[right - 1], self.widths[right]
        return self.ms[right - 1] + (self.ms[right] - self.ms[right - 1]) * (width - lo) / (hi - lo)


@dataclass(frozen=True)
class StageCosts:
    """Milliseconds of every stage, by width.

    draft   {D: one draft pass: layers [0, D), the exit's logits, the choice of a token}
    fill    {D: the last draft pass of a cycle, whose logits nobody asks for}
    check   {(D, C): layers [D, C), the exit's logits, acceptance}
    verify  {C: layers [C, L), the model's logits, acceptance}
    plain   layers [0, L), the model's logits, the choice of a token
    """

    context_len: int
    draft: dict[int, Curve]
    fill: dict[int, Curve]
    check: dict[tuple[int, int], Curve]
    verify: dict[int, Curve]
    plain: Curve

    def as_dict(self) -> dict[str, Any]:
        """In plain types: of each stage its layers, `widths` and `ms`."""
        curves: dict[str, list[dict[str, Any]]] = {"draft": [], "fill": [], "check": [], "verify": [], "plain": []}
        for name, by_layers in (("draft", self.draft), ("fill", self.fill), ("check", self.check), ("verify", self.verify)):
            for layers, curve in by_layers.items():
                lo, hi = layers if isinstance(layers, tuple) else (0, layers) if name != "verify" else (layers, None)
                curves[name].append({"from_layer": lo, "to_layer": hi, "widths": list(curve.widths), "ms": list(curve.ms)})
        curves["plain"].append({"from_layer": 0, "to_layer": None, "widths": list(self.plain.widths), "ms": list(self.plain.ms)})
        return {"context_len": self.context_len, "samples": _SAMPLES, **curves}


def measure_costs(
    decoder: Decoder,
    layers: Sequence[int],
    exits: Sequence[Exit],
    context: Sequence[int],
    *,
    batch_size: int,
    max_drafts: int,
    max_window: int,
    progress: bool = False,
) -> StageCosts:
    """Times every stage of every plan over exits at `layers`, with rows of `context` tokens each."""
    rig = Rig(decoder, exits, context, batch_size, max_window)
    passes = dict(_passes(rig, sorted(layers), batch_size, max_drafts, max_window))
    sync = torch.cuda.synchronize if decoder.device.type == "cuda" else lambda: None
    try:
        ms = _time(passes, sync, progress)
    finally:
        rig.close()
    curves: dict[tuple[str, Any], dict[int, float]] = {}
    for (stage, where, width), value in ms.items():
        curves.setdefault((stage, where), {})[width] = value

    def of(stage: str) -> dict[Any, Curve]:
        points = {where: sorted(of_where.items()) for (name, where), of_where in curves.items() if name == stage}
        return {where: Curve(tuple(width for width, _ in pairs), tuple(value for _, value in pairs)) for where, pairs in points.items()}

    return StageCosts(len(context), of("draft"), of("fill"), of("check"), of("verify"), of("plain")[None])


def grid(most: int) -> list[int]:
    """Sizes from 1 to `most` at which to measure: powers of two, what lies halfway between them, and `most`."""
    sizes = {most}
    power = 1
    while power <= most:
        sizes |= {power, power * 3 // 2 if power > 1 else 1}
        power *= 2
    return sorted(size for size in sizes if size <= most)


Key = tuple[str, Any, int]


def _passes(rig: Rig, layers: Sequence[int], batch_size: int, max_drafts: int, max_window: int) -> Iterator[tuple[Key, Callable[[], None]]]:
    """(stage, layers, width) with what runs it once."""

    def shapes(most: int) -> list[tuple[int, int]]:
        """(rows, positions of each row) from 1 to batch_size * most positions."""
        return [(rows, 1) for rows in grid(batch_size)] + [(batch_size, q_len) for q_len in grid(most) if q_len > 1]

    for rows in grid(batch_size):
        yield ("plain", None, rows), rig.plain(rows)
        for draft in layers:
            yield ("draft", draft, rows), rig.draft(rows, draft)
            yield ("fill", draft, rows), rig.fill(rows, draft)
    for rows, q_len in shapes(max_drafts + 1):
        for draft in layers:
            for check in (layer for layer in layers if layer > draft):
                yield ("check", (draft, check), rows * q_len), rig.check(rows, q_len, draft, check)
    for rows, q_len in shapes(max_window):
        for top in layers:
            yield ("verify", top, rows * q_len), rig.verify(rows, q_len, top)


def _time(passes: dict[Key, Callable[[], None]], sync: Callable[[], None], progress: bool) -> dict[Key, float]:
    """Medians in milliseconds. All passes take turns, so that a machine that slows down slows all of them; in another order each
    time, so that none always finds in the caches what the one before it left there."""
    samples: dict[Key, list[float]] = {key: [] for key in passes}
    order, shuffled = list(passes), random.Random(0)
    with tqdm(total=(_SAMPLES + 1) * len(passes), desc="costs", unit="pass", disable=not progress, file=sys.stderr, dynamic_ncols=True) as bar:
        for sample in range(_SAMPLES + 1):
            shuffled.shuffle(order)
            for key in order:
                sync()
                started = time.perf_counter()
                passes[key]()
                sync()
                if sample:  # the first is a warm-up
                    samples[key].append(1e3 * (time.perf_counter() - started))
                bar.update()
    return {key: statistics.median(values) for key, values in samples.items()}
