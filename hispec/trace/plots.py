"""The picture of a trace: plans, speed, acceptance and load on one axis of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.plots import make_figure, save_figure
from .records import PLAIN_NAME, Rounds, Trace
from .summary import acceptance, tokens_per_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Points of the speed, and of a route's acceptance: each is a mean over as many lines of the trace as it
# takes.
_MOST_STEPS, _MOST_DOTS = 400, 100
_IDLE_SHARE = 0.03  # of the span, without rounds, that ends a line
_LEAST_SHARE = 0.06  # of the span, for a stretch of one plan to be named
_PLAIN_HEIGHT = 0.5  # of K = 0
_GREY = "0.6"
_STYLES: dict[str, dict[str, Any]] = {
    "draft kept: measured": {"linestyle": "none", "marker": "o"},
    "draft kept: estimated": {"linestyle": "-"},
    "tentative kept: measured": {"linestyle": "none", "marker": "o", "fillstyle": "none"},
    "tentative kept: estimated": {"linestyle": "--"},
}


def draw_trace(trace: Trace, path: Path) -> None:
    """Draws the trace into a PNG file. Raises OSError if it can't be written."""
    figure = make_figure(11, 9)
    plans, speed, kept, load = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 3, 2))
    colors = _colors(trace)
    _draw_plans(plans, trace, colors)
    _draw_speed(speed, trace)
    _draw_acceptance(kept, trace, colors)
    _draw_load(load, trace.rounds)
    for axes in (plans, speed, kept, load):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    if plans.get_legend_handles_labels()[1]:  # beside the panes: there may be many routes
        plans.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    speed.legend(fontsize="xx-small", loc="lower left", ncols=3)
    load.set_xlabel("seconds since the engine started")
    plans.set_title(
        f"{trace.header.model}, policy {trace.header.policy}"
        + ("" if trace.rounds else ": no round was recorded")
    )
    save_figure(figure, path, dpi=130)


