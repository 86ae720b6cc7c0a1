"""The picture of a trace: plans, speed, acceptance and load on one axis of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.plots import make_figure, save_figure
from .lines import FLUSH_S
from .records import PLAIN_NAME, Rounds, Trace
from .summary import acceptance, tokens_per_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Points of the speed, and of a route's acceptance: each is a mean over as many lines of the trace as it
# takes.
_MOST_STEPS, _MOST_DOTS = 400, 100
_IDLE_SHARE = 0.01  # of the span, without rounds, that ends a line
_LEAST_SHARE = 0.06  # of the span, for a stretch of one plan to be named
_PLAIN_HEIGHT = 0.5  # of K = 0
_GREY = "#999999"
# Matplotlib's own colours, without the grey one; routes beyond them differ by marker and hatch.
_NAMES = ("blue", "orange", "green", "red", "purple", "brown", "pink", "olive", "cyan")
_COLORS = [f"tab:{name}" for name in _NAMES]
_HATCHES = ("//", "..", "xx", "--", "++", "oo")
_STYLES: dict[str, dict[str, Any]] = {
    "draft kept: measured": {"linestyle": "none", "marker": "o"},
    "draft kept: estimated": {"linestyle": "-"},
    "tentative kept: measured": {"linestyle": "none", "marker": "o", "fillstyle": "none"},
    "tentative kept: estimated": {"linestyle": "--"},
}


@dataclass(frozen=True)
class Look:
    """How a route is drawn: never like another one, nor like plain decoding."""

    color: str
    marker: str | tuple[int, int, int] = "o"
    hatch: str = ""


def draw_trace(trace: Trace, path: Path) -> None:
    """Draws the trace into a PNG file. Raises OSError if it can't be written."""
    save_figure(make_picture(trace), path, dpi=130)


def make_picture(trace: Trace) -> Figure:
    figure = make_figure(11, 10)
    panes = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 3, 2), gridspec_kw={"hspace": 0.28})
    plans, speed, kept, load = panes
    looks = make_looks(trace.routes)
    stretches = find_stretches(trace.rounds)
    _draw_plans(plans, trace, stretches, looks)
    _draw_speed(speed, trace, stretches)
    _draw_acceptance(kept, trace, looks)
    _draw_load(load, stretches)
    for axes in (plans, speed, kept, load):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    if plans.get_legend_handles_labels()[1]:  # beside the panes: there may be many routes
        plans.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    for axes in (speed, kept):
        _put_legend_above(axes)
    load.set_xlabel("seconds since the engine started")
    plans.set_title(
        f"{trace.header.model}, policy {trace.header.policy}"
        + ("" if trace.rounds else ": no round was recorded")
    )
    return figure


def make_looks(routes: Sequence[str]) -> dict[str, Look]:
    """By name of the route, and of plain decoding."""
    looks = {PLAIN_NAME: Look(_GREY)}
    for at, name in enumerate(routes):
        lap, color = divmod(at, len(_COLORS))
        if not lap:
            looks[name] = Look(_COLORS[color])
        else:  # a regular polygon with another number of corners, another hatch or a denser one
            dense, hatch = divmod(lap - 1, len(_HATCHES))
            looks[name] = Look(_COLORS[color], (lap + 2, 0, 0), _HATCHES[hatch] * (dense + 1))
    return looks


def _put_legend_above(axes: Axes) -> None:
    """Where it covers no data."""
    axes.legend(fontsize="xx-small", loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, frameon=False)


def spans(rounds: Sequence[Rounds]) -> list[tuple[float, float]]:
    """When the rounds of each line began and ended: as long before its end as they took. Those without a time
    since the line before, but no longer than a line may last."""
    found: list[tuple[float, float]] = []
    before = 0.0
    for line in rounds:
        start = max(line.t - (FLUSH_S if line.seconds is None else line.seconds), before)
        found.append((min(start, line.t), line.t))
        before = line.t
    return found


def find_stretches(rounds: Sequence[Rounds]) -> list[list[Rounds]]:
    """Consecutive lines without a gap between their times that could be seen in the picture."""
    found: list[list[Rounds]] = []
    times = spans(rounds)
    least = _IDLE_SHARE * (times[-1][1] - times[0][0]) if times else 0.0
    ended = -math.inf
    for line, (start, end) in zip(rounds, times, strict=True):
        if start - ended > least:
            found.append([])
        found[-1].append(line)
        ended = end
    return found


def find_parts(stretches: Sequence[Sequence[Rounds]]) -> list[tuple[Rounds, float, float]]:
    """Lines of one plan, without a pause: the first of them, when they began, and when they ended."""
    parts: list[tuple[Rounds, float, float]] = []
    for stretch in stretches:
        timed = zip(stretch, spans(stretch), strict=True)
        for _, group in groupby(timed, key=lambda each: each[0].plan):
            (line, (start, end)), *others = group
            parts.append((line, start, others[-1][1][1] if others else end))
    return parts


