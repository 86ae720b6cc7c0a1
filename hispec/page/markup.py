"""HTML of elements: whatever is not made here is text, and is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

WIDTH, HEIGHT = 900.0, 160.0  # of a chart's plane, in units of its own
_TOP, _LEFT = 14.0, 4.0  # above it, and left of it


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: object) -> Html:
    """<name attributes>children</name>. An attribute's leading underscore is dropped, others are hyphens."""
    given = "".join(
        f' {key.lstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items()
    )
    inside = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{name}{given}>{inside}</{name}>")


def join(parts: Iterable[Html]) -> Html:
    return Html("\n".join(parts))


def make_document(title: str, body: Html) -> str:
    """The whole page, by template.html."""
    template = Template((files(__package__) / "template.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body=body)


def paragraph(text: str, kind: str = "note") -> Html:
    return element("p", text, _class=kind)


def missing(what: str) -> Html:
    """What the file does not hold, and where it would be found."""
    return paragraph(f"Not in this file: {what}.", "missing")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """Cells may be Html."""
    head = element("tr", *(element("th", title) for title in titles))
    body = [element("tr", *(_cell(cell) for cell in row)) for row in rows]
    return element("div", element("table", head, *body), _class="wide")


def _cell(cell: str) -> Html:
    return element("td", cell, _class="bar") if isinstance(cell, _Bar) else element("td", cell)


class _Bar(Html):
    __slots__ = ()


def bar(share: float | None) -> Html:
    """A bar of this share of its column; nothing for None."""
    if share is None:
        return Html("")
    return _Bar(element("div", style=f"width: {100 * min(max(share, 0.0), 1.0):.2f}%"))


def histogram(title: str, counts: Sequence[int]) -> Html:
    """counts[i] of the number i: those that came, with their shares."""
    total, most = sum(counts), max(counts, default=0)
    rows = [
        (str(number), str(count), f"{count / total:.1%}", bar(count / most))
        for number, count in enumerate(counts)
        if count
    ]
    return table((title, "rounds", "share", ""), rows)


def times(title: str, seconds: Mapping[str, float]) -> Html:
    """Seconds by name, and their shares of all of them."""
    total = sum(seconds.values())
    rows = [
        (name, f"{each:.2f}", f"{share:.1%}", bar(share))
        for name, each in seconds.items()
        for share in [each / total if total else 0.0]
    ]
    return table((title, "seconds", "share", ""), rows)


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """(name, CSS color) of each."""
    return element(
        "p",
        *(
            element("span", element("span", _class="swatch", style=f"background: {color}"), name)
            for name, color in entries
        ),
        _class="legend",
    )


def chart(caption: str, top: str, span: tuple[float, float], marks: Iterable[Html]) -> Html:
    """A plane of marks over time. top: what stands at its upper edge; span: seconds, from left to right."""
    base = _TOP + HEIGHT
    drawn = [element("line", x1=_LEFT, y1=y, x2=_LEFT + WIDTH, y2=y, _class="axis") for y in (_TOP, base)] + [
        element("text", top, x=_LEFT, y=_TOP - 3),
        element("text", f"{span[0]:.1f} s", x=_LEFT, y=base + 14),
        element("text", f"{span[1]:.1f} s", x=_LEFT + WIDTH, y=base + 14, text_anchor="end"),
    ]
    box = f"0 0 {WIDTH + 2 * _LEFT:g} {base + 20:g}"
    return element(
        "figure",
        element("figcaption", caption),
        element("svg", *marks, *drawn, viewBox=box, role="img", aria_label=caption),
    )


def line(points: Iterable[tuple[float, float]], span: tuple[float, float], most: float, kind: str) -> Html:
    """Points (seconds, value up to `most`), joined; a nan begins a new line."""
    steps, is_new = [], True
    for at, value in points:
        if math.isnan(value):
            is_new = True
            continue
        x, y = place(at, span), _TOP + HEIGHT * (1 - value / most if most else 1.0)
        steps.append(f"{'M' if is_new else 'L'}{x:.1f} {y:.1f}")
        is_new = False
    return element("path", d=" ".join(steps), _class=kind)


def box(start: float, end: float, share: float, span: tuple[float, float], color: str, title: str) -> Html:
    """From start to end, in seconds, as high as this share of the plane."""
    x, height = place(start, span), HEIGHT * share
    width = max(place(end, span) - x, 0.5)
    sizes = {"x": x, "y": _TOP + HEIGHT - height, "width": width, "height": height}
    rounded = {name: f"{value:.1f}" for name, value in sizes.items()}
    return element("rect", element("title", title), **rounded, style=f"fill: {color}")


def place(at: float, span: tuple[float, float]) -> float:
    """Where a time lies on the axis."""
    return _LEFT + WIDTH * ((at - span[0]) / (span[1] - span[0]) if span[1] > span[0] else 0.0)
