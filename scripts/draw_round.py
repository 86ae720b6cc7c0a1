"""Draws docs/images/round.svg: one round over one KV cache and one hidden-state buffer.

    python scripts/draw_round.py

Which pass computes which cell follows from the sizes and outcomes below by the rules of
hispec/decoding/round.py, so the picture cannot disagree with itself. tests/test_docs.py checks that the
committed file is what this script writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "round.svg"

D, C, K, R, L = 4, 15, 2, 2, 30
KEPT = (1, 2)  # drafts that each check keeps
ACCEPTED = 3  # tentative tokens that verify keeps
TIERS = {"draft": (0, D), "check": (D, C), "verify": (C, L)}

COLUMNS = R * (K + 1)
LEFT, COLUMN, GAP, OLD = 250, 112, 10, 34  # widths: labels, a column, between columns, an overwritten cell
LAYER, BUFFER, TOP, ROW = 11, 40, 122, 31  # heights: a layer, a buffer band, above the layers, a table row
WIDTH = LEFT + COLUMNS * (COLUMN + GAP) + 20
INK, MUTED, LINE = "#1f2328", "#57606a", "#8c959f"
FILL = {"draft": "#cfe3ff", "check": "#ffe2ad", "verify": "#cdebd2"}
STROKE = {"draft": "#2f6fd0", "check": "#b36b00", "verify": "#2b8a3e"}


@dataclass(frozen=True)
class Pass:
    """One forward pass: its place in the round's order, its tier, and the window columns it computes."""

    number: int
    tier: str
    columns: range


def make_passes() -> list[Pass]:
    """All passes of the round, in order."""
    passes: list[Pass] = []
    offset = 0

    def add(tier: str, start: int, end: int) -> None:
        passes.append(Pass(len(passes) + 1, tier, range(start, end)))

    for kept in KEPT:
        for column in range(offset, offset + K + 1):
            add("draft", column, column + 1)
        add("check", offset, offset + K + 1)
        offset += kept + 1
    add("verify", 0, offset)
    return passes


def fate_of(each: Pass, column: int, passes: list[Pass]) -> str:
    """The mark of a cell that this pass computes: "check" if the check dropped its token, so that a later
    pass of the round computes the cell again; "verify" if verify dropped it, so that the next round does; ""
    if it stays."""
    if any(later.tier == each.tier and column in later.columns for later in passes[each.number :]):
        return "check"
    return "verify" if column > ACCEPTED else ""


def make_table() -> list[tuple[str, dict[int, str], str]]:
    """What becomes of the tokens: (label, text by column, class of the cells) for each line of the table."""
    rows: list[tuple[str, dict[int, str], str]] = [("before the round", {0: "xₙ"}, "done")]
    tentative: dict[int, str] = {}
    offset = drafted = 0
    for cycle, kept in enumerate(KEPT, 1):
        drafts = {offset + 1 + i: f"d{drafted + 1 + i}" for i in range(K)}
        drafted += K
        own = offset + kept + 1
        is_bonus = kept == K
        rows.append((f"cycle {cycle}: drafted", drafts, "draft"))
        verdict = {column: f"{token} ✓" for column, token in drafts.items() if column < own}
        verdict[own] = f"c{cycle} (bonus)" if is_bonus else f"{drafts[own]} ✗ → c{cycle}"
        rows.append((f"cycle {cycle}: tentative after check", verdict, "check"))
        tentative |= {column: drafts[column] for column in drafts if column < own} | {own: f"c{cycle}"}
        offset = own
    last = ACCEPTED + 1
    verdict = {column: f"{token} ✓" for column, token in tentative.items() if column < last}
    verdict[last] = f"{tentative[last]} ✗ → v"
    verdict |= {column: f"{tentative[column]} dropped" for column in tentative if column > last}
    rows.append(("accepted by verify", verdict, "verify"))
    committed = {column: tentative[column] for column in range(1, last)} | {last: "v"}
    rows.append((f"commit: {last} tokens", committed, "done"))
    return rows


def left_of(column: int) -> int:
    return LEFT + column * (COLUMN + GAP)


def top_of(tier: str) -> int:
    """y at which the tier's layers begin; a buffer band lies before those of check and verify."""
    return TOP + TIERS[tier][0] * LAYER + BUFFER * list(TIERS).index(tier)


def height_of(tier: str) -> int:
    return (TIERS[tier][1] - TIERS[tier][0]) * LAYER


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, style: str, radius: int = 3) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" {style}/>'


