"""A trace on the page: the summary of `hispec report`, and charts over time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..trace.plots import find_parts, find_stretches, spans, trace_speed
from ..trace.records import PLAIN_NAME, Decision, Trace
from ..trace.summary import summarize
from ..utils.console import number, percent
from .markup import (
    Html,
    bar,
    box,
    chart,
    element,
    histogram,
    join,
    legend,
    line,
    missing,
    paragraph,
    table,
    times,
)

_NUM_COLORS = 8
_MOST_DECISIONS = 200  # in the table: the last ones


def trace_section(trace: Trace) -> Html:
    summary = summarize(trace)
    parts = [
        paragraph(
            f"{summary['model']}, policy {summary['policy']}: {summary['rounds']} rounds in"
            f" {summary['round_s']:.1f} s of {summary['span_s']:.1f} s, {summary['tokens']} tokens,"
            f" {summary['requests']['finished']} requests finished."
        )
    ]
    if summary["is_cut"]:
        parts.append(paragraph("The last line was cut off: the engine did not close the trace."))
    parts += [element("h3", "Where time goes, by plan"), _plans(summary)]
    parts += [element("h3", "Where time goes, by stage"), _stages(summary["stages"])]
    parts += [element("h3", "Acceptance by tier"), _tiers(summary["plans"])]
    parts += [element("h3", "Acceptance by place in the draft"), _places(summary["accepted_by_place"])]
    parts += [element("h3", "Accepted lengths"), _lengths(summary["accept_len_histogram"])]
    parts += [element("h3", "Layer passes"), missing("layer passes per token (hispec bench --json FILE)")]
    parts += [element("h3", "Over time"), _over_time(trace)]
    parts += [element("h3", "Decisions of the controller"), _decisions(trace.decisions)]
    return join(parts)


def _plans(summary: Mapping[str, Any]) -> Html:
    titles = ("plan", "rounds", "seconds", "tokens/s", "share of seconds", "")
    return table(
        titles,
        [
            (
                name,
                str(plan["rounds"]),
                number(plan["seconds"]),
                number(plan["tokens_per_s"], 1),
                percent(plan["seconds_share"]),
                bar(plan["seconds_share"]),
            )
            for name, plan in summary["plans"].items()
        ],
    )


def _stages(seconds: Mapping[str, float] | None) -> Html:
    if seconds is None:
        return missing("time by stage, which only rounds on a CPU tell")
    return times("of rounds", seconds)


def _tiers(plans: Mapping[str, Mapping[str, Any]]) -> Html:
    names = (("draft_kept", "draft kept"), ("tentative_accepted", "tentative kept"))
    rows = [
        (plan, name, percent(values[key]), bar(values[key]))
        for plan, values in plans.items()
        for key, name in names
        if values[key] is not None
    ]
    return table(("plan", "tier", "share", ""), rows) if rows else missing("drafts: decoding was plain")


def _places(by_route: Mapping[str, Sequence[Mapping[str, int]]]) -> Html:
    rows = [
        (route, str(at), str(place["judged"]), percent(share), bar(share))
        for route, places in by_route.items()
        for at, place in enumerate(places, start=1)
        for share in [place["kept"] / place["judged"]]
    ]
    if not rows:
        return missing("drafts of requests that ended")
    return join(
        (
            paragraph("Drafts at a place whose predecessors were all kept; of requests that ended."),
            table(("route", "place", "judged", "kept", ""), rows),
        )
    )


def _lengths(counts: Sequence[int]) -> Html:
    if not sum(counts):
        return missing("rounds of requests that ended")
    return histogram("tokens committed by a row's round", counts)


def _over_time(trace: Trace) -> Html:
    if not trace.rounds:
        return missing("rounds")
    times = spans(trace.rounds)
    span = (times[0][0], times[-1][1])
    colors = _colors(dict.fromkeys(one.name for one in trace.rounds))
    most = max(one.num_drafts for one in trace.rounds) or 1
    marks = []
    for first, start, end in find_parts(find_stretches(trace.rounds)):
        share = first.num_drafts / most if first.route is not None else 0.5 / (most + 1)
        title = f"{first.plan}, {start:.1f} to {end:.1f} s"
        marks.append(box(start, end, share, span, colors[first.name], title))
    parts = [
        chart("The plan: drafts K as height, the route as colour.", f"K = {most}", span, marks),
        legend(colors.items()),
    ]
    moments, speeds = trace_speed(trace.rounds)
    predicted = [
        (one.t, one.predicted) for one in trace.decisions if one.predicted is not None and not one.is_probe
    ]
    highest = max(
        [speed for speed in speeds if not math.isnan(speed)] + [value for _, value in predicted] + [0]
    )
    lines = [line(zip(moments, speeds, strict=True), span, highest, "measured")]
    inside = [(min(max(at, span[0]), span[1]), value) for at, value in predicted]
    lines.append(line(_steps(inside, span[1]), span, highest, "predicted"))
    caption = "Tokens per second in rounds: measured, and predicted for the chosen plan."
    parts.append(chart(caption, f"{highest:.1f} tokens/s", span, lines))
    parts.append(legend((("measured", "var(--text)"), ("predicted", "var(--c1)"))))
    return join(parts)


def _colors(names: Collection[str]) -> dict[str, str]:
    """By route, in their order: those beyond _NUM_COLORS have the same ones, with more and more of the text's
    in them."""
    found = {PLAIN_NAME: "var(--plain)"} if PLAIN_NAME in names else {}
    for at, name in enumerate(name for name in names if name != PLAIN_NAME):
        lap, color = divmod(at, _NUM_COLORS)
        pure = f"var(--c{color})"
        found[name] = f"color-mix(in srgb, {pure} {100 // (lap + 1)}%, var(--text))" if lap else pure
    return found


def _steps(points: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Level from each point to the next."""
    found = []
    for at, (time, value) in enumerate(points):
        found += [(time, value), (points[at + 1][0] if at + 1 < len(points) else max(end, time), value)]
    return found


def _decisions(decisions: Sequence[Decision]) -> Html:
    if not decisions:
        return missing("decisions: the plan was fixed")
    rows = [
        (
            f"{one.t:.1f}",
            one.plan + (" (probe)" if one.is_probe else ""),
            one.reason,
            number(one.predicted, 1),
            number(one.measured, 1),
        )
        for one in decisions[-_MOST_DECISIONS:]
    ]
    shown = f"{len(decisions)} decisions"
    if len(rows) < len(decisions):
        shown += f", of which the last {len(rows)} are listed"
    titles = ("seconds", "plan", "reason", "predicted tokens/s", "measured before")
    return element("details", element("summary", shown), table(titles, rows))