def _draw_plans(
    axes: Axes, trace: Trace, stretches: Sequence[Sequence[Rounds]], looks: Mapping[str, Look]
) -> None:
    """K as height in the route's colour; long stretches have K and R in words."""
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import MaxNLocator

    parts = find_parts(stretches)
    for name in dict.fromkeys(line.name for line, _, _ in parts):
        corners = [
            [(start, 0.0), (start, height), (end, height), (end, 0.0)]
            for line, start, end in parts
            if line.name == name
            for height in [line.num_drafts or _PLAIN_HEIGHT]
        ]
        look = looks[name]
        fill: dict[str, Any] = {"facecolor": look.color, "hatch": look.hatch, "edgecolor": "white"}
        axes.add_collection(PolyCollection(corners, alpha=0.8, label=name, linewidth=0.0, **fill))
    span = parts[-1][2] - parts[0][1] if parts else 0.0
    for line, start, end in parts:
        if end - start > _LEAST_SHARE * span and line.num_drafts:
            text = f"K={line.num_drafts}" + (f" R={line.num_checks}" if line.has_check else "")
            axes.text((start + end) / 2, line.num_drafts, text, ha="center", va="bottom", fontsize="xx-small")
    highest = max((line.num_drafts for line, _, _ in parts), default=0)
    if probes := [decision.t for decision in trace.decisions if decision.is_probe]:
        height = (highest + 1) * 1.08
        axes.plot(probes, [height] * len(probes), "|", color="black", markersize=5, label="probe")
    axes.autoscale_view()
    axes.set_ylim(top=(highest + 1) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("plan: drafts K")


def trace_speed(rounds: Sequence[Rounds]) -> tuple[list[float], list[float]]:
    """The corners of the line of measured speeds: times and tokens/s, level from one mean to the next, with a
    gap (nan) where no round was timed for long."""
    timed = find_stretches([line for line in rounds if line.seconds])
    most = max(1, _MOST_STEPS // max(len(timed), 1))
    times: list[float] = []
    speeds: list[float] = []
    for stretch in timed:
        if times:
            times.append(times[-1])
            speeds.append(math.nan)
        for at, part in enumerate(_parts(stretch, most)):
            start, speed = spans(part)[0][0], tokens_per_s(part) or 0.0
            if at:  # level up to here
                start = max(start, times[-1])
                times.append(start)
                speeds.append(speeds[-1])
            times += [start, part[-1].t]
            speeds += [speed] * 2
    return times, speeds


def _draw_speed(axes: Axes, trace: Trace, stretches: Sequence[Sequence[Rounds]]) -> None:
    axes.plot(*trace_speed(trace.rounds), color="black", linewidth=1.0, label="measured")
    styles: list[tuple[bool, str, dict[str, Any]]] = [
        (False, "predicted", {"drawstyle": "steps-post", "linewidth": 0.9}),
        (True, "predicted of a probe", {"linestyle": "none", "marker": "x", "markersize": 4}),
    ]
    for is_probe, label, look in styles:
        points = [(one.t, one.predicted) for one in trace.decisions if one.is_probe == is_probe]
        if known := _known(points):
            if not is_probe:  # it ends where the rounds do
                ends = [(part[-1].t, math.nan) for part in stretches]
                known = sorted(known + ends)
            axes.plot(*zip(*known, strict=True), color="C1", label=label, **look)
    axes.set_ylabel("tokens/s in rounds")


def _draw_acceptance(axes: Axes, trace: Trace, looks: Mapping[str, Look]) -> None:
    """Measured and estimated shares of each route that ran, in its colour and marker."""
    kinds = ("draft_kept", "-", True), ("tentative_accepted", "--", False)
    for name in dict.fromkeys(line.name for line in trace.rounds if line.drafted):
        look = looks[name]
        parts = _parts([line for line in trace.rounds if line.name == name], _MOST_DOTS)
        measured = [(part[len(part) // 2].t, acceptance(part)) for part in parts]
        for key, line_style, is_filled in kinds:
            if points := _known([(at, share[key]) for at, share in measured]):
                face = look.color if is_filled else "none"
                dots: dict[str, Any] = {"facecolor": face, "edgecolor": look.color, "marker": look.marker}
                times, values = zip(*points, strict=True)
                axes.scatter(times, values, s=8, alpha=0.6, linewidth=0.7, **dots)
            estimates = [(one.t, one.acceptance.get(name, {}).get(key)) for one in trace.decisions]
            if points := _known(estimates):
                times, values = zip(*points, strict=True)
                line: dict[str, Any] = {"linestyle": line_style, "color": look.color}
                axes.plot(times, values, linewidth=0.8, alpha=0.7, drawstyle="steps-post", **line)
    for label, style in _STYLES.items():
        axes.plot([], [], color="black", markersize=3, linewidth=0.8, label=label, **style)
    axes.set_ylim(0, 1.03)
    axes.set_ylabel("share of tokens kept")


def _known(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(at, value) for at, value in points if value is not None]


def _draw_load(axes: Axes, stretches: Sequence[Sequence[Rounds]]) -> None:
    other = axes.twinx()
    for part in stretches:
        times = [spans(part)[0][0], *(line.t for line in part)]
        for pane, color, name in ((axes, "C0", "rows"), (other, "C3", "context_tokens")):
            values = [getattr(line, name) for line in part]
            pane.step(times, [values[0], *values], where="pre", color=color, linewidth=0.9)
    axes.set_ylabel("rows", color="C0")
    other.set_ylabel("context tokens", color="C3")
    other.set_ylim(bottom=0)


def _parts(rounds: Sequence[Rounds], most: int) -> list[Sequence[Rounds]]:
    """Consecutive lines, as many together as leaves `most` parts."""
    size = max(1, -(-len(rounds) // most))
    return [rounds[at : at + size] for at in range(0, len(rounds), size)]