def draw_cells(passes: list[Pass]) -> Iterator[str]:
    """A cell per (tier, column) and pass, hatched if its token was dropped. A pass whose cell a later pass of
    the tier writes again has a narrow one beside the later one's."""
    for each in passes:
        y, height = top_of(each.tier), height_of(each.tier)
        edges: list[float] = []
        for column in each.columns:
            others = [other for other in passes if other.tier == each.tier and column in other.columns]
            x, width = left_of(column), COLUMN
            fate = fate_of(each, column, passes)
            if fate == "check":
                width = OLD
            elif len(others) > 1:
                x, width = x + OLD + 4, COLUMN - OLD - 4
            edges += [x, x + width]
            yield box(x, y, width, height, f'fill="{FILL[each.tier]}"')
            if fate:
                yield box(x, y, width, height, f'fill="url(#dropped-{fate})"')
            for layer in range(1, TIERS[each.tier][1] - TIERS[each.tier][0]):
                line = y + layer * LAYER
                style = f'stroke="{STROKE[each.tier]}" stroke-opacity="0.18"'
                yield f'<path d="M{x:g} {line}h{width:g}" {style}/>'
            middle = x + width / 2, y + height / 2
            yield f'<circle cx="{middle[0]:g}" cy="{middle[1]:g}" r="13" fill="#ffffff" stroke="{LINE}"/>'
            yield text(middle[0], middle[1] + 5, str(each.number), "number", "middle")
        outline = f'fill="none" stroke="{STROKE[each.tier]}" stroke-width="2"'
        yield box(edges[0], y, edges[-1] - edges[0], height, outline)


def draw_unused(passes: list[Pass]) -> Iterator[str]:
    """Cells that no pass of the round computes."""
    for tier in TIERS:
        used = {column for each in passes if each.tier == tier for column in each.columns}
        for column in sorted(set(range(COLUMNS)) - used):
            style = f'fill="none" stroke="{LINE}" stroke-dasharray="4 4"'
            yield box(left_of(column), top_of(tier), COLUMN, height_of(tier), style)


def draw_buffer(passes: list[Pass]) -> Iterator[str]:
    """The two parts of the hidden-state buffer, between the tiers, and what is read from and written to
    them."""
    for tier, layer in (("check", D), ("verify", C)):
        before = "draft" if tier == "check" else "check"
        y = top_of(tier) - BUFFER
        yield text(LEFT - 16, y + 18, f"hidden states after layer {layer}", "label strong", "end")
        yield text(LEFT - 16, y + 33, f"left by {before}, resumed by {tier}", "small", "end")
        cells = [(column, each) for each in passes if each.tier == before for column in each.columns]
        for column, each in cells:
            fate = fate_of(each, column, passes)
            is_split = sum(other == column for other, _ in cells) > 1
            # Below the middle of the cell that leaves it.
            x, half = left_of(column) + COLUMN / 2, 30
            if is_split:
                x, half = (left_of(column) + OLD / 2, 17) if fate == "check" else (x + OLD / 2 + 2, 30)
            is_read = not (fate == "check" and tier == "verify")
            arrow = f'v{BUFFER - 4}" marker-end="url(#arrow)"' if is_read else 'v9"'
            yield f'<path d="M{x:g} {y + 1}{arrow} stroke="{INK}"/>'
            look = f'fill="#ece6fb" stroke="#6f4fc4" data-layer="{layer}"'
            yield box(x - half, y + 9, 2 * half, 18, look, 9)
            if fate:
                yield box(x - half, y + 9, 2 * half, 18, f'fill="url(#dropped-{fate})"', 9)
                yield box(x - 12.5, y + 10, 25, 16, 'fill="#ece6fb"')
            yield text(x, y + 22, f"h [{column}]", "tiny", "middle")


def draw_labels() -> Iterator[str]:
    hints = {
        "draft": f"{K + 1} passes of 1 position a cycle",
        "check": f"1 pass of {K + 1} positions a cycle",
        "verify": f"1 pass of {sum(KEPT) + R} positions",
    }
    for tier, (lo, hi) in TIERS.items():
        y = top_of(tier) + height_of(tier) / 2
        yield text(20, y - 4, tier, tier, "start")
        yield text(LEFT - 16, y - 4, f"layers [{lo}, {hi})", "label", "end")
        yield text(LEFT - 16, y + 13, hints[tier], "small", "end")
    for column in range(COLUMNS):
        name = "n" if column == 0 else f"n + {column}"
        yield text(left_of(column) + COLUMN / 2, TOP - 12, name, "label strong", "middle")
    yield text(LEFT - 16, TOP - 12, "position of the sequence", "label", "end")