def _colors(trace: Trace) -> dict[str, str]:
    """{route: colour}; plain decoding is grey."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    palette = colormaps["tab10" if len(trace.routes) <= 10 else "tab20"]
    return {PLAIN_NAME: _GREY} | {
        name: to_hex(palette(at % palette.N)) for at, name in enumerate(trace.routes)
    }


def spans(rounds: Sequence[Rounds]) -> list[tuple[float, float]]:
    """When the rounds of each line began and ended: as long before its end as they took; those without a time
    since the line before."""
    found: list[tuple[float, float]] = []
    before = 0.0 if not rounds or rounds[0].seconds is None else rounds[0].t - rounds[0].seconds
    for line in rounds:
        start = before if line.seconds is None else max(line.t - line.seconds, before)
        found.append((min(start, line.t), line.t))
        before = line.t
    return found


def _draw_plans(axes: Axes, trace: Trace, colors: Mapping[str, str]) -> None:
    """K as height in the route's colour; long stretches have K and R in words."""
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import MaxNLocator

    stretches: list[tuple[Rounds, float, float]] = []
    for line, (start, end) in zip(trace.rounds, spans(trace.rounds), strict=True):
        first, begun, ended = stretches[-1] if stretches else (line, start, -math.inf)
        if first.plan == line.plan and start - ended < max(end - start, 0.1):
            stretches[-1] = first, begun, end
        else:
            stretches.append((line, start, end))
    for name in dict.fromkeys(line.name for line, _, _ in stretches):
        corners = [
            [(start, 0.0), (start, height), (end, height), (end, 0.0)]
            for line, start, end in stretches
            if line.name == name
            for height in [line.num_drafts or _PLAIN_HEIGHT]
        ]
        look: dict[str, Any] = {"facecolor": colors[name], "edgecolor": "none", "alpha": 0.8, "label": name}
        axes.add_collection(PolyCollection(corners, **look))
    span = max((end for _, _, end in stretches), default=0.0)
    for line, start, end in stretches:
        if end - start > _LEAST_SHARE * span and line.num_drafts:
            text = f"K={line.num_drafts}" + (f" R={line.num_checks}" if line.has_check else "")
            axes.text((start + end) / 2, line.num_drafts, text, ha="center", va="bottom", fontsize="xx-small")
    highest = max((line.num_drafts for line, _, _ in stretches), default=0)
    if probes := [decision.t for decision in trace.decisions if decision.is_probe]:
        height = (highest + 1) * 1.08
        axes.plot(probes, [height] * len(probes), "|", color="black", markersize=5, label="probe")
    axes.autoscale_view()
    axes.set_ylim(top=(highest + 1) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("plan: drafts K")


def _draw_speed(axes: Axes, trace: Trace) -> None:
    timed = [line for line in trace.rounds if line.seconds]
    times: list[float] = []
    speeds: list[float] = []
    for part in _parts(timed, _MOST_STEPS):
        first, last = spans(part)[0][0], part[-1].t
        if times and first - times[-1] > _IDLE_SHARE * timed[-1].t:
            times.append(first)
            speeds.append(math.nan)
        times += [first, last]
        speeds += [tokens_per_s(part) or 0.0] * 2
    axes.plot(times, speeds, color="black", linewidth=1.0, label="measured")
    styles: list[tuple[bool, str, dict[str, Any]]] = [
        (False, "predicted", {"drawstyle": "steps-post", "linewidth": 0.9}),
        (True, "predicted of a probe", {"linestyle": "none", "marker": "x", "markersize": 4}),
    ]
    for is_probe, label, look in styles:
        points = [(one.t, one.predicted) for one in trace.decisions if one.is_probe == is_probe]
        if known := _known(points):
            axes.plot(*zip(*known, strict=True), color="C1", label=label, **look)
    axes.set_ylabel("tokens/s in rounds")


def _draw_acceptance(axes: Axes, trace: Trace, colors: Mapping[str, str]) -> None:
    """Measured and estimated acceptance of each route that ran, in its colour."""
    for name in dict.fromkeys(line.name for line in trace.rounds if line.drafted):
        shares = [
            (part[len(part) // 2].t, acceptance(part))
            for part in _parts([line for line in trace.rounds if line.name == name], _MOST_DOTS)
        ]
        for key, face in (("draft_accepted", colors[name]), ("tentative_accepted", "none")):
            if points := _known([(at, share[key]) for at, share in shares]):
                look: dict[str, Any] = {"facecolor": face, "edgecolor": colors[name], "linewidth": 0.7}
                times, values = zip(*points, strict=True)
                axes.scatter(times, values, s=8, alpha=0.6, **look)
        for key, style in (("draft_accepted", "-"), ("tentative_accepted", "--")):
            estimates = [(one.t, one.acceptance.get(name, {}).get(key)) for one in trace.decisions]
            if points := _known(estimates):
                look = {"linestyle": style, "linewidth": 0.8, "color": colors[name]}
                axes.plot(*zip(*points, strict=True), alpha=0.7, **look)
    for label, look in _STYLES.items():
        axes.plot([], [], color=_GREY, markersize=3, linewidth=0.8, label=label, **look)
    axes.legend(fontsize="xx-small", loc="lower left", ncols=4)
    axes.set_ylim(0, 1.03)
    axes.set_ylabel("share of tokens kept")


def _known(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(at, value) for at, value in points if value is not None]


def _draw_load(axes: Axes, rounds: Sequence[Rounds]) -> None:
    times = [line.t for line in rounds]
    axes.step(times, [line.rows for line in rounds], where="pre", color="C0", linewidth=1.0)
    axes.set_ylabel("rows", color="C0")
    other = axes.twinx()
    other.step(times, [line.context_tokens for line in rounds], where="pre", color="C3", linewidth=0.8)
    other.set_ylabel("context tokens", color="C3")
    other.set_ylim(bottom=0)


def _parts(rounds: Sequence[Rounds], most: int) -> list[Sequence[Rounds]]:
    """Consecutive lines, as many together as leaves `most` parts."""
    size = max(1, -(-len(rounds) // most))
    return [rounds[at : at + size] for at in range(0, len(rounds), size)]