def draw_table(y: int) -> Iterator[str]:
    for label, cells, tier in make_table():
        yield text(LEFT - 16, y + 20, label, "label", "end")
        for column, words in cells.items():
            fill, stroke = FILL.get(tier, "#1f2328"), STROKE.get(tier, "#1f2328")
            yield box(left_of(column), y + 3, COLUMN, ROW - 7, f'fill="{fill}" stroke="{stroke}"')
            kind = "cell light" if tier == "done" else "cell"
            yield text(left_of(column) + COLUMN / 2, y + 20, words, kind, "middle")
        y += ROW
    yield text(LEFT - 16, y + 20, "KV after the round", "label", "end")
    last = ACCEPTED + 1
    width = left_of(last) - GAP - LEFT
    yield box(LEFT, y + 3, width, ROW - 7, f'fill="#ffffff" stroke="{INK}"')
    words = f"valid at every layer: n to n + {ACCEPTED}"
    yield text(LEFT + width / 2, y + 20, words, "cell", "middle")
    yield box(left_of(last), y + 3, COLUMN, ROW - 7, f'fill="url(#dropped-verify)" stroke="{LINE}"')
    yield text(LEFT - 16, y + ROW + 20, "the next round begins with", "label", "end")
    yield box(left_of(last), y + ROW + 3, COLUMN, ROW - 7, f'fill="{INK}"')
    yield text(left_of(last) + COLUMN / 2, y + ROW + 20, "v", "cell light", "middle")


def draw_pattern(tier: str, lines: str, angle: int) -> str:
    """What marks cells whose tokens the tier dropped."""
    return (
        f'<pattern id="dropped-{tier}" width="7" height="7" patternUnits="userSpaceOnUse"'
        f' patternTransform="rotate({angle})"><path d="{lines}" fill="none" stroke="{MUTED}"'
        ' stroke-width="2"/></pattern>'
    )


def draw_legend(y: int) -> Iterator[str]:
    """A line per mark."""
    for look, words in (
        (
            f'fill="url(#dropped-check)" stroke="{LINE}"',
            "for a draft that the check dropped: computed again by a later pass of this round",
        ),
        (
            f'fill="url(#dropped-verify)" stroke="{LINE}"',
            "for a token that verify dropped: computed again by the next round; nothing is erased or copied",
        ),
        (
            f'fill="none" stroke="{LINE}" stroke-dasharray="4 4"',
            f"not computed: no tier is fed the last tentative token, c{R}",
        ),
    ):
        yield box(LEFT, y - 12, 22, 15, look)
        yield text(LEFT + 30, y, words)
        y += 22


def draw() -> str:
    passes = make_passes()
    table = top_of("verify") + height_of("verify") + 18
    legend = table + (len(make_table()) + 2) * ROW + 26
    height = legend + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="13"'
        f' fill="{INK}">',
        "<title>One round of HiSpec over one KV cache and one hidden-state buffer</title>",
        "<style>.strong{font-weight:700}.small{font-size:11.5px;fill:#57606a}.tiny{font-size:11px}"
        ".number{font-weight:700}.light{fill:#ffffff}.title{font-size:17px;font-weight:700}"
        + "".join(f".{tier}{{font-weight:700;fill:{color}}}" for tier, color in STROKE.items())
        + "</style>",
        f"<defs>{draw_pattern('check', 'M0 0v7', 45)}{draw_pattern('verify', 'M0 0v7M0 0h7', 0)}"
        '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
        f' orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
        # A background of its own, so that the picture reads the same on a white and on a dark page.
        box(0.5, 0.5, WIDTH - 1, height - 1, 'fill="#ffffff" stroke="#d0d7de"', 8),
        text(20, 34, "One round over one KV cache and one hidden-state buffer", "title"),
        text(
            20,
            58,
            f"D = {D}, C = {C}, K = {K}, R = {R}, L = {L} layers. Across: positions. Down: layers, to scale,"
            " as a pass runs through them.",
        ),
        text(
            20,
            77,
            "A cell is the KV of a position at a tier's layers; its number says which pass computes it.",
        ),
        *draw_unused(passes),
        *draw_cells(passes),
        *draw_buffer(passes),
        *draw_labels(),
        *draw_table(table),
        *draw_legend(legend),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
